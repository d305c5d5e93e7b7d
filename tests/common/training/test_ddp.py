"""Laws of data-parallel training, on real ranks that talk over gloo."""

import copy
import json
import os
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common import seeds
from common.data.datasets import DataOptions, load_data
from common.data.loaders import rank_loaders
from common.data.stream import FixedBatches, GlobalBatches
from common.errors import InputError, PeerError, TrainingError
from common.group.collectives import agreed
from common.group.stop import StopAgreement
from common.identity import decisive
from common.launch.ranks import Ranks
from common.run.options import flatten
from common.seeds import LossScaler, rng_state, seed_everything, set_rng_state
from common.snapshots.snapshot_files import read
from common.training.ddp import average_in_bf16, micro_batches, warm_up
from common.training.evaluation import Evaluation, evaluate
from common.training.models import ModelOptions, build_model
from common.weights import weights_sha256
from tests.helpers.pool import Pool, call_main, in_group
from tests.helpers.training import run_training, training

CPU = torch.device("cpu")


def averaged_gradients(ranks: Ranks) -> dict[str, Tensor]:
    """Gradients of one global batch of 24 in float64, through DDP."""
    seed_everything(0)
    data = load_data(DataOptions(), 0, ranks)
    model = build_model(ModelOptions(), data.channels, 10, 8).double()
    ddp = DistributedDataParallel(model)
    batches = GlobalBatches(
        len(data.train), [24 // ranks.world_size] * ranks.world_size, 0, ranks.rank
    )
    images, labels = zip(*(data.train[key] for key in next(iter(batches))), strict=True)
    logits = ddp(torch.stack(images).double())
    nn.functional.cross_entropy(logits, torch.tensor(labels)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_averaged_gradients_are_the_full_batch_gradients(pool: Pool) -> None:
    full = pool.run(in_group, 1, averaged_gradients)[0]
    assert len(full) == 11
    for world_size in (2, 3):
        for gradients in pool.run(in_group, world_size, averaged_gradients):
            for name, expected in full.items():
                error = (gradients[name] - expected).norm() / expected.norm()
                assert error < 1e-12, f"{name} on {world_size} ranks: {error:.1e}"


def step_gradients(
    ranks: Ranks, accumulate: int, compression: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], int]:
    """Gradients of one step on a global batch of 24, and how many buckets travelled for it."""
    seed_everything(0)
    data = load_data(DataOptions(), 0, ranks)
    model = build_model(ModelOptions(), data.channels, 10, 8).to(dtype)
    ddp, travelled = DistributedDataParallel(model), 0

    def count(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal travelled
        travelled += 1
        hook = average_in_bf16 if compression == "bf16" else allreduce_hook
        return hook(group, bucket)

    ddp.register_comm_hook(None, count)
    batches = GlobalBatches(
        len(data.train), [24 // ranks.world_size] * ranks.world_size, 0, ranks.rank
    )
    images, labels = zip(*(data.train[key] for key in next(iter(batches))), strict=True)
    truth = torch.tensor(labels)
    for part, expected in micro_batches(ddp, (torch.stack(images).to(dtype), truth), accumulate):
        losses = nn.functional.cross_entropy(ddp(part), expected, reduction="none")
        (losses.sum() / len(truth)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients, travelled


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    a, b = (torch.cat([g.flatten().double() for g in of.values()]) for of in (found, expected))
    return float((a - b).norm() / b.norm())


def test_accumulated_gradients_are_the_batchs_and_travel_once(pool: Pool) -> None:
    (whole, buckets), _ = pool.run(in_group, 2, step_gradients, 1, "none", torch.float64)
    for accumulate in (2, 6):
        for parts, travelled in pool.run(
            in_group, 2, step_gradients, accumulate, "none", torch.float64
        ):
            assert travelled == buckets
            assert relative_error(parts, whole) < 1e-12


def test_compressed_gradients_are_rounded_to_bf16(pool: Pool) -> None:
    (whole, _), _ = pool.run(in_group, 2, step_gradients, 1, "none", torch.float32)
    (first, _), (second, _) = pool.run(in_group, 2, step_gradients, 1, "bf16", torch.float32)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), "every rank takes the same step"
        assert torch.equal(gradient, gradient.bfloat16().float())
    assert 1e-4 < relative_error(first, whole) < 2**-8


def test_gloos_threads_are_background_work(pool: Pool) -> None:
    for threads in pool.run(in_group, 2, policies):
        assert {policy for name, policy in threads if "gloo" in name} == {os.SCHED_BATCH}
        assert os.SCHED_OTHER in {policy for name, policy in threads if "gloo" not in name}


def policies(_ranks: Ranks) -> list[tuple[str, int]]:
    """Name and scheduling policy of every thread of this process that does not end meanwhile."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (thread / "comm").read_text()
            found.append((name, os.sched_getscheduler(int(thread.name))))
    return found


def evaluated(ranks: Ranks) -> tuple[Evaluation, bool]:
    """A model with BatchNorm whose statistics differ by rank before they are evaluated."""
    seed_everything(1)
    model = build_model(ModelOptions(norm="batch"), 1, 10, 8)
    if ranks.rank != 0:
        for buffer in model.buffers():
            buffer.add_(1)
    data = load_data(DataOptions(), 0, ranks)
    sizes = [24 // ranks.world_size] * ranks.world_size
    _, loader = rank_loaders(data, DataOptions(), sizes, 0, ranks.rank, CPU, torch.float32, Path())
    result = evaluate(model, loader, len(data.val))
    return result, all(module.training for module in model.modules())


def test_evaluation_is_exact_and_the_same_for_every_world_size(pool: Pool) -> None:
    found = [answer for world in (1, 2, 3) for answer in pool.run(in_group, world, evaluated)]
    assert all(result == found[0][0] for result, _ in found)
    assert found[0][0].total == 360, "digits keeps 360 of its 1,797 images for validation"
    assert 0 < found[0][0].correct == round(360 * found[0][0].means["accuracy"]) < 360
    assert all(training for _, training in found), "the model is left in train mode"


def losses_of_few_batches(ranks: Ranks) -> list[float]:
    """Of batches whose number no four divides: torch adds such sums up in another order."""
    losses = []
    for count in (6, 7, 11):
        for draw in range(20):
            logits = torch.randn(count, 10, generator=torch.Generator().manual_seed(draw))
            mine = FixedBatches(count, 1, ranks.rank, ranks.world_size)
            batches = [(logits[[i]], torch.tensor([i % 10])) for ((_, i),) in mine]
            losses.append(evaluate(nn.Identity(), batches, count).means["loss"])
    return losses


def test_any_number_of_batches_adds_up_to_the_same_loss(pool: Pool) -> None:
    found = [
        loss for world in (1, 2, 3) for loss in pool.run(in_group, world, losses_of_few_batches)
    ]
    assert all(losses == found[0] for losses in found)


FREE = {
    *("output_dir", "resume", "snapshot_every", "keep_snapshots", "log_every", "epoch_weights"),
    "best_by",
    "patience",
    *("device", "backend", "timeout_s", "max_steps", "global_batch_size", "batch_size_per_rank"),
    *(
        "data_path",
        "data_local",
        "download",
        "verify_images",
        "num_workers",
        "pin_memory",
    ),
    *("lesson", "show", "timeline", "memory_budget", "profile"),
    *("shard", "replicas", "tensor_parallel", "reshard_after_forward", "recompute", "dry_run"),
}
"""Options that may change on resume. The identity holds the data's fingerprint and the whole batch
size instead."""


@pytest.mark.parametrize(
    "name",
    [
        "ddp_launch",
        "ddp_spawn",
        "dp_resnet50",
        "dp_scratch",
        "model_parallel_toy",
        "checkpoint_rnn",
        "fsdp",
    ],
)
def test_every_option_that_is_not_free_makes_another_run(name: str) -> None:
    config = import_module(f"recipes.{name}.train").Config()
    for group in fields(config):
        for option in fields(getattr(config, group.name)):
            changed = copy.deepcopy(config)
            object.__setattr__(getattr(changed, group.name), option.name, "changed")
            one, two = (decisive({"recipe": name, **flatten(c)}, c) for c in (config, changed))
            assert (one == two) == (option.name in FREE), option.name


def test_a_run_without_deterministic_kernels_says_so(pool: Pool, tmp_path: Path) -> None:
    for given in (True, False):
        run = training(
            pool, 1, tmp_path / str(given), run={"deterministic": given}, optimizer={"max_steps": 1}
        )
        assert run.summary.get("deterministic", True) is given
        manifest = json.loads((run.folder / "manifest.json").read_text())
        assert manifest["determinism"]["deterministic_algorithms"] is given


def test_one_two_and_three_ranks_train_alike(pool: Pool, tmp_path: Path) -> None:
    """Every logged loss, over two epochs with momentum, weight decay and augmentation."""
    runs = [
        training(
            pool,
            world,
            tmp_path / str(world),
            run={"precision": "fp64", "log_every": 1},
            loss={"class_weights": "balanced"},
            optimizer={"epochs": 2, "lr": 0.05},
        )
        for world in (1, 2, 3)
    ]
    reference = runs[0].losses
    assert len(reference) == 28
    for run in runs[1:]:
        assert run.losses.keys() == reference.keys()
        for step, loss in run.losses.items():
            assert loss == pytest.approx(reference[step], rel=1e-9), f"step {step}"
    assert len({run.summary["val_correct"] for run in runs}) == 1


def test_channels_last_trains_alike(pool: Pool, tmp_path: Path) -> None:
    """Another order in memory, the same model; and it goes on from its own snapshot to the bit."""
    fp64 = {"precision": "fp64", "log_every": 1}
    usual, whole = (
        training(
            pool,
            2,
            tmp_path / str(last),
            run=fp64,
            optimizer={"max_steps": 8},
            model={"channels_last": last},
        )
        for last in (False, True)
    )
    assert whole.losses == pytest.approx(usual.losses, rel=1e-9)
    assert whole.sha != usual.sha, "it did compute otherwise"
    for steps in (3, 8):
        cut = training(
            pool,
            2,
            tmp_path / "cut",
            run=fp64,
            optimizer={"max_steps": steps},
            model={"channels_last": True},
        )
    assert cut.sha == whole.sha


def as_on_a_new_gpu(ranks: Ranks, arguments: list[str]) -> tuple[int, str, str]:
    """A run that takes `--precision auto` for bf16, though it computes in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run.begin", "run.folder", "run.parts"):  # not seeds: bf16 is slow on a CPU
            module = import_module(f"common.{name}")
            patch.setattr(module, "choose_precision", lambda a, _: "bf16" if a == "auto" else a)
        return call_main(ranks, "ddp_launch", arguments)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ("--model resnet18", ("bf16", True)),
        ("--model convnet", ("bf16", False)),
        ("--model resnet18 --precision fp32", ("fp32", False)),
    ],
)
def test_what_auto_became_is_recorded(
    pool: Pool, tmp_path: Path, options: str, recorded: tuple[str, bool]
) -> None:
    words = [
        *options.split(),
        *"--nproc 1 --no-portable --global-batch-size 8 --max-steps 1".split(),
    ]
    arguments = [*words, "--output-dir", str(tmp_path)]
    ((status, _, said),) = pool.run(as_on_a_new_gpu, 1, arguments)
    assert status == 0, said
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["precision"], config["channels_last"]) == recorded


