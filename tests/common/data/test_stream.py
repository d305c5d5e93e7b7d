"""The sample stream is a pure function of (seed, epoch, index)."""

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DistributedSampler

from common.data import loaders
from common.data.loaders import Loader, keep_socket_names_short, loader_options, make_loader
from common.data.stream import FixedBatches, GlobalBatches, Samples, eval_batch_size
from common.errors import InputError
from recipes.tune_loader.streams import ItemStream, make_item_loader, make_stream_loader

worlds = st.sampled_from([1, 2, 3, 4, 6])


class Numbers:
    """Sample i is an image that holds i, and jitter."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 2, 2), float(index)) + torch.rand(()), index


def samples(count: int, seed: int = 7) -> Samples:
    return Samples(Numbers(), range(count), seed)


def test_loading_processes_hand_over_batches_where_the_name_of_tmpdir_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/{'x' * 76}")
    keep_socket_names_short()
    short = multiprocessing.current_process()._config["tempdir"]  # type: ignore[attr-defined]
    assert len(f"{short}/listener-12345678") < 108
    shutil.rmtree(short)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=OSError("read-only")))
    with pytest.raises(InputError, match=r"TMPDIR has .* set another TMPDIR"):
        keep_socket_names_short()


@settings(max_examples=50, deadline=None)
@given(st.integers(24, 200), st.integers(0, 5), st.integers(0, 3), worlds)
def test_a_global_batch_is_the_same_for_every_world_size(
    count: int, seed: int, epoch: int, world_size: int
) -> None:
    def global_batches(world: int) -> list[list[Any]]:
        shares = [GlobalBatches(count, [12 // world] * world, seed, rank) for rank in range(world)]
        for share in shares:
            share.set_epoch(epoch)
        return [list(chain(*parts)) for parts in zip(*shares, strict=True)]

    assert global_batches(world_size) == global_batches(1)


@settings(max_examples=50, deadline=None)
@given(st.integers(24, 200), st.integers(0, 3), worlds, st.integers(0, 20))
def test_a_resumed_epoch_is_the_rest_of_the_whole_one(
    count: int, epoch: int, world_size: int, batch: int
) -> None:
    batches = GlobalBatches(count, [12 // world_size] * world_size, 0, world_size - 1)
    batches.set_epoch(epoch)
    whole = list(batches)
    batch = min(batch, len(whole))
    batches.set_epoch(epoch, first_batch=batch)
    assert len(batches) == len(whole) - batch
    assert list(batches) == whole[batch:]


def test_an_epoch_shows_each_sample_at_most_once_and_in_another_order_each_time() -> None:
    batches = GlobalBatches(100, [12], 0, 0)
    orders = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        indices = [index for keys in batches for _, index in keys]
        assert len(indices) == len(set(indices)) == 96
        orders.append(indices)
    assert orders[0] != orders[1] != orders[2]


def test_the_union_over_ranks_is_what_distributed_sampler_would_give() -> None:
    """torch's promise too: over all ranks, every sample once per epoch."""
    torchs: list[DistributedSampler[int]] = [
        DistributedSampler(range(96), num_replicas=3, rank=rank, drop_last=True)  # type: ignore[arg-type]
        for rank in range(3)
    ]
    ours = [GlobalBatches(96, [4] * 3, 0, rank) for rank in range(3)]
    union = sorted(index for share in ours for keys in share for _, index in keys)
    assert union == sorted(chain(*torchs)) == list(range(96))
    assert {len(share) * share.batch_size_per_rank for share in ours} == {len(torchs[0])}


def test_augmentation_depends_on_the_key_alone() -> None:
    data = samples(10)
    torch.manual_seed(1)
    first = data[(2, 5)][0]
    torch.manual_seed(99)
    _ = data[(0, 1)]
    assert torch.equal(data[(2, 5)][0], first)
    assert not torch.equal(data[(3, 5)][0], first), "each epoch augments in its own way"
    assert not torch.equal(data[(2, 6)][0] - 1, first), "each sample has its own draw"
    assert not torch.equal(samples(10, seed=8)[(2, 5)][0], first), "the seed decides too"


