"""Virtual ranks: one set of bits, however many processes compute them."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.data.stream import shards_of, whole_share
from common.errors import InputError
from common.launch.ranks import Ranks
from common.training import virtual_ranks
from common.training.virtual_ranks import Tree, add, subtrees, use_virtual_ranks
from tests.helpers.commands import INJECTED, Recipe, Result, wait_for
from tests.helpers.pool import PATIENCE_S, Pool, in_group
from tests.helpers.training import run_training, train_model, training
from tools import reproduce

# BatchNorm, dropout, class weights, momentum and augmentation: all that tells slicings apart.
TRICKY: dict[str, dict[str, Any]] = {
    "model": {"norm": "batch", "dropout": 0.3},
    "loss": {"class_weights": "balanced", "label_smoothing": 0.1},
    "optimizer": {"epochs": 3},
    "parallel": {"virtual_ranks": 4},
}


def numbers(run: Result) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl but how fast it went, and where the time went."""
    return [
        {name: x for name, x in line.items() if name != "samples_per_s" and name[:5] != "time_"}
        for line in run.metrics
    ]


def assert_same_bits(run: Result, reference: Result) -> None:
    assert run.sha == reference.sha
    assert run.summary["best"] == reference.summary["best"]
    assert numbers(run) == numbers(reference)