def test_batch_norm_without_sync_would_not_train_alike(pool: Pool, tmp_path: Path) -> None:
    """The law above can fail: normalisation that looks at a rank's slice alone breaks it."""
    runs = [
        training(
            pool,
            world,
            tmp_path / str(world),
            run={"precision": "fp64", "log_every": 1},
            optimizer={"max_steps": 4},
            model={"norm": "batch"},
        )
        for world in (1, 2)
    ]
    assert runs[0].losses[4] != pytest.approx(runs[1].losses[4], rel=1e-9)


SHORT: dict[str, dict[str, Any]] = {
    "optimizer": {"epochs": 2},
    "model": {"dropout": 0.3, "norm": "batch"},
}


def test_resume_in_the_middle_of_an_epoch_is_exact_on_three_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    """To the bit: dropout's generators, momentum, BatchNorm, position, running loss, metrics."""
    whole = training(pool, 3, tmp_path / "whole", **SHORT, run={"log_every": 5})
    cut: dict[str, Any] = {"run": {"log_every": 5, "snapshot_every": 4}, "model": SHORT["model"]}
    kept = []
    for steps in (6, 17, None):
        optimizer = {**SHORT["optimizer"], "max_steps": steps}
        resumed = training(pool, 3, tmp_path / "cut", **cut, optimizer=optimizer)
        kept.append(len(list((tmp_path / "cut" / "snapshots").iterdir())))
    assert resumed.summary["resumed_from"] == 17
    assert resumed.sha == whole.sha
    assert resumed.losses == whole.losses
    assert resumed.metrics[-1] == whole.metrics[-1], "the epoch's mean loss goes on too"
    steps_seen = [line["step"] for line in resumed.metrics]
    assert all(a <= b for a, b in pairwise(steps_seen)), "no line is repeated"
    assert kept == [2, 3, 1], "at most three on the way, and one after all epochs"


