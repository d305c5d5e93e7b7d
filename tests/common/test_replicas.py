"""Corrupted replicas: planted bits are found, named, and never saved."""

import re
import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from common.errors import TrainingError
from common.launch.ranks import Ranks
from common.replicas import fingerprint
from common.run.loop import Loop
from common.snapshots.snapshot_files import list_snapshots, read
from tests.helpers.commands import Result
from tests.helpers.flips import flip, plant
from tests.helpers.pool import Pool
from tests.helpers.training import run_training, training

AT = 6
"""The step after which a bit flips; the snapshot of step 4 is the last."""
RUN: dict[str, dict[str, Any]] = {
    "run": {"snapshot_every": 4, "log_every": 1},
    "optimizer": {"max_steps": 11},
    "parallel": {"check_replicas": 100},
}
HERE = socket.gethostname()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]
)
def test_one_flip_of_any_bit_is_seen(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (4, 5), (2, 3, 2, 2)):
        tensor = (100 * torch.rand(shape)).to(dtype)
        before = fingerprint(tensor)
        assert before.dtype == torch.int64
        for bit in range(8 * tensor.element_size()):
            flip(tensor, bit)
            assert fingerprint(tensor) != before, f"{shape}, bit {bit}"
            flip(tensor, bit)
        assert fingerprint(tensor) == before


def test_a_fingerprint_of_complex_numbers_sees_both_parts() -> None:
    for dtype in (torch.complex64, torch.complex128):
        tensor, found = torch.ones(2, 3, dtype=dtype), set[int]()
        for value in (1, -1, 1 + 1j, 1 - 1j):
            tensor[1, 2] = value  # type: ignore[assignment]
            found.add(int(fingerprint(tensor)))
        assert len(found) == 4


def test_what_a_fingerprint_sees_of_two_faults() -> None:
    tensor = torch.randn(6, 8)
    before = fingerprint(tensor)

    def after(*places: tuple[int, int]) -> Tensor:
        other = tensor.clone()
        for place in places:
            flip(other[place])
        return fingerprint(other)

    rows = [after((0, 3), (row, 3)) != before for row in range(1, 6)]
    assert all(rows), "equal flips in two rows"
    assert after((2, 3), (2, 4)) == before, "equal flips in a row: what the page says it cannot see"
    assert fingerprint(tensor.flip(0)) != before, "rows that swap places"
    assert fingerprint(tensor.flip(1)) == before, "elements of a row that swap places"
    images = torch.randn(2, 3, 4, 4)
    last = images.to(memory_format=torch.channels_last)
    assert fingerprint(last) == fingerprint(images), "the order in memory does not matter"
    assert fingerprint(torch.zeros(0)) == 0
    assert fingerprint(-torch.zeros(1)) != fingerprint(torch.zeros(1))


def with_a_fault(
    ranks: Ranks, folder: Path, options: Any, rank: int, where: str, at: int = AT
) -> str:
    """Train; on `rank` a bit flips after step `at`. What the error says."""
    after_step = Loop.after_step

    def changed(loop: Loop, losses: Tensor) -> None:
        if loop.state.step + 1 == at and ranks.rank == rank:
            plant(loop, where)
        after_step(loop, losses)

    with patch.object(Loop, "after_step", changed):
        try:
            run_training(ranks, folder, options)
        except TrainingError as error:
            return str(error)
    return ""


def run_with_a_fault(
    pool: Pool, world_size: int, folder: Path, options: Any, rank: int, where: str, at: int = AT
) -> str:
    """What all ranks say in one voice."""
    said = set(pool.run(with_a_fault, world_size, folder, options, rank, where, at))
    assert len(said) == 1
    return str(said.pop())


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three ranks without a fault, which compare nothing."""
    return training(pool, 3, tmp_path_factory.mktemp("whole"), **{**RUN, "parallel": {}})


@pytest.mark.parametrize("where", ["weight", "momentum"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_flipped_bit_is_named_before_the_next_snapshot(
    pool: Pool, tmp_path: Path, whole: Result, rank: int, where: str
) -> None:
    folder = tmp_path / "run"
    said = run_with_a_fault(pool, 3, folder, RUN, rank, where)
    (newest,) = list_snapshots(folder / "snapshots")
    assert read(newest)["step"] == 4
    assert re.fullmatch(
        rf"features\.0\.weight( \(and \d+ more\))? differs between ranks after step 8, at fault: "
        rf"rank {rank} on {HERE} \(its device.*; last good snapshot: {newest.name}",
        said,
    ), said
    if (rank, where) == (0, "weight"):  # the snapshot is the same in every case
        again = training(pool, 3, folder, **RUN)
        assert again.summary["resumed_from"] == 4
        assert again.sha == whole.sha, "comparing changes nothing"
        assert again.losses == whole.losses


def test_two_ranks_cannot_say_which_one_it_is(pool: Pool, tmp_path: Path) -> None:
    """Every second step: the fault is found in the step that it follows."""
    options = {**RUN, "parallel": {"check_replicas": 2}}
    said = run_with_a_fault(pool, 2, tmp_path, options, 1, "momentum")
    assert said.startswith("features.0.weight (momentum_buffer) differs between ranks after step 6")
    assert "at fault: rank 0 on " in said
    assert f" or rank 1 on {HERE}" in said


def test_buffers_count_only_where_all_ranks_keep_the_same(pool: Pool, tmp_path: Path) -> None:
    options = {**RUN, "model": {"norm": "batch"}, "parallel": {"check_replicas": 1}}
    assert training(pool, 2, tmp_path / "ddp", **options).summary["steps"] == 11
    options["parallel"] = {"check_replicas": 1, "virtual_ranks": 4}
    said = run_with_a_fault(pool, 4, tmp_path / "virtual", options, 2, "buffer")
    assert f".running_mean differs between ranks after step 6, at fault: rank 2 on {HERE}" in said


def test_equal_replicas_of_every_kind_raise_no_alarm(pool: Pool, tmp_path: Path) -> None:
    kinds: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"precision": "fp16"}, {"optimizer": "adamw", "lr": 1e-3}, {}),
        ({"precision": "fp64"}, {"momentum": 0}, {"channels_last": True}),
        ({"precision": "bf16"}, {}, {"freeze_layers": True}),
    ]
    for number, (run, optimizer, model) in enumerate(kinds):
        training(
            pool,
            2,
            tmp_path / str(number),
            run=run,
            model=model,
            optimizer={**optimizer, "max_steps": 3},
            parallel={"check_replicas": 1},
        )


def test_a_gradient_that_was_sent_wrongly_is_the_same_on_all_ranks(
    pool: Pool, tmp_path: Path, whole: Result
) -> None:
    """As the page says, a comparison of replicas does not see it."""
    assert run_with_a_fault(pool, 3, tmp_path, RUN, 1, "gradient") == ""
    assert Result(0, "", "", tmp_path).sha != whole.sha
