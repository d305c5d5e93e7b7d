"""From the times after each optimizer step to the numbers that are compared."""

import json
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from common.launch.fresh import fresh_environment, run_fresh

INJECT = Path(__file__).parent / "inject"


def from_stamps(
    stamps: Sequence[float], started: float, steps_per_epoch: int, snapshot_after: int
) -> dict[str, float]:
    """What rank 0's steps tell, the same for every contestant.

    Args:
        stamps: time after each optimizer step [s since the epoch].
        started: when the command was started, by the same clock.
        steps_per_epoch: of which the last one's interval to the next is no training: evaluation,
            a new iterator of the loader.
        snapshot_after: the step, counted from 1, after which the training state was saved once.

    Returns:
        `start_up_s` to the first step's end; `steps_per_s` within epochs, without what is left of
        the snapshot's epoch; `snapshot_s`, by which that takes longer than so many median
        intervals: it may be written beside the steps that follow;
        `boundary_s`, the median of the intervals between epochs (0 where there is none).
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
    """The first step past the half of all that is in the middle of an epoch, counted from 1.

    Past the half, so that `--snapshot-every` saves there once.
    """
    middle = steps_per_epoch // 2
    epoch = -(-(steps // 2 + 1 - middle) // steps_per_epoch)
    return epoch * steps_per_epoch + middle


def instrumented(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which every rank leaves its stamps in `folder`."""
    environment = fresh_environment({**more, "PEERS_STAMPS": str(folder)})
    environment["PYTHONPATH"] = f"{INJECT}{os.pathsep}{environment['PYTHONPATH']}"
    return environment


def run_stamped(folder: Path, options: Sequence[str]) -> list[float]:
    """Run ddp_launch into `folder`/run, both new; rank 0's stamps.

    Raises what `run_fresh` does.
    """
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
        TrainingError: not so many ranks, or not so many steps each: it was not what was asked for.
    """
    ranks: dict[str, Any] = {
        path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))
    }
    found = {name: len(rank["stamps"]) for name, rank in ranks.items()}
    if found != {f"rank_{rank}": steps for rank in range(processes)}:
        raise TrainingError(f"{steps} steps of {processes} processes were due, found {found}")
    return ranks["rank_0"]["stamps"], max(rank["peak_bytes"] for rank in ranks.values())
