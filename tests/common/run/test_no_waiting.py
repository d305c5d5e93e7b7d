"""Between two log lines, no step and no batch of an evaluation waits for the device.

A GPU is waited for where Python needs a number from it. On a CPU, too, such a number comes from one
of a few operations of torch.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.launch.ranks import Ranks
from common.run import loop as loops
from common.training import evaluation
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.pool import Pool
from tests.helpers.training import run_training

STEPS, BATCHES = 14, 6
"""Of an epoch, and of its evaluation on each of two ranks."""

WAIT = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(WAIT), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def train_without_waiting(ranks: Ranks, folder: Path, waits: str) -> None:
    """An epoch. Its first two and its last step may wait, and what follows the evaluation."""
    after_step, score = loops.Loop.after_step, evaluation.score_classes
    steps, batches = iter(range(STEPS)), iter(range(BATCHES))
    refused = ExitStack()

    def looked_at(loop: Any, losses: torch.Tensor) -> None:
        step = next(steps)
        if step == STEPS - 1:  # it logs
            refused.close()
        if step == 5 and waits == "step":
            losses.sum().item()
        after_step(loop, losses)
        if step == 1:
            refused.enter_context(NoWaiting())

    def scored(model: Any, batch: Any) -> Any:
        number = next(batches)
        if number == 0:
            refused.enter_context(NoWaiting())
        if number == 2 and waits == "batch":
            bool((batch[1] > 3).any())
        if number == BATCHES - 1:
            refused.close()
        return score(model, batch)

    def evaluate(model: Any, loader: Any, total: int) -> Any:
        return evaluation.evaluate(model, loader, total, score=scored)

    options: dict[str, Any] = {"optimizer": {"epochs": 1}, "model": {"norm": "batch"}}
    with (
        refused,
        patch.object(loops.Loop, "after_step", looked_at),
        patch.object(ddp_launch, "evaluate", evaluate),
    ):
        run_training(ranks, folder, options | {"run": {"log_every": STEPS}})
    assert not [*steps, *batches]


def test_nothing_waits_for_the_device(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_without_waiting, 2, tmp_path / "run", "")


@pytest.mark.parametrize("waits", ["step", "batch"])
def test_what_waits_is_seen(pool: Pool, tmp_path: Path, waits: str) -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        pool.run(train_without_waiting, 1, tmp_path / "run", waits)