def test_another_number_of_ranks_goes_on_at_the_same_sample(pool: Pool, tmp_path: Path) -> None:
    fp64 = {"precision": "fp64", "log_every": 1}
    whole = training(pool, 1, tmp_path / "whole", run=fp64, optimizer={"epochs": 2})
    for world, steps in ((3, 5), (2, 20), (1, None)):
        resumed = training(
            pool, world, tmp_path / "cut", run=fp64, optimizer={"epochs": 2, "max_steps": steps}
        )
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-9)
    assert resumed.metrics[-1]["train_loss"] == pytest.approx(whole.metrics[-1]["train_loss"])


def first_steps(ranks: Ranks, settled: bool, fresh_at: int) -> str:
    """Four steps of a wide model; from `fresh_at` on by a new DDP, as after a resume."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(50, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(ranks.rank))
    ddp = DistributedDataParallel(model)
    for step in range(4):
        if step in (0, fresh_at):
            ddp = DistributedDataParallel(model)
            if settled:
                warm_up(ddp, batches[0, 0], 6, torch.autocast("cpu", enabled=False))
        ddp(batches[step]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_sha256(model.state_dict())


def test_a_new_ddp_goes_on_with_the_same_bits_once_its_buckets_are_settled(pool: Pool) -> None:
    for settled in (True, False):
        whole, resumed = (
            pool.run(in_group, 3, first_steps, settled, fresh_at)[0] for fresh_at in (0, 2)
        )
        assert (whole == resumed) == settled, "without settling, a ring all-reduce rounds otherwise"


def settle_leaves_no_trace(ranks: Ranks) -> bool:
    model = build_model(ModelOptions(norm="batch", dropout=0.5), 1, 10, 8)
    ddp = DistributedDataParallel(model)
    image = torch.randn(1, 8, 8)
    before, random_before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    warm_up(ddp, image, 4, torch.autocast("cpu", enabled=False))
    same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    no_gradient = all(p.grad is None for p in model.parameters())
    return same and no_gradient and torch.equal(random_before, torch.get_rng_state())


@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_that_batch_norm_refuses_is_bad_input(compiled: bool) -> None:
    model: Any = nn.Sequential(nn.Conv2d(1, 4, 8), nn.BatchNorm2d(4))
    model = torch.compile(model) if compiled else model
    with pytest.raises(InputError, match=r"1 samples of \(1, 8, 8\): Expected more .*--norm group"):
        warm_up(model, torch.randn(1, 8, 8), 1)


def test_settling_buckets_leaves_no_trace(pool: Pool) -> None:
    torch.manual_seed(0)
    assert pool.run(in_group, 2, settle_leaves_no_trace) == [True, True]


def one_backward(ranks: Ranks) -> bool:
    DistributedDataParallel(nn.Linear(4, 4))(torch.zeros(2, 4)).sum().backward()
    return True


@pytest.mark.slow
def test_a_group_ends_cleanly_every_time(pool: Pool) -> None:
    """On torch 2.10 and 2.11 a DDP that outlives its group could deadlock, one run in twenty."""
    for _ in range(15):
        assert pool.run(in_group, 3, one_backward) == [True] * 3


def agree_on(ranks: Ranks, failing: int, kind: str) -> str:
    try:
        with agreed():
            if ranks.rank == failing:
                raise {"input": InputError, "other": OSError}[kind]("no such thing")
    except (InputError, OSError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_one_rank_finds_is_raised_on_every_rank(pool: Pool) -> None:
    assert pool.run(in_group, 3, agree_on, 1, "input") == ["InputError: rank 1: no such thing"] * 3
    others = "PeerError: rank 1 failed: no such thing"
    assert pool.run(in_group, 3, agree_on, 1, "other") == [others, "OSError: no such thing", others]
    assert pool.run(in_group, 3, agree_on, 7, "input") == ["nothing"] * 3


def stop_at(ranks: Ranks, steps: int) -> tuple[int, int]:
    """The step after which this rank stops, and how many agreements it took to get there."""
    stop = StopAgreement(interval_s=0.2)
    calls, original = 0, torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        for step in range(1, steps):
            if ranks.rank == 1 and step == 300:
                stop.came.append(15)
            torch.zeros(200, 200).sum()
            if stop.after(step):
                return step, calls
        return -1, calls
    finally:
        torch.distributed.all_reduce = original


def test_ranks_stop_after_the_same_step_without_a_collective_a_step(pool: Pool) -> None:
    answers = pool.run(in_group, 3, stop_at, 200_000)
    assert len(set(answers)) == 1
    step, agreements = answers[0]
    assert step >= 300
    assert agreements < step / 10


def test_rng_state_goes_through_a_file(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float, float]:
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(),
            float(torch.rand(())),
        )

    seed_everything(3, 1)
    draw()
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draw()
    seed_everything(4)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected


def test_unwrapped_weights_give_the_same_outputs_in_a_plain_process(
    pool: Pool, tmp_path: Path
) -> None:
    run = training(pool, 2, tmp_path / "run", optimizer={"epochs": 2})
    weights = torch.load(run.folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == run.sha
    model = build_model(ModelOptions(), 1, 10, 8)
    model.load_state_dict(weights)
    model.eval()
    data = load_data_alone()
    images, labels = zip(*(data.val[(0, i)] for i in range(len(data.val))), strict=True)
    with torch.no_grad():
        correct = int((model(torch.stack(images)).argmax(1) == torch.tensor(labels)).sum())
    assert correct == run.summary["val_correct"]


def load_data_alone() -> Any:
    return in_group(Ranks(), lambda ranks: load_data(DataOptions(), 0, ranks))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_mixed_precision_trains_and_resumes_exactly(
    pool: Pool, tmp_path: Path, precision: str
) -> None:
    run = {"precision": precision}
    whole = training(pool, 2, tmp_path / "whole", run=run, optimizer={"max_steps": 12})
    for steps in (5, 12):
        cut = training(pool, 2, tmp_path / "cut", run=run, optimizer={"max_steps": steps})
    assert cut.sha == whole.sha
    assert cut.summary["train_loss"] < 2.4


def overflowing(ranks: Ranks, folder: Path) -> bool:
    """Training with fp16 whose first gradients overflow, as the loss is scaled too far."""
    with patch.object(seeds, "LossScaler", partial(LossScaler, init_scale=2.0**60)):
        run = {"precision": "fp16"}
        return run_training(ranks, folder, {"run": run, "optimizer": {"max_steps": 2}})


def test_a_first_step_that_overflows_leaves_nothing_behind(pool: Pool, tmp_path: Path) -> None:
    """A fused optimizer would keep momenta of memory that nobody wrote."""
    pool.run(overflowing, 2, tmp_path / "run")
    (path,) = (tmp_path / "run" / "snapshots").iterdir()
    parts = read(path)["parts"]
    assert parts["optimizer"]["state"] == {}
    assert parts["scaler"]["scale"] == 2.0**58


def test_a_loss_that_is_not_finite_stops_every_rank_and_spares_the_snapshots(
    pool: Pool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "run": {"snapshot_every": 1, "log_every": 1000},
        "optimizer": {"lr": 1e30},
    }
    with pytest.raises(TrainingError, match=r"not finite on rank 0, 1 by step 2.*step_00000001"):
        training(pool, 2, tmp_path / "run", **options)
    (snapshot,) = (tmp_path / "run" / "snapshots").iterdir()
    assert read(snapshot)["step"] == 1
    with pytest.raises((TrainingError, ValueError), match="not finite"):
        training(pool, 2, tmp_path / "at the end", optimizer={"lr": 1e30, "max_steps": 1})
    with pytest.raises(TrainingError, match="not finite on rank 0, 1 by step 5"):
        training(pool, 2, tmp_path / "logged", run={"log_every": 5}, optimizer={"lr": 1e30})
