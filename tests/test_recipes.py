"""Laws of the recipes of one process and of pipelines; each one's command line at the end."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from common import driver
from common.data.datasets import DataOptions, digits_data
from common.data.stream import Key, Samples, make_loader
from common.data.workers import done, recommend
from common.errors import InputError
from common.files import weights_sha256
from common.group import rendezvous
from common.group.devices import choose_devices
from common.group.host import usable_cores
from common.launch.ranks import Ranks
from common.run.options import RunOptions
from common.throughput import samples_per_s
from common.training.models import ModelOptions, build_model, load_matching
from recipes.checkpoint_rnn import adding as rnn
from recipes.checkpoint_rnn import plan
from recipes.checkpoint_rnn.plan import search
from recipes.dp_scratch import train as dp_scratch
from recipes.dp_scratch.lenet import initialize
from recipes.dp_scratch.lesson import show_diversity
from recipes.model_parallel_toy import train as parallel
from recipes.model_parallel_toy.pipeline import Pipeline
from recipes.model_parallel_toy.split import (
    LAYERS,
    ParallelOptions,
    Split,
    WholeModelOptions,
    build,
    cut,
    devices_of_copy,
    generated_points,
)
from recipes.tune_loader.streams import make_item_loader, make_stream_loader
from tests.conftest import ROOT, Recipe, free_port
from tests.pool import Pool, call_main, in_group
from tests.test_bad_input import assert_refused

CPU = torch.device("cpu")
LIMIT = 1_200_000_000


# dp_scratch


class LeNet(nn.Module):
    """The same network by torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(self.conv1(images).relu(), 2)
        x = nn.functional.avg_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(50, 1, 28, 28, dtype=torch.float64, generator=generator),
            torch.randint(0, 10, (50,), generator=generator),
        )
        for _ in range(count)
    ]


