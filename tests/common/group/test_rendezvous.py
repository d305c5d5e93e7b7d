"""Ranks that wait for one another say so, can be stopped, and find what contradicts at once."""

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from common.errors import InputError
from common.group import rendezvous
from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT, Recipe, wait_for
from tests.helpers.machine import free_port
from tests.helpers.pool import PATIENCE_S, Pool

AT_THE_LOADERS = """
import os, pathlib, signal
from tools.on_import import OnImport

def patch(module):
    own = module.rank_loaders
    def changed(*arguments):
        pathlib.Path(os.environ["REACHED"] + os.environ["RANK"]).touch()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return own(*arguments)
    module.rank_loaders = changed

OnImport("common.data.loaders", patch)
"""
"""A sitecustomize.py: the ranks have met, rank 1 stops, and rank 0 goes on to a collective."""


def start_rank(
    recipe: Recipe, port: int, rank: int, world_size: int = 2, **more: str
) -> "subprocess.Popen[str]":
    """One rank by hand, which waits for the others."""
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }
    return recipe.start(*recipe.command("ddp_launch", "--epochs", "1"), env=env)


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "waiting for 1 of 2 ranks at"),
        pytest.param(1, "waiting for rank 0 at", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_says_so_and_can_be_stopped(recipe: Recipe, rank: int, says: str) -> None:
    process = start_rank(recipe, free_port(), rank)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(says), line
    assert "up to 600 s" in line
    process.send_signal(signal.SIGTERM)
    assert recipe.finish(process, Path()).status == 75  # finish() waits for less than 600 s


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_waits_in_a_collective_can_be_stopped(
    recipe: Recipe, number: signal.Signals
) -> None:
    """Before training there is nothing to save, so it need not wait for the other rank."""
    port, reached = free_port(), recipe.tmp_path / "reached"
    (recipe.tmp_path / "sitecustomize.py").write_text(AT_THE_LOADERS)
    env = {"REACHED": str(reached), "PYTHONPATH": f"{recipe.tmp_path}:{ROOT}"}
    first, _second = (start_rank(recipe, port, rank, 2, **env) for rank in (0, 1))
    wait_for(lambda: all(Path(f"{reached}{rank}").exists() for rank in (0, 1)))
    first.send_signal(number)
    assert recipe.finish(first, Path()).status == 75


@pytest.mark.slow
def test_other_numbers_of_ranks_are_found_at_the_rendezvous(recipe: Recipe) -> None:
    port = free_port()
    ranks = [start_rank(recipe, port, rank, world_size) for rank, world_size in ((0, 2), (1, 3))]
    results = [recipe.finish(process, Path()) for process in ranks]
    assert [result.status for result in results] == [2, 2], results
    (error,) = (line for result in results for line in result.errors)
    assert "give the same --nproc and --nnodes on every host" in error


@pytest.mark.parametrize("says", ["can't start new thread", "Resource temporarily unavailable"])
def test_a_rank_that_cannot_start_a_thread_says_so(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """And not that the other ranks did not come within 600 s."""

    def fails(*_: object) -> None:
        raise RuntimeError(says)

    monkeypatch.setattr(rendezvous, "_open_store", fails)
    with pytest.raises(RuntimeError, match=f"^{says}$"):
        rendezvous.meet(Ranks(world_size=2, local_world_size=2, master_port=1), 600)


def refused(ranks: Ranks, gpus: list[str | None], nccl: bool) -> str:
    try:
        rendezvous.meet(ranks, PATIENCE_S, gpu=gpus[ranks.rank], nccl=nccl)
    except InputError as error:
        return f"{error.agreed} {error}"
    return ""


@pytest.mark.parametrize(
    ("gpus", "nccl", "says"),
    [
        (["a", None], False, "True rank 0 on HOST has a GPU, rank 1 on HOST sees none"),
        ([None, "a"], True, "True rank 1 on HOST has a GPU, rank 0 on HOST sees none"),
        (["a", "a"], True, "True 2 ranks share 1 GPUs, which NCCL refuses"),
    ],
)
def test_devices_that_cannot_train_together_are_refused_by_all(
    pool: Pool, gpus: list[str | None], nccl: bool, says: str
) -> None:
    """At the rendezvous, before NCCL connects."""
    said = pool.run(refused, 2, gpus, nccl)
    assert said[0] == said[1]
    assert said[0].startswith(says.replace("HOST", socket.gethostname()))


@pytest.mark.parametrize(
    ("gpus", "nccl"), [(["a", "a"], False), (["a", "b"], True), ([None, None], False)]
)
def test_devices_that_can_train_together_are_not_refused(
    gpus: list[str | None], nccl: bool
) -> None:
    ranks = [{"rank": n, "host": "h", "gpu": gpu, "nccl": nccl} for n, gpu in enumerate(gpus)]
    assert not rendezvous._unlike_devices(ranks)


@pytest.mark.parametrize(
    ("came", "says"),
    [
        ((0,), "rank 1 on b did not come to the mesh in"),
        ((0, 1), "all 2 ranks came to the mesh"),
    ],
)
def test_a_rank_that_waits_in_nccl_ends_and_names_who_did_not_come(
    monkeypatch: pytest.MonkeyPatch, came: tuple[int, ...], says: str
) -> None:
    """NCCL itself would wait for ever, in C++."""
    store, ended = dist.HashStore(), threading.Event()
    for number, host in enumerate("ab"):
        store.set(f"arrived/{number + 1}", json.dumps({"rank": number, "host": host}))
    for rank in came[1:]:
        store.add(f"the mesh/{rank}", 1)
    errors: list[str] = []

    def end(error: Exception) -> None:
        errors.append(str(error))
        ended.set()

    monkeypatch.setattr(rendezvous, "report", lambda error, _: error)
    monkeypatch.setattr(os, "_exit", end)
    ranks = Ranks(world_size=2, local_world_size=2)
    with rendezvous.connecting(store, ranks, 0.01, "the mesh", nccl=True):
        assert ended.wait(PATIENCE_S)
    assert says in errors[0]