def test_a_mask_or_other_numbers_than_whole_ones_are_no_indices() -> None:
    mask = np.array([False, True, True])
    wrong: list[Any] = [mask, mask.tolist(), torch.from_numpy(mask), [1.0, 2.0], np.argwhere(mask)]
    for indices in wrong:
        with pytest.raises(InputError, match=r"whole numbers; for a mask, np\.flatnonzero\(mask\)"):
            Samples(Numbers(), indices, 7)
    right: list[Any] = [np.flatnonzero(mask), torch.tensor([1, 2]), range(1, 3), [1, 2]]
    for indices in right:
        assert Samples(Numbers(), indices, 7)[(0, 1)][1] == 2
    assert len(Samples(Numbers(), [], 7)) == 0


@pytest.mark.parametrize(
    ("make", "workers"),
    [*product([make_loader, make_stream_loader], [1, 2]), (make_stream_loader, 0)],
)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
def test_workers_and_the_iterable_give_the_same_batches(
    make: Callable[..., Any], workers: int, rank: int, world_size: int
) -> None:
    def batches(make: Callable[..., Any], workers: int) -> list[Tensor]:
        share = GlobalBatches(60, [12 // world_size] * world_size, 3, rank)
        loader = make(samples(60), share, num_workers=workers)
        seen = []
        for epoch, first_batch in ((0, 0), (1, 2)):  # the same loader goes on over epochs
            share.set_epoch(epoch, first_batch)
            seen += [images for images, _ in loader]
        return seen

    before = torch.get_rng_state()
    found, expected = batches(make, workers), batches(make_loader, 0)
    assert len(found) == len(expected) == 8
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before), "loading has its own generators"


@pytest.mark.parametrize("make", [make_loader, make_stream_loader, make_item_loader])
def test_torch_does_not_warn_of_more_loading_processes_than_cores(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is made nor when it loads: the run says it in one line (test_data.py)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    loader = make(samples(8), [[(0, index)] for index in range(8)], num_workers=2)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_source_without_index_and_length_gives_the_same_batches_to_any_ranks_and_processes(
    world_size: int, workers: int
) -> None:
    def squares() -> Iterator[int]:
        yield from (number * number for number in range(50))

    shares = []
    for rank in range(world_size):
        stream = ItemStream(squares, float, 12, rank, world_size)
        loader = Loader(stream, batch_size=None, **loader_options(workers, pin_memory=False))
        shares.append([batch.tolist() for batch in loader])
    assert {len(share) for share in shares} == {4}, "no rank has a batch more than its peers"
    found = [list(chain(*slices)) for slices in zip(*shares, strict=True)]
    assert found == [list(islice(squares(), 12 * b, 12 * b + 12)) for b in range(4)]
    with pytest.raises(InputError, match="60 or 72"):
        ItemStream(squares, float, 62, 0, 12)


@given(st.integers(1, 2000), worlds)
def test_evaluation_sees_every_sample_once_in_the_same_batches(count: int, world: int) -> None:
    dealt = [FixedBatches(count, 64, rank, world) for rank in range(world)]
    everything = [keys for share in dealt for keys in share]
    assert sorted(chain(*everything)) == [(0, index) for index in range(count)]
    assert sorted(everything) == list(FixedBatches(count, 64, 0, 1))


@pytest.mark.parametrize(("count", "world"), [(200, 2), (360, 2), (731, 8), (50_000, 8)])
def test_evaluation_keeps_every_rank_busy(count: int, world: int) -> None:
    size = eval_batch_size(count)
    shares = [sum(map(len, FixedBatches(count, size, rank, world))) for rank in range(world)]
    assert max(shares) <= 1.1 * count / world, "731 is what flower_photos keeps for validation"


def test_a_loading_process_is_silent_about_a_rank_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a rank while it receives a batch, and its loading process sees a reset."""
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("common.data.batch_wait.answer", lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loaders._start_worker(0)
    for error in (ConnectionResetError(104, "reset by peer"), ValueError("another")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: another\n"
