"""Compute the compared numbers from the time after each optimizer step."""

import json
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from tools.fresh import fresh_environment, run_fresh

INJECT = Path(__file__).parent / "inject"


def from_stamps(
    stamps: Sequence[float], started: float, steps_per_epoch: int, snapshot_after: int
) -> dict[str, float]:
    """The numbers of one run, computed in the same way for every contestant.

    Args:
        stamps: rank 0's time after each optimizer step [s since the epoch].
        started: when the command was started, by the same clock.
        steps_per_epoch: the time from an epoch's last step to the next step is not training.
        snapshot_after: the step, counted from 1, after which the training state was saved once.

    Returns:
        `start_up_s`: until the first step has ended. `steps_per_s`: within epochs, without the
        steps from the snapshot to the end of its epoch. `snapshot_s`: how much longer these steps
        take than as many median steps, because a snapshot may be written while training continues.
        `boundary_s`: median time between epochs (0 if there is only one epoch).
    """
    intervals = dict(enumerate((after - before for before, after in pairwise(stamps)), start=1))
    end = -(-snapshot_after // steps_per_epoch) * steps_per_epoch
    saving = [intervals.pop(step) for step in range(snapshot_after, end) if step in intervals]
    between = [interval for step, interval in intervals.items() if step % steps_per_epoch == 0]
    within = [interval for step, interval in intervals.items() if step % steps_per_epoch]
    return {
        "start_up_s": stamps[0] - started,
        "steps_per_s": len(within) / sum(within),
        "snapshot_s": sum(saving) - len(saving) * statistics.median(within),
        "boundary_s": statistics.median(between) if between else 0.0,
    }


def snapshot_step(steps: int, steps_per_epoch: int) -> int:
    """The first step in the second half of the run that is in the middle of an epoch, from 1.

    In the second half, so that `--snapshot-every` saves only once.
    """
    middle = steps_per_epoch // 2
    epoch = -(-(steps // 2 + 1 - middle) // steps_per_epoch)
    return epoch * steps_per_epoch + middle


def instrumented(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which every rank writes its stamps into `folder`."""
    environment = fresh_environment({**more, "PEERS_STAMPS": str(folder)})
    environment["PYTHONPATH"] = f"{INJECT}{os.pathsep}{environment['PYTHONPATH']}"
    return environment


def run_stamped(folder: Path, options: Sequence[str]) -> list[float]:
    """Run ddp_launch into `folder`/run; rank 0's stamps. `folder` must not exist."""
    folder.mkdir()
    run_fresh(
        "recipes",
        ["ddp_launch", *options, "--output-dir", folder / "run"],
        instrumented(folder, CUDA_VISIBLE_DEVICES=""),
    )
    stamps: list[float] = json.loads((folder / "rank_0.json").read_text())["stamps"]
    return stamps


def read_stamps(folder: Path, processes: int, steps: int) -> tuple[list[float], int]:
    """Rank 0's stamps, and the largest peak memory of a rank [bytes].

    Raises:
        TrainingError: another number of ranks or steps.
    """
    ranks: dict[str, Any] = {
        path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))
    }
    found = {name: len(rank["stamps"]) for name, rank in ranks.items()}
    if found != {f"rank_{rank}": steps for rank in range(processes)}:
        raise TrainingError(f"{steps} steps of {processes} processes were expected, found {found}")
    return ranks["rank_0"]["stamps"], max(rank["peak_bytes"] for rank in ranks.values())
