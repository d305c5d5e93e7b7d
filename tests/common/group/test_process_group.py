"""How the process group is made; without a GPU, up to the point where NCCL would connect."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.errors import TrainingError
from common.group import process_group as module
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from common.training.virtual_ranks import Tree
from tests.helpers.commands import wait_for
from tests.helpers.pool import PATIENCE_S, Pool, in_group

TIMEOUT_S = 3.0


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode(before)


class Connects(Exception):
    """NCCL would connect now."""


def before_nccl_connects(
    patch: pytest.MonkeyPatch, env: dict[str, str] | None = None, **options: bool
) -> dict[str, Any]:
    """What `process_group` has done when torch is about to make the group of two GPUs."""
    found: dict[str, Any] = {"messages": False}

    def init(name: str, **given: Any) -> None:
        found.update(name=name, device_id=given["device_id"])
        c10d: Any = dist.distributed_c10d
        if register := getattr(c10d, "_register_builtin_nccl_backend", None):  # from torch 2.15 on
            patch.setattr(c10d.Backend, "_plugins", {})
            patch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
            register()
            found["creator"] = c10d.Backend._plugins["NCCL"].creator_fn.__name__
        raise Connects

    def meet(*_: object, **given: Any) -> dist.Store:
        found.update(given)
        return dist.HashStore()

    patch.setattr(module, "meet", meet)
    patch.setattr(module, "show_messages_to_parent", lambda: found.update(messages=True))
    patch.setattr(dist, "init_process_group", init)
    patch.setattr(torch.cuda, "set_device", lambda _: None)
    patch.setattr(module, "open_contexts", lambda _: None)
    gpu = SimpleNamespace(uuid="GPU-1")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    ranks = Ranks(1, 1, 2, 2, "torchrun")
    with mock.patch.dict(os.environ):
        for name in ("NCCL_ALGO", "TORCH_DIST_USE_NCCL2"):
            os.environ.pop(name, None)
        os.environ |= env or {}
        group = process_group(ranks, torch.device("cuda", 1), "auto", 5, **options)
        with pytest.raises(Connects), group:
            pass
        found["algorithms"] = os.environ.get("NCCL_ALGO")
    return found


def test_nccl_is_chosen_before_it_connects(
    monkeypatch: pytest.MonkeyPatch, deterministic: None
) -> None:
    found = before_nccl_connects(monkeypatch)
    assert found.pop("creator", "_create_nccl_process_group") == "_create_nccl_process_group"
    assert found == {
        "messages": True,
        "gpu": "GPU-1",
        "nccl": True,
        "name": "cpu:gloo,cuda:nccl",
        "device_id": torch.device("cuda", 1),
        "algorithms": "^NVLS,NVLSTree,CollnetDirect,CollnetChain",
    }


def test_what_the_user_has_chosen_of_nccl_is_kept(
    monkeypatch: pytest.MonkeyPatch, deterministic: None
) -> None:
    own = {"NCCL_ALGO": "Ring", "TORCH_DIST_USE_NCCL2": "1"}
    found = before_nccl_connects(monkeypatch, own)
    assert found["algorithms"] == "Ring"
    assert found.get("creator", "_create_nccl2_process_group") == "_create_nccl2_process_group"


def test_a_process_of_several_gpus_is_bound_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would refuse gradients on its other GPUs (`split` with --data-parallel)."""
    found = before_nccl_connects(monkeypatch, one_device=False)
    assert found["device_id"] is None
    assert found["algorithms"] is None, "only --deterministic excludes any"


def does_not_come(ranks: Ranks, place: str, ended: Path) -> str:
    """Rank 1 makes all groups that a run may have, but only up to `place`."""
    connecting = module._connecting

    def stops(what: str) -> AbstractContextManager[None]:
        if what == place:
            wait_for(ended.exists)
            raise KeyboardInterrupt
        return connecting(what)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(module, "_connecting", stops)
        try:
            with process_group(ranks, torch.device("cpu"), "gloo", TIMEOUT_S):
                module.make_mesh(torch.device("cpu"), (1, 2), ("replica", "shard"))
                Tree(2, timedelta(seconds=TIMEOUT_S))
        except (KeyboardInterrupt, RuntimeError, TrainingError) as error:
            return str(error)
        finally:
            ended.touch()
            if not dist.is_initialized():  # torch has counted the group, and names the next by it
                dist.distributed_c10d._world.group_count = 0
    return ""


@pytest.mark.parametrize(
    "place",
    [
        "the process group",
        "the first all-reduce",
        "the groups of the mesh",
        "the groups of --virtual-ranks",
    ],
)
def test_a_rank_that_does_not_come_to_where_all_connect_is_named(
    pool: Pool, tmp_path: Path, place: str
) -> None:
    pool.run(in_group, 2, repr)  # imports what a busy machine needs longer than TIMEOUT_S for
    said, _ = pool.run(does_not_come, 2, place, tmp_path / "ended")
    assert f"rank 1 on {os.uname().nodename} did not come to {place} in" in said


def end_with(ranks: Ranks, says: str) -> str:
    """What a rank hears whose last barrier fails with these words after it has passed it."""
    barrier = dist.barrier

    def passed() -> None:
        barrier()
        raise RuntimeError(says)

    try:
        with (
            mock.patch.object(dist, "barrier", passed if ranks.rank else barrier),
            process_group(ranks, torch.device("cpu"), "gloo", PATIENCE_S / 2),
        ):
            pass
    except RuntimeError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def test_a_rank_that_left_first_is_no_failure(pool: Pool) -> None:
    """gloo may say so before the barrier's end; a rank that does not come is one."""
    closed, late = "[pair.cc:561] Connection closed by peer [127.0.0.1]:1", "Timed out waiting"
    assert pool.run(end_with, 2, closed) == ["", ""]
    assert pool.run(end_with, 2, late) == ["", late]
