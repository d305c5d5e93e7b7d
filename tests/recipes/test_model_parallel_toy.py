"""Laws of model_parallel_toy: a split model, in every schedule, trains like the whole one."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from common import cli
from common.errors import InputError
from common.launch.ranks import Ranks
from common.run import begin
from common.run.options import RunOptions
from common.training.models import ModelOptions, build_model
from recipes.model_parallel_toy import split
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
from tests.helpers.commands import Recipe
from tests.helpers.gradients import CPU, gradients, largest_difference
from tests.helpers.pool import Pool, call_main, in_group
from tests.helpers.run_folders import assert_record, summary

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
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
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


def test_autograd_begins_on_the_gpu_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    gpus = [torch.device("cuda", number) for number in range(2)]
    monkeypatch.setattr(split, "Chain", lambda *_: chain())
    monkeypatch.setattr(split, "open_contexts", lambda *devices: begun.extend(devices))
    Split([], gpus, 1)
    assert begun == gpus


def joins(ranks: Ranks, folder: Path, stages: list[torch.device]) -> bool:
    """Train up to the process group; whether that is told that there is one device."""

    def join(*_: object, one_device: bool = True) -> None:
        raise ArithmeticError(one_device)

    config = parallel.Config(
        run=RunOptions(output_dir=folder, precision="fp32"),
        parallel=split.ParallelOptions(stages=len(stages)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "devices_of_copy", lambda *_: stages)
        patch.setattr(begin, "process_group", join)
        with pytest.raises(ArithmeticError) as stopped:
            parallel.train(config, ranks)
    return bool(stopped.value.args[0])


def test_the_process_group_knows_whether_a_copy_is_on_several_gpus(
    pool: Pool, tmp_path: Path
) -> None:
    """NCCL of a group that is bound to one GPU refuses the gradients on the others."""
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert pool.run(joins, 1, tmp_path, gpus) == [False]
    assert pool.run(joins, 1, tmp_path, gpus[:1]) == [True]


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


def train_pipeline(
    ranks: Ranks, folder: Path, max_steps: int | None, data_parallel: int, schedule: Any = "1f1b"
) -> None:
    """model_parallel_toy as one rank of copies of two stages."""
    default = parallel.Config()
    parallel.train(
        parallel.Config(
            run=RunOptions(output_dir=folder, precision="fp32"),
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


def test_micro_batches_alone_choose_a_schedule_that_has_them(pool: Pool, tmp_path: Path) -> None:
    for number, (options, schedule, count) in enumerate(
        [("", "split", 1), ("--micro-batches 8", "micro", 8), ("--schedule gpipe", "gpipe", 4)]
    ):
        _, config = cli.parse("model_parallel_toy", parallel.Config, options.split())
        assert (config.parallel.order, config.parallel.micro_batch_count) == (schedule, count)
        if schedule == "gpipe":
            continue
        folder = tmp_path / str(number)
        arguments = [*options.split(), "--max-steps", "1", "--output-dir", str(folder)]
        ((status, _, said),) = pool.run(call_main, 1, "model_parallel_toy", arguments)
        assert status == 0, said
        assert json.loads((folder / "config.json").read_text())["schedule"] == schedule
