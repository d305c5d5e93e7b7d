"""A wait for a batch has an end and a name, and a stop signal ends it without a loss."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.data import batch_wait
from common.data.batch_wait import BatchWait, place
from common.data.loaders import make_loader
from common.data.stream import Samples
from common.launch.ranks import Ranks
from common.seeds import lent_generators, rng_state
from tests.helpers.commands import INJECTED, Recipe, Result, wait_for

OPTIONS = ("--nproc", "2", "--epochs", "1", "--log-every", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    runner = Recipe(tmp_path_factory.mktemp("whole"))
    yield runner("ddp_launch", *OPTIONS).assert_ok()
    runner.stop()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ranks_that_all_wait_for_data_stop_on_request_and_lose_nothing(
    recipe: Recipe, whole: Result, workers: str
) -> None:
    stalled, folder = recipe.tmp_path / "stalled", recipe.tmp_path / "run"
    stalled.touch()
    env = {**INJECTED, "STALLED": str(stalled)}
    options = (*OPTIONS, "--num-workers", workers)
    process = recipe.start(*recipe.command("ddp_launch", *options, "--timeout-s", "40"), env=env)
    who = "it" if workers == "0" else r"its loading process \d+"
    where = rf"{who} is at \S*sitecustomize.py:\d+ \(stalled\)"
    log = folder / "logs" / "rank_0.log"
    wait_for(lambda: log.exists() and re.search(rf"no batch for \d+ s: {where}", log.read_text()))
    process.send_signal(signal.SIGTERM)
    stopped = recipe.finish(process, folder)
    assert (stopped.status, stopped.errors) == (75, []), stopped.stderr
    assert json.loads((folder / "status.json").read_text()) == {"status": "stopped"}
    said = re.search(r"stopped after step (\d+): to resume", stopped.stdout)
    assert said, stopped.stdout
    assert list(folder.glob(f"snapshots/step_*{said[1]}.*.pt"))

    stalled.unlink()
    again = recipe("ddp_launch", *options, env=env).assert_ok()
    assert (again.sha, again.losses) == (whole.sha, whole.losses)


def test_a_loading_process_that_cannot_answer_is_named_with_its_state() -> None:
    """T is stopped, D waits for a disk."""
    samples = Samples(list(range(100)), range(100), 0)
    loader: Any = make_loader(samples, [[(0, 0)], [(0, 1)]], num_workers=1)
    next(iter(loader))
    (worker,) = loader._iterator._workers
    os.kill(worker.pid, signal.SIGSTOP)
    named = rf"its loading process {worker.pid} does not answer \(in state T\)"
    assert re.fullmatch(named, place(loader))
    os.kill(worker.pid, signal.SIGCONT)


def test_generators_that_a_sample_uses_are_saved_as_they_were() -> None:
    """A rank that is stopped while it loads has the state after its last step."""
    torch.manual_seed(1)
    before, drawn = rng_state(), torch.rand(3)
    torch.manual_seed(1)
    with lent_generators():
        np.random.seed(5)
        torch.manual_seed(2)
        assert torch.equal(rng_state()["torch"], before["torch"])
    assert torch.equal(torch.rand(3), drawn)


class Watched(BatchWait):
    """Of one rank of two, without its thread; the test looks."""

    def __init__(self, store: dist.Store, rank: int, came: list[int], left: list[int]) -> None:
        stop: Any = SimpleNamespace(devices=[], came=came, leave=lambda: left.append(rank))
        ranks = Ranks(rank=rank, world_size=2)
        with (
            mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
            mock.patch.object(threading.Thread, "start"),
        ):
            super().__init__(600.0, stop, ranks, lambda: 7)


def test_no_rank_goes_on_that_another_one_takes_for_waiting() -> None:
    store, left = dist.HashStore(), list[int]()
    first, second = Watched(store, 0, [signal.SIGTERM], left), Watched(store, 1, [], left)
    first._look(2.0)
    first.go_on()  # its batch has come
    second._look(2.0)
    assert not left, "rank 0 does not wait any more"
    first._look(2.0)
    assert left == [0]
    second.go_on()  # too late: rank 0 has left
    second._look(2.0)
    assert left == [0, 1, 1]
    batch_wait.end()


def test_a_wait_for_a_batch_has_the_time_out_of_a_collective(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rank = Watched(dist.HashStore(), 1, [], [])
    rank._look(600.0)
    ended = mock.patch("os._exit", side_effect=SystemExit)
    with ended as status, pytest.raises(SystemExit):
        rank._look(601.0)
    status.assert_called_once_with(1)
    line = r"error: rank 1 on \S+: got no batch for 600 s: it is at \S+:\d+ \("
    assert re.match(line, capsys.readouterr().err)
    batch_wait.end()


def test_nobody_leaves_without_a_signal(tmp_path: Path) -> None:
    left = list[int]()
    for rank in (0, 1):
        Watched(dist.FileStore(str(tmp_path / "store"), 2), rank, [], left)._look(2.0)
    assert not left
    batch_wait.end()