def by_hand(devices: int, steps: int = 20) -> list[dict[str, Tensor]]:
    """Every device's parameters after some steps; 50 samples are not divided by 3 devices."""
    torch.manual_seed(0)
    replicas = dp_scratch.Replicas(initialize(torch.float64), [CPU] * devices)
    for images, labels in batches(steps):
        dp_scratch.train_step(replicas, images, labels, lr=0.1)
    return replicas.copies


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def test_by_hand_on_several_devices_is_one_device_and_torchs_own_layers() -> None:
    model = LeNet().double()
    torch.manual_seed(0)
    model.load_state_dict(initialize(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches(20):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    theirs = dict(model.named_parameters())
    for devices in (1, 2, 3):
        for copy_ in by_hand(devices):
            assert largest_difference(copy_, theirs) < 1e-10


def test_without_the_all_reduce_the_copies_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_scratch, "all_reduce", lambda tensors: None)
    first, second = by_hand(2, steps=2)
    assert largest_difference(first, second) > 1e-4


def test_show_prints_what_each_device_holds_before_and_after(pool: Pool, tmp_path: Path) -> None:
    options = ["--show", "--devices", "cpu", "cpu", "cpu", "--output-dir", str(tmp_path / "run")]
    ((status, printed, said),) = pool.run(call_main, 1, "dp_scratch", options)
    assert status == 0, said
    assert not (tmp_path / "run").exists(), "it trains nothing"
    steps = re.split(r"(?m)^(?=before|after|the gradient)", printed)[1:]
    held = [[json.loads(line) for line in re.findall(r"\[.*\]", step)] for step in steps]
    (batch,), parts, gradients, sums, (whole,) = held
    assert [row for part in parts for row in part] == batch, "the parts are the batch, in its order"
    assert [len(part) for part in parts] == [3, 2, 2]
    assert gradients == [[sum(column) for column in zip(*part, strict=True)] for part in parts]
    assert sums == [whole] * 3 == [[sum(column) for column in zip(*batch, strict=True)]] * 3


def test_a_larger_batch_of_copies_brings_nothing(tmp_path: Path) -> None:
    train = digits_data(DataOptions(image_size=28), 0).train

    def load(size: int) -> Any:
        loaded = train.__getitems__([(0, index) for index in range(size)])
        return SimpleNamespace(samples=256), [loaded], None

    torch.manual_seed(0)
    show_diversity(dp_scratch.Replicas(initialize(torch.float32), [CPU]).copies[0], load, tmp_path)
    found = json.loads((tmp_path / "diversity.json").read_text())
    different, copied = found["different samples"], found["one sample copied"]
    assert different["1"] < different["8"] - 0.2 < different["64"] - 0.4 < 0.6
    assert list(copied.values()) == pytest.approx([different["1"]] * 3, abs=1e-5)


# model_parallel_toy


def chain() -> nn.Sequential:
    """Four layers of different size, in float64."""
    torch.manual_seed(0)
    sizes = (10, 12, 8, 9, 5)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 10, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 5, (16,), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole_gradients() -> tuple[float, dict[str, Tensor]]:
    model, (inputs, labels) = chain(), batch()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_split_and_micro_batches_give_the_whole_models_gradients(
    stages: int, micro_batches: int
) -> None:
    loss, expected = whole_gradients()
    model, (inputs, labels) = chain(), batch()
    split = Split(cut(model, stages, inputs[:1]), [CPU] * stages, micro_batches)
    assert split.backward(inputs, labels).item() == pytest.approx(loss, rel=1e-12)
    assert largest_difference(gradients(model), expected) < 1e-10


def split_copies(ranks: Ranks, micro_batches: int) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of all copies, and this copy's gradients; two stages in each process."""
    model, (inputs, labels) = chain(), batch()
    stages = cut(model, 2, inputs[:1])
    split = Split(stages, [CPU] * 2, micro_batches, copies=ranks.world_size)
    share = slice(ranks.rank, None, ranks.world_size)
    loss = split.backward(inputs[share], labels[share])
    torch.distributed.all_reduce(loss)
    return loss.item() / ranks.world_size, gradients(model)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_copies_of_a_split_model_average_to_the_whole_models_gradients(
    pool: Pool, micro_batches: int
) -> None:
    loss, expected = whole_gradients()
    for copies in (2, 4):
        for found, own in pool.run(in_group, copies, split_copies, micro_batches):
            assert found == pytest.approx(loss, rel=1e-12)
            assert largest_difference(own, expected) < 1e-10


def test_copies_on_one_host_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(gpus: int, copies: int, stages: int = 2) -> list[str]:
        """The numbers of the GPUs of each copy's stages."""
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(driver, "usable_gpus", lambda: None)
        all_ranks = [Ranks(rank, rank, copies, copies) for rank in range(copies)]
        options = ParallelOptions(stages=stages)
        found = [devices_of_copy(options, "auto", ranks) for ranks in all_ranks]
        return ["".join(str("-" if d.index is None else d.index) for d in own) for own in found]

    assert devices(gpus=4, copies=2) == ["01", "23"]
    assert devices(gpus=2, copies=2) == ["00", "11"]
    assert devices(gpus=1, copies=2) == ["00", "00"]
    assert devices(gpus=2, copies=4) == ["00", "00", "11", "11"]
    assert devices(gpus=0, copies=2) == ["--", "--"]
    assert devices(gpus=2, copies=1, stages=4) == ["0011"]
    assert devices(gpus=3, copies=1) == ["01"]
    # Copies that use unlike numbers of GPUs would hang: DDP makes a bucket per device.
    assert devices(gpus=3, copies=2) == ["00", "11"]
    assert devices(gpus=4, copies=3) == ["00", "11", "22"]
    assert devices(gpus=5, copies=2) == ["01", "23"]


def piped(
    ranks: Ranks, schedule: str, micro_batches: int, copies: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of this rank's stage by their names in the whole model."""
    mesh = init_device_mesh(
        "cpu", (copies, ranks.world_size // copies), mesh_dim_names=("data", "stage")
    )
    model, (inputs, labels) = chain(), batch()
    pipe = Pipeline(cut(model, mesh.size(1), inputs[:1]), schedule, micro_batches, CPU, mesh)
    share = slice(mesh.get_local_rank("data"), None, copies)
    loss = pipe.backward(inputs[share], labels[share])
    torch.distributed.all_reduce(loss)
    return loss.item() / ranks.world_size, gradients(model)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("copies", "stages"), [(1, 2), (2, 2), (1, 4)])
def test_every_schedule_gives_the_whole_models_gradients(
    pool: Pool, schedule: str, copies: int, stages: int
) -> None:
    loss, expected = whole_gradients()
    for micro_batches in (1, 2, 4):
        if schedule == "1f1b" and 1 < micro_batches < stages:
            continue  # refused: see ParallelOptions
        try:
            found = pool.run(in_group, copies * stages, piped, schedule, micro_batches, copies)
        except InputError:  # torch 2.10 refuses what torch 2.15 does
            assert micro_batches < stages
            assert torch.__version__ < "2.15"
            continue
        assert found[0][0] == pytest.approx(loss, rel=1e-12)
        for rank, (_, own) in enumerate(found):
            assert own, f"rank {rank} holds a stage"
            part = {name: expected[name] for name in own}
            assert largest_difference(own, part) < 1e-10
        assert set().union(*(own for _, own in found)) == expected.keys()


def test_the_cut_balances_the_work() -> None:
    model = build_model(ModelOptions(model="resnet50"), 3, 10, 64)
    stages = cut(model, 2, torch.zeros(1, 3, 64, 64))
    sizes = [len(list(stage.parameters())) for stage in stages]
    assert sum(sizes) == len(list(model.parameters()))
    assert min(sizes) > 40, "neither all at the front nor all at the back"
    images = torch.randn(2, 3, 64, 64)
    model.eval()
    assert torch.equal(stages[1].eval()(stages[0].eval()(images)), model(images))
    with pytest.raises(InputError, match="more than the 19 layers"):
        cut(model, 20, images)
    with pytest.raises(InputError, match="more than the 2 layers"):
        cut(build(WholeModelOptions(), generated_points(0)), 3, torch.zeros(1, 10))
    assert LAYERS == {"toy": 2, "resnet50": 19}, "what is refused before a process starts"


# checkpoint_rnn


def recurrent_gradients(segments: int) -> dict[str, Tensor]:
    """Gradients in float64 of two layers with dropout between them."""
    torch.manual_seed(0)
    sequence = rnn.SequenceOptions(length=50, input_size=3)
    model = rnn.AddingRNN(rnn.RecurrentOptions(8, layers=2, dropout=0.5), sequence).double()
    for name, parameter in model.named_parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
        if "bias_ih" in name:  # what the first segment saw must still matter at the end
            parameter.data[8:16] = 5
    inputs = torch.rand(6, 50, 3, dtype=torch.float64)
    nn.functional.mse_loss(model(inputs, segments), rnn.targets(inputs)).backward()
    return gradients(model)


def relative_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Of the parameter whose gradient differs most, as a share of its norm."""
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("segments", [2, 7, 49, 50])
def test_recomputed_gradients_are_the_plain_ones_with_dropout(segments: int) -> None:
    assert relative_difference(recurrent_gradients(segments), recurrent_gradients(1)) < 1e-12


def test_dropout_drawn_otherwise_in_the_backward_pass_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful(*arguments: Any, **options: Any) -> Any:
        return checkpoint(*arguments, **{**options, "preserve_rng_state": False})

    monkeypatch.setattr(rnn, "checkpoint", forgetful)
    assert relative_difference(recurrent_gradients(7), recurrent_gradients(1)) > 0.1


def test_the_search_takes_the_fastest_that_fits_and_knows_the_least() -> None:
    measured = []

    def probe(segments: int) -> tuple[int, float] | None:
        """Memory of a segment and of the states; recomputing all but the last segment."""
        measured.append(segments)
        memory = 1000 * 400 // segments + 1000 * segments
        return None if memory > 300_000 else (memory, 2 - 1 / segments + 0.001 * segments)

    assert {f["segments"] for f in search(400, 70_000, probe)} >= {20, 40, 10, 5}
    assert 1 not in measured, "which would take six times the budget"
    everything = search(400, 10**9, probe)
    assert min(everything, key=lambda f: float(f["bytes"]))["segments"] == 20
    assert 1 not in {f["segments"] for f in everything}, "memory ran out there"


@pytest.mark.parametrize(
    ("said", "ran_out"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_a_lack_of_memory_is_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, said: str, ran_out: bool
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(plan, "train_step", fail)
    monkeypatch.setattr(plan, "set_determinism", lambda **_: None)  # it is the tests' own
    monkeypatch.setattr(plan, "seed_everything", lambda *_: None)
    sizes = rnn.SequenceOptions(length=8, train_samples=2), rnn.RecurrentOptions(2), RunOptions()
    if ran_out:
        assert plan.step_cost(*sizes, 2, CPU, 2) is None
    else:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            plan.step_cost(*sizes, 2, CPU, 2)


# dp_resnet50


def test_an_unpacked_dataparallel_checkpoint_predicts_the_same_on_a_cpu(tmp_path: Path) -> None:
    options = ModelOptions(model="resnet18")
    model = build_model(options, 1, 10, 8)
    model(torch.randn(8, 1, 8, 8))  # BatchNorm's statistics are part of it
    wrapped = nn.DataParallel(model).eval()
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    torch.save(wrapped.state_dict(), tmp_path / "wrapped.pt")
    plain = build_model(options, 1, 10, 8).eval()
    _, left_out = load_matching(plain, tmp_path / "wrapped.pt")
    assert not left_out
    images = torch.randn(16, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain(images), wrapped(images))


def test_devices_are_taken_as_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(gpus: int, given: Any, device: str, **more: int) -> list[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(driver, "usable_gpus", lambda: None)
        return [str(found) for found in choose_devices(given, device, **more)]

    def chosen(device: str, ids: tuple[int, ...] | None, gpus: int) -> list[str]:
        return choose(gpus, ids, device)

    assert chosen("auto", None, 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert chosen("auto", (2, 0), 3) == ["cuda:2", "cuda:0"]
    assert chosen("auto", None, 0) == ["cpu"]
    for device, ids, gpus in (("auto", (3,), 3), ("auto", (1, 1), 3), ("cpu", (0,), 3)):
        with pytest.raises(InputError, match="--device-ids"):
            chosen(device, ids, gpus)

    def named(*names: str, gpus: int = 2, device: str = "auto") -> list[str]:
        return choose(gpus, names or None, device, on_cpu=2)

    assert named() == ["cuda:0", "cuda:1"]
    assert named(gpus=0) == ["cpu", "cpu"]
    assert named("cuda:1", "cuda:0") == ["cuda:1", "cuda:0"]
    assert named("cpu", "cpu", "cpu") == ["cpu"] * 3
    for names in (("cuda:2",), ("cuda",), ("gpu",), ("cuda:-1",)):
        with pytest.raises(InputError, match="is not there"):
            named(*names)
    with pytest.raises(InputError, match="all cpu or all cuda"):
        named("cpu", "cuda:0")


# All: interrupted and resumed, bad input, and the real command lines

SMALL = {
    "dp_resnet50": "--model resnet18 --global-batch-size 480 --epochs 2 --cpu-threads 1",
    "dp_scratch": "--devices cpu cpu cpu --no-lesson --global-batch-size 240 --epochs 2",
    "model_parallel_toy": "--epochs 2",
    "checkpoint_rnn": "--length 20 --train-samples 320 --val-samples 64 --epochs 2 --layers 2 "
    "--dropout 0.5 --segments 3",
    "fsdp": "--nproc 1 --context 512 --global-batch-size 64 --layers 1 --width 16 --epochs 1",
}


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("dp_resnet50", "fsdp") else n for n in SMALL],
)
def test_interrupted_and_resumed_is_uninterrupted(pool: Pool, tmp_path: Path, name: str) -> None:
    def run(folder: str, *more: str) -> dict[str, Any]:
        arguments = [*SMALL[name].split(), *more, "--output-dir", str(tmp_path / folder)]
        ((status, _, said),) = pool.run(call_main, 1, name, arguments)
        assert status == 0, said
        return summary(tmp_path / folder)

    whole = run("whole")
    first = run("cut", "--max-steps", "3")
    cut = run("cut")
    assert (first["steps"], cut["resumed_from"]) == (3, 3)
    assert cut["weights_sha256"] == whole["weights_sha256"] != first["weights_sha256"]
    for key in ("val_loss", "val_correct"):  # fsdp counts no hits
        assert cut.get(key) == whole.get(key)
    weights = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert weights
    assert not any(key.startswith("module.") for key in weights)


def train_pipeline(
    ranks: Ranks, folder: Path, max_steps: int | None, data_parallel: int, schedule: Any = "1f1b"
) -> None:
    """model_parallel_toy as one rank of copies of two stages."""
    default = parallel.Config()
    parallel.train(
        parallel.Config(
            run=RunOptions(output_dir=folder),
            optimizer=replace(default.optimizer, epochs=2, max_steps=max_steps),
            parallel=ParallelOptions(
                schedule=schedule, data_parallel=data_parallel, timeline=False
            ),
        ),
        ranks,
    )


@pytest.mark.parametrize(
    ("schedule", "processes"), [pytest.param("1f1b", 4, marks=pytest.mark.slow), ("micro", 2)]
)
def test_an_interrupted_pipeline_resumes_every_stage(
    pool: Pool, tmp_path: Path, schedule: str, processes: int
) -> None:
    pool.run(train_pipeline, processes, tmp_path / "whole", None, 2, schedule)
    pool.run(train_pipeline, processes, tmp_path / "cut", 19, 2, schedule)
    pool.run(train_pipeline, processes, tmp_path / "cut", None, 2, schedule)
    whole, cut = summary(tmp_path / "whole"), summary(tmp_path / "cut")
    assert cut["resumed_from"] == 19, "in the middle of the second epoch"
    assert cut["weights_sha256"] == whole["weights_sha256"]
    assert cut["val_correct"] == whole["val_correct"]
    pool.run(train_pipeline, processes // 2, tmp_path / "half", 19, 1, schedule)
    with pytest.raises(InputError, match="of another run"):
        pool.run(train_pipeline, processes, tmp_path / "half", None, 2, schedule)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("model_parallel_toy", "--stages 3", "more than the 2 layers"),
        ("model_parallel_toy", "--schedule gpipe --stages 99", "2 layers of --model toy"),
        (
            "model_parallel_toy",
            "--schedule micro --micro-batches 5 --global-batch-size 96",
            "divided by .* 5 micro",
        ),
        ("model_parallel_toy", "--schedule split --micro-batches 2", "split has no micro-batches"),
        ("model_parallel_toy", "--schedule 1f1b --stages 4 --micro-batches 2", "at least as many"),
        ("model_parallel_toy", "--devices cuda:7 cpu", "cuda:7 is not there"),
        ("model_parallel_toy", "--devices cpu", "1 --devices for 2 --stages"),
        ("model_parallel_toy", "--devices cpu cpu --data-parallel 2", "leave it out with"),
        ("model_parallel_toy", "--nproc 2", "needs one process, whatever the number of devices"),
        ("model_parallel_toy", "--data-parallel 2 --nproc 4", "needs 2 processes"),
        (
            "model_parallel_toy",
            "--data-parallel 3 --global-batch-size 64",  # before a process starts
            "divided by 3 copies x 1 micro-batches: give 63 or 66",
        ),
        ("model_parallel_toy", "--schedule gpipe --nproc 3", "needs 2 processes"),
        ("dp_scratch", "--devices cpu cpu --global-batch-size 1", "less than 2 devices"),
        ("dp_scratch", "--devices cuda:9", "cuda:9 is not there"),
        ("dp_scratch", "--image-size 8", "grey images of 28 px"),
        ("dp_resnet50", "--device-ids 0", "--device-ids cuda:0 is not there: .* sees no GPU"),
        ("dp_resnet50", "--nproc 2", "needs one process"),
        ("checkpoint_rnn", "--segments 401", "more than the 400 time steps"),
        ("checkpoint_rnn", "--segments 0", "--segments must be at least 1"),
        ("checkpoint_rnn", "--segments auto", "--memory-budget BYTES belong together"),
        pytest.param(
            *("checkpoint_rnn", "--length 8 --segments auto --memory-budget 9"),
            "any number of segments: give about",
            marks=pytest.mark.slow,
        ),
        ("checkpoint_rnn", "--compare --segments some", "segments"),
        ("tune_loader", "--global-batch-size 5000", "more than the 1437 samples"),
        ("tune_loader", "--rounds 0", "--rounds must be at least 1"),
    ],
)
def test_options_that_cannot_work(
    pool: Pool, tmp_path: Path, name: str, options: str, says: str
) -> None:
    assert_refused(pool, says, *options.split(), "--output-dir", tmp_path / "run", name=name)


def as_two_tasks(ranks: Ranks, name: str) -> tuple[int, str, str]:
    """main() as a launcher of two processes would start it."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(free_port())),
        ):
            patch.setenv(variable, value)
        patch.setattr(rendezvous, "_REFUSAL_TIMEOUT_S", 1.0)  # the other task never comes
        return call_main(ranks, name, [])


def test_one_process_is_not_started_twice(pool: Pool) -> None:
    ((status, _, said),) = pool.run(as_two_tasks, 1, "checkpoint_rnn")
    assert status == 2
    assert "needs one process, but" in said
    assert "started 2" in said


@pytest.mark.slow
def test_a_budget_is_kept_where_the_system_allows_no_more(recipe: Recipe) -> None:
    """A limit on the process (RLIMIT_DATA) under which the plain run dies, and auto trains."""
    options = (
        "--length",
        "1000",
        "--hidden-size",
        "96",
        "--global-batch-size",
        "128",
        "--train-samples",
        "128",
        "--val-samples",
        "64",
        "--epochs",
        "1",
    )
    budget = 150_000_000

    def limited(folder: str, *more: str) -> Any:
        command = recipe.command("checkpoint_rnn", *options, *more, folder=folder)
        process = recipe.start("prlimit", f"--data={LIMIT}", *command)
        return recipe.finish(process, recipe.tmp_path / folder)

    plain = limited("plain")
    assert plain.status == 1
    assert "memory" in plain.errors[0]
    auto = limited("auto", "--segments", "auto", "--memory-budget", str(budget)).assert_ok()
    assert 1 < auto.summary["segments"] < 1000
    assert 0 < auto.summary["training_memory_bytes"] <= budget


@pytest.mark.slow
def test_auto_measures_once_and_changes_no_bit(pool: Pool, tmp_path: Path) -> None:
    def run(folder: str, *more: str) -> dict[str, Any]:
        arguments = ["--nproc", "1", "--epochs", "2", *more, "--output-dir", str(tmp_path / folder)]
        ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", arguments)
        assert status == 0, said
        return summary(tmp_path / folder)

    plain = run("plain")
    run("auto", "--num-workers", "auto", "--max-steps", "3")
    answer = json.loads((tmp_path / "auto" / "loader.json").read_text())
    assert 0 <= answer["num_workers"] <= usable_cores()
    assert all(speed > 0 for speed in answer["samples_per_s_a_rank"].values())
    changed = {**answer, "num_workers": 1}
    (tmp_path / "auto" / "loader.json").write_text(json.dumps(changed))
    auto = run("auto", "--num-workers", "auto")
    assert auto["weights_sha256"] == plain["weights_sha256"]
    kept = json.loads((tmp_path / "auto" / "loader.json").read_text())
    assert kept == changed, "a resumed run keeps the answer"


def test_the_recommendation_is_the_smallest_that_nothing_beats() -> None:
    assert recommend({0: 100.0, 1: 90.0, 2: 99.0})[0] == 0
    assert recommend({0: 100.0, 1: 103.0, 2: 104.0})[0] == 0, "within noise"
    assert recommend({0: 100.0, 1: 180.0, 2: 300.0, 3: 310.0, 4: 250.0})[0] == 2
    number, why = recommend({0: 100.0, 1: 80.0, 2: 160.0})
    assert (number, why) == (2, "the fastest, 1.6 times loading in the training process")
    assert not done({0: 100.0, 1: 90.0})
    assert done({0: 100.0, 1: 90.0, 2: 99.0})
    assert not done({0: 100.0, 1: 90.0, 2: 150.0})


class Slow(Samples):
    """A sample takes two milliseconds of waiting, as for a disk."""

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        time.sleep(0.002 * len(keys))
        return super().__getitems__(keys)


def test_what_is_measured_is_loading_and_not_what_was_loaded_before() -> None:
    """200 samples of 2 ms by two processes take 0.2 s: none may be ready when the clock starts."""
    samples = Slow([(torch.zeros(1), 0)], [0] * 200, 0)
    epoch = [[(0, index) for index in range(start, start + 10)] for start in range(0, 200, 10)]
    for workers, ideal in ((0, 500), (2, 1000)):
        for make in (make_loader, make_stream_loader, make_item_loader):
            speed = samples_per_s(partial(make, samples, epoch, num_workers=workers), CPU)
            assert 0 < speed <= ideal


@pytest.mark.parametrize("style", ["map", "stream", "items"])
def test_tune_loader_measures_every_style(pool: Pool, tmp_path: Path, style: str) -> None:
    options = "--global-batch-size 32 --samples 64 --max-workers 1 --rounds 2 --device cpu --style"
    arguments = [*options.split(), style, "--output-dir", str(tmp_path)]
    ((status, _, said),) = pool.run(call_main, 1, "tune_loader", arguments)
    assert status == 0, said
    found = json.loads((tmp_path / "loader.json").read_text())
    assert (found["style"], found["samples"], found["pin_memory"]) == (style, 64, False)
    speeds = found["samples_per_s"]["pageable"]
    assert {number: len(rounds) for number, rounds in speeds.items()} == {"0": 2, "1": 2}
    assert all(speed > 0 for rounds in speeds.values() for speed in rounds)


@pytest.mark.slow
def test_every_recipe_through_the_front_door(recipe: Recipe) -> None:
    """The real command lines, in fresh processes, with the files of the contract."""
    for name, options in SMALL.items():
        result = recipe(name, *options.split(), folder=name).assert_ok()
        assert f"{name}: world_size 1 (launcher: none), device cpu" in result.stdout
        assert_record(result.folder)


@pytest.mark.slow
def test_a_pipeline_through_the_front_door(recipe: Recipe) -> None:
    options = ("--schedule", "gpipe", "--max-steps", "20")
    result = recipe("model_parallel_toy", *options).assert_ok()
    assert "world_size 2 (launcher: recipes)" in result.stdout
    assert_record(result.folder)
    work = json.loads((result.folder / "timeline.json").read_text())
    assert {(w["stage"], w["kind"], w["micro_batch"]) for w in work} == {
        (stage, kind, n) for stage in (0, 1) for kind in ("forward", "backward") for n in range(4)
    }
    at = {(w["stage"], w["kind"], w["micro_batch"]): w for w in work}
    for n in range(4):
        assert at[0, "forward", n]["end_s"] <= at[1, "forward", n]["start_s"]
        assert at[1, "backward", n]["end_s"] <= at[0, "backward", n]["start_s"]
    for stage in (0, 1):
        own = sorted((w["start_s"], w["end_s"]) for w in work if w["stage"] == stage)
        assert all(end <= start for (_, end), (start, _) in pairwise(own)), "one thing at a time"
    assert (result.folder / "timeline.png").stat().st_size > 5000
    whole = recipe("model_parallel_toy", *options[2:], folder="whole").assert_ok()
    copies = ("--schedule", "micro", "--data-parallel", "2", *options[2:])
    split = recipe("model_parallel_toy", *copies, folder="copies").assert_ok()
    assert "world_size 2 (launcher: recipes)" in split.stdout
    for step, loss in whole.losses.items():
        assert result.losses[step] == pytest.approx(loss, rel=1e-4)
        assert split.losses[step] == pytest.approx(loss, rel=1e-4)
    assert split.summary["val_correct"] == whole.summary["val_correct"]


def assert_record(folder: Path) -> None:
    for file in ("config.json", "manifest.json", "metrics.jsonl"):
        assert (folder / file).is_file(), file
    assert list((folder / "snapshots").glob("step_*.pt"))
    assert list((folder / "tensorboard").iterdir())
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == summary(folder)["weights_sha256"]


@pytest.mark.slow
def test_compare_writes_a_table_and_a_figure(recipe: Recipe) -> None:
    result = recipe(
        "tune_loader", "--compare", "--compare-rounds", "1", "--max-workers", "1", "--samples", "64"
    ).assert_ok()
    assert "loading processes" in result.stdout
    found = json.loads((result.folder / "comparison.json").read_text())
    assert [row[1] for row in found["tables"][0]["rows"]] == [0, 1]
    assert found["about"]["torch"] == torch.__version__
    assert (result.folder / "comparison.png").stat().st_size > 5000
    again = recipe("tune_loader", "--compare")
    assert (again.status, len(again.errors)) == (2, 1)
    assert "already holds comparison.json" in again.errors[0]
    none = recipe("ddp_spawn", "--compare", folder="none")
    assert (none.status, len(none.errors)) == (2, 1)
    assert "has no comparison" in none.errors[0]


def test_the_same_command_after_a_crash_before_the_first_snapshot(
    pool: Pool, tmp_path: Path
) -> None:
    arguments = [*SMALL["dp_scratch"].split(), "--max-steps", "2", "--output-dir", str(tmp_path)]
    assert pool.run(call_main, 1, "dp_scratch", arguments)[0][0] == 0
    first = summary(tmp_path)
    for snapshot in (tmp_path / "snapshots").iterdir():
        snapshot.unlink()
    ((status, _, said),) = pool.run(call_main, 1, "dp_scratch", arguments)
    assert status == 0, said
    assert summary(tmp_path)["weights_sha256"] == first["weights_sha256"]


@pytest.mark.slow
def test_a_compiled_model_trains_alike_and_goes_on_to_the_bit(recipe: Recipe) -> None:
    """Its weights have the names of the model that was compiled."""
    options = (
        "ddp_launch",
        "--nproc",
        "2",
        "--precision",
        "fp64",
        "--log-every",
        "1",
        "--epochs",
        "2",
    )
    usual = recipe(*options, folder="usual").assert_ok()
    whole = recipe(*options, "--compile", folder="whole").assert_ok()
    assert whole.losses == pytest.approx(usual.losses, rel=1e-9)
    assert whole.losses != usual.losses, "it did compute otherwise"
    names = [list(torch.load(r.folder / "model.pt", weights_only=True)) for r in (usual, whole)]
    assert names[0] == names[1]
    recipe(*options, "--compile", "--max-steps", "17", folder="cut").assert_ok()
    assert recipe(*options, "--compile", folder="cut").assert_ok().sha == whole.sha
    shards = (
        "ddp_launch",
        "--virtual-ranks",
        "2",
        "--compile",
        "--dropout",
        "0.3",
        "--epochs",
        "1",
    )
    on = [recipe(*shards, "--nproc", n, folder=f"on {n}").assert_ok().sha for n in ("1", "2")]
    assert on[0] == on[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp_launch", "--epochs 1"),
        ("dp_resnet50", "--model resnet18 --max-steps 2"),
        ("dp_scratch", "--epochs 1"),
        ("model_parallel_toy", "--model toy --max-steps 2"),
        ("checkpoint_rnn", "--length 64 --hidden-size 8"),
        ("fsdp", "--layers 1 --width 32 --context 16"),
    ],
)
def test_every_comparison(recipe: Recipe, name: str, options: str) -> None:
    """Far too short for its figures to mean anything: that it measures, draws and tells."""
    command = recipe.command(name, "--compare", *options.split(), "--compare-rounds", "1")
    result = recipe.finish(recipe.start(*command), recipe.tmp_path / "run").assert_ok()
    found = json.loads((result.folder / "comparison.json").read_text())
    assert len(found["tables"][0]["rows"]) > 1
    assert (result.folder / "comparison.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reaches"),
    [
        ("dp_resnet50", 0.93),
        ("dp_scratch", 0.97),
        ("model_parallel_toy", 0.95),
        ("checkpoint_rnn", 0.6),
        ("tune_loader", None),
    ],
)
def test_make_run_with_its_defaults(recipe: Recipe, name: str, reaches: float | None) -> None:
    folder = recipe.tmp_path / "run"
    process = recipe.start(
        "make",
        "-s",
        "-C",
        ROOT,
        "run",
        f"RECIPE={name}",
        f"PYTHON={sys.executable}",
        f"ARGS=--output-dir {folder}",
    )
    result = recipe.finish(process, folder).assert_ok()
    if reaches is None:
        assert "recommended: --num-workers" in result.stdout
        return
    result.assert_bits_of_the_record()
    assert result.summary["val_accuracy"] >= reaches
    assert_record(folder)
    if name == "checkpoint_rnn":
        assert result.summary["val_loss"] < 0.02, "predicting the mean gives 1/6"
    if name == "dp_resnet50":
        assert "replicates nothing" in result.stdout
        assert "32 of 32 predictions the same" in result.stdout
    if name == "dp_scratch":
        assert (folder / "diversity.json").is_file()
        assert "one sample copied: batch 1 0." in result.stdout
        lesson = json.loads((folder / "lesson.json").read_text())
        assert all(c["32"][-1] > c["512"][-1] + 0.1 for c in lesson.values())
        assert (folder / "lesson.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reaches"),
    [("--seed 2", 0.6), ("--seed 0 --model resnet18 --lr 0.05 --weight-decay 5e-4", 0.93)],
)
def test_six_epochs_are_enough_to_learn(recipe: Recipe, options: str, reaches: float) -> None:
    """Where the initial weights were not torchvision's, these reached 0.50 and 0.81."""
    result = recipe("ddp_launch", "--epochs", "6", *options.split()).assert_ok()
    assert result.summary["val_accuracy"] >= reaches