@pytest.fixture(scope="module")
def reference(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Four shards on one process."""
    folder = tmp_path_factory.mktemp("one process")
    return training(pool, 1, folder, **TRICKY, run={"log_every": 1})


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_on_any_number_of_processes(
    pool: Pool, tmp_path: Path, reference: Result, world_size: int
) -> None:
    assert len(reference.losses) == 42
    run = training(pool, world_size, tmp_path / "run", **TRICKY, run={"log_every": 1})
    assert_same_bits(run, reference)


def test_the_same_bits_when_the_number_changes_in_the_middle_of_an_epoch(
    pool: Pool, tmp_path: Path, reference: Result
) -> None:
    for world_size, steps in ((4, 5), (3, 12), (2, 20), (1, 27), (3, 33), (4, None)):
        optimizer = {**TRICKY["optimizer"], "max_steps": steps}
        options = {**TRICKY, "run": {"log_every": 1}, "optimizer": optimizer}
        run = training(pool, world_size, tmp_path / "run", **options)
    assert run.summary["resumed_from"] == 33
    assert_same_bits(run, reference)


def unused(_ranks: Ranks) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    use_virtual_ranks(model, 2, PATIENCE_S)


def test_steps_without_some_parameters_are_refused(pool: Pool) -> None:
    with pytest.raises(InputError, match="leave out find_unused_parameters=True"):
        pool.run(in_group, 1, unused)


@pytest.mark.slow
def test_clipped_adamw_gives_the_same_bits_on_any_number_of_processes(
    pool: Pool, tmp_path: Path
) -> None:
    optimizer = {"optimizer": "adamw", "lr": 1e-3, "clip_grad_norm": 0.5, "epochs": 1}
    options = {**TRICKY, "optimizer": optimizer}
    shas = {training(pool, n, tmp_path / str(n), **options).sha for n in (1, 2, 4)}
    assert len(shas) == 1
    unclipped = {**options, "optimizer": {**optimizer, "clip_grad_norm": None}}
    assert training(pool, 1, tmp_path / "unclipped", **unclipped).sha not in shas


def with_a_plain_all_reduce(ranks: Ranks, folder: Path, options: Any) -> None:
    def average(tree: Tree, own: Sequence[Tensor]) -> Iterator[None]:
        dist.all_reduce(own[0])
        own[0].div_(tree.shards)
        yield

    def add(terms: Sequence[Tensor], _leaves: range) -> list[Tensor]:
        return [torch.stack(list(terms)).sum(0)]

    with patch.object(Tree, "average", average), patch.object(virtual_ranks, "add", add):
        run_training(ranks, folder, options)


def test_it_is_the_tree_that_makes_it_so(pool: Pool, tmp_path: Path) -> None:
    """Shards, their random numbers and their statistics are the same; only sums are not a tree."""
    for replaced in (False, True):
        shas = set()
        for world_size in (1, 4):
            folder = tmp_path / f"{replaced}{world_size}"
            options = {**TRICKY, "optimizer": {"max_steps": 4}}
            function = with_a_plain_all_reduce if replaced else run_training
            pool.run(function, world_size, folder, options)
            shas.add(Result(0, "", "", folder).sha)
        assert len(shas) == (2 if replaced else 1)


@pytest.mark.parametrize(
    "precision", ["fp64", "bf16", pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_the_same_bits_in_every_precision(pool: Pool, tmp_path: Path, precision: str) -> None:
    runs = [
        training(
            pool,
            world_size,
            tmp_path / str(world_size),
            model=TRICKY["model"],
            parallel={"virtual_ranks": 2},
            optimizer={"max_steps": 6},
            run={"precision": precision, "log_every": 1},
        )
        for world_size in (1, 2)
    ]
    assert_same_bits(runs[1], runs[0])


def test_no_gradient_is_lost_or_counted_twice(pool: Pool, tmp_path: Path) -> None:
    fp64 = {"precision": "fp64", "log_every": 1}
    runs = [
        training(
            pool,
            2,
            tmp_path / str(shards),
            run=fp64,
            optimizer={"epochs": 1},
            parallel={"virtual_ranks": shards},
        )
        for shards in (0, 2, 8)
    ]
    assert runs[1].losses == runs[0].losses, "two ranks have one way to be added"
    assert runs[2].losses == pytest.approx(runs[0].losses, rel=1e-9), "GroupNorm sees one sample"


def test_the_same_bits_with_frozen_layers(pool: Pool, tmp_path: Path) -> None:
    runs = [
        training(
            pool,
            world_size,
            tmp_path / str(world_size),
            parallel={"virtual_ranks": 4},
            model={"norm": "batch", "freeze_layers": True},
            optimizer={"max_steps": 6},
            run={"log_every": 1},
        )
        for world_size in (1, 2)
    ]
    assert_same_bits(runs[1], runs[0])


class TwoTypes(nn.Module):
    """DDP has a bucket for each type; the layers' order is that of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.between = nn.Linear(32, 32, dtype=torch.float64)

    def _apply(self, *args: Any, **more: Any) -> "TwoTypes":
        """Keep the types: a recipe of one's own may do without --precision."""
        super()._apply(*args, **more)  # type: ignore[no-untyped-call]
        self.between.double()
        return self

    def forward(self, images: Tensor) -> Tensor:
        out = self.between(self.first(images.flatten(1)).relu().double()).relu()
        logits: Tensor = self.last(out.float())
        return logits


def test_a_rank_with_two_sums_has_buckets_of_two_types(pool: Pool, tmp_path: Path) -> None:
    options = {"optimizer": {"max_steps": 3}, "parallel": {"virtual_ranks": 8}}
    for world_size in (1, 3):
        pool.run(train_model, world_size, tmp_path / str(world_size), TwoTypes, options)
    one, three = (Result(0, "", "", tmp_path / name) for name in "13")
    assert_same_bits(three, one)


def test_a_rank_with_two_sums_adds_them_where_the_weights_lie(pool: Pool, tmp_path: Path) -> None:
    """DDP lays out a gradient as its parameter, here channels_last."""
    options: dict[str, dict[str, Any]] = {
        "model": {"channels_last": True},
        "optimizer": {"max_steps": 3},
        "parallel": {"virtual_ranks": 8},
    }
    one, three = (training(pool, n, tmp_path / str(n), **options) for n in (1, 3))
    assert_same_bits(three, one)


class Tricky18(nn.Module):
    """A ResNet-18 with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torchvision.models.resnet18(num_classes=32)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.body(images.expand(-1, 3, -1, -1))))
        return logits


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pool]:
    ranks = Pool(8)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), [("convnet", "bf16"), ("resnet18", "fp32")])
def test_eight_shards_on_any_number_of_processes(
    eight_ranks: Pool, tmp_path: Path, model: str, precision: str
) -> None:
    """Three levels of the tree; 3 processes have 2, 3 and 3 shards, and some have two sums."""

    def train(world_size: int, name: str, steps: int) -> Result:
        options = {
            **TRICKY,
            "parallel": {"virtual_ranks": 8},
            "optimizer": {"epochs": 1, "max_steps": steps, "global_batch_size": 32},
            "run": {"log_every": 1, "precision": precision},
        }
        if model == "convnet":
            return training(eight_ranks, world_size, tmp_path / name, **options)
        eight_ranks.run(train_model, world_size, tmp_path / name, Tricky18, options)
        return Result(0, "", "", tmp_path / name)

    one = train(1, "1", 4)
    assert_same_bits(train(7, "7", 4), one)
    for world_size, steps in ((8, 1), (3, 3), (5, 4)):
        cut = train(world_size, "cut", steps)
    assert cut.summary["resumed_from"] == 3
    assert_same_bits(cut, one)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 8), st.data())
def test_shares_are_neighbouring_whole_subtrees(levels: int, data: st.DataObject) -> None:
    shards = 2**levels
    world_size = data.draw(st.integers(1, shards))
    shares = [shards_of(rank, world_size, shards) for rank in range(world_size)]
    assert [shard for share in shares for shard in share] == [*range(shards)]
    sizes = [*map(len, shares)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes) >= whole_share(world_size, shards) > min(sizes) / 2
    for share in shares:
        trees = subtrees(share)
        assert [shard for tree in trees for shard in tree] == [*share]
        assert all(tree.start % len(tree) == 0 and not len(tree) & len(tree) - 1 for tree in trees)
        assert len(trees) <= 2 * max(1, len(share)).bit_length()


@pytest.mark.parametrize(
    ("world_size", "shards", "batch", "says"),
    [
        (4, 2, 96, "--virtual-ranks 2 is less than 4 processes: start 2 or fewer"),
        (3, 2, 97, "--virtual-ranks 2 is less than 3 processes: start 2 or fewer"),
        (1, 8, 100, "--virtual-ranks 8 does not divide the global batch of 100: 96 or 104 samples"),
        (2, 32, 8, "--virtual-ranks 32 does not divide the global batch of 8: 32 samples"),
    ],
)
def test_shards_that_cannot_be(
    pool: Pool, tmp_path: Path, world_size: int, shards: int, batch: int, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        training(
            pool,
            world_size,
            tmp_path / "run",
            optimizer={"global_batch_size": batch},
            parallel={"virtual_ranks": shards},
        )


def test_unequal_shares_have_no_batch_size_per_rank(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --global-batch-size, not --batch-size-per-rank"):
        training(
            pool,
            3,
            tmp_path / "run",
            optimizer={"batch_size_per_rank": 32},
            parallel={"virtual_ranks": 8},
        )


RESNET = "--model resnet18 --lr 0.02 --max-steps 18 --log-every 1 --virtual-ranks 8".split()
RESNET += ["--global-batch-size", "32"]


class Shared(nn.Module):
    """One module under two names, with parameters and buffers; and one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.again = self.first
        self.norm = nn.BatchNorm1d(64)
        self.norm_again = self.norm
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.first.weight
        self.fc = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        out = self.norm(self.first(images.flatten(1)))
        logits: Tensor = self.fc(self.tied(self.norm_again(self.again(out.relu())).relu()))
        return logits


def test_a_module_under_two_names_gives_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    for world_size, shards in ((1, 1), (1, 0), (1, 2), (2, 2)):
        options = {"optimizer": {"epochs": 1}, "parallel": {"virtual_ranks": shards}}
        pool.run(train_model, world_size, tmp_path / f"{world_size} {shards}", Shared, options)
    found = {f.name: Result(0, "", "", f) for f in tmp_path.iterdir()}
    assert found["1 2"].sha == found["2 2"].sha
    assert found["1 1"].sha == found["1 0"].sha, "one shard is plain training"


@pytest.mark.slow
def test_resnet18_killed_on_five_goes_on_with_three_and_then_one(recipe: Recipe) -> None:
    """BatchNorm throughout: ddp_launch on 1, ddp_spawn on 4, and one run over 5, 3 and 1."""
    whole = recipe("ddp_launch", "--nproc", "1", *RESNET, folder="1").assert_ok()
    spawned = recipe("ddp_spawn", "--nproc", "4", *RESNET, folder="4").assert_ok()
    assert_same_bits(spawned, whole)

    every = ("--snapshot-every", "3")
    cut, gates = recipe.tmp_path / "cut", recipe.tmp_path / "gates"
    gates.mkdir()
    for processes, until in (("5", 6), ("3", 15)):
        gate = gates / str(until)  # the ranks wait there until they are killed
        gate.touch()
        process = recipe.start(
            *recipe.command("ddp_launch", "--nproc", processes, *RESNET, *every, folder="cut"),
            env={**INJECTED, "GATES": str(gates)},
        )
        wait_for(lambda: list(cut.glob(f"snapshots/step_{until:08d}*.pt")))  # noqa: B023 - now
        process.kill()
        assert recipe.finish(process, cut).status == -signal.SIGKILL
    last = recipe("ddp_launch", "--nproc", "1", *RESNET, *every, folder="cut").assert_ok()
    assert last.summary["resumed_from"] == 15
    assert_same_bits(last, whole)
    assert json.loads((spawned.folder / "manifest.json").read_text())["world_size"] == 4
    found = reproduce.compare(reproduce.read(whole.folder), reproduce.read(last.folder), 0)
    assert found["verdict"] == "identical"


def test_the_tree_of_eight() -> None:
    """Neighbours are added, level by level: read off from sums that round."""
    terms = list(torch.tensor([1.0, 2**-24, 2**-24, 2**-24, 1.0, 2**-23, -2.0, 2**-24]))
    pairs = [terms[i] + terms[i + 1] for i in range(0, 8, 2)]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert add(terms, range(8)) == [expected]
    assert expected != sum(terms)
