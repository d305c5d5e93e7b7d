"""The epoch with the best metric: its weights in best.pt, and when --patience is used up."""

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from common import log
from common.errors import TrainingError
from common.run.folder import Run
from common.snapshots.state import TrainingState, on_cpu
from common.weights import save_weights, weights_sha256

WRITING = 0.03
"""best.pt takes at most about this share of the time to write, however often there is a new one."""


class BestEpoch:
    """Keeps the best epoch of a run in `state.best`, and on rank 0 its weights.

    A thread writes best.pt. A large model that is better in each of many short epochs is written in
    some of them, and when the run ends. A killed run has it in its snapshot, and a run that resumes
    writes it again.
    """

    def __init__(self, run: Run, state: TrainingState) -> None:
        self._run, self._state = run, state
        self._not_before_s = 0.0
        # In a run that resumes, the file may be of an epoch that is done again.
        self._is_written = "weights" not in (state.best or {})

    def improves(self, found: Mapping[str, float]) -> str | None:
        """The metric by which this epoch is the best one so far; None if it is not.

        That is --best-by; None: val_accuracy, else val_loss, else none.

        Raises:
            TrainingError: `--best-by` is none of `found`, or `--patience` needs one of them.
        """
        options, best, known = self._run.options, self._state.best or {}, ", ".join(found)
        usual = next((name for name in ("val_accuracy", "val_loss") if name in found), "none")
        by = options.best_by or usual
        if by == "none":
            if options.patience and not best:
                raise TrainingError(
                    "--patience needs a metric that chooses the best epoch: give --best-by one of "
                    f"{known}, and the same --output-dir"
                )
            return None
        if by not in found:
            raise TrainingError(
                f"--best-by {by} is no metric of this run: give {known}, or none, and the same "
                "--output-dir"
            )
        better = by not in best or sign(by) * found[by] > sign(by) * best[by]
        return by if better else None

    def keep(self, epoch: int, metric: str, value: float, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of this epoch, counted from 1: it is the best one. On rank 0."""
        self._state.best = {"file": "best.pt", "epochs": epoch, metric: value}
        if self._run.ranks.is_main:
            self._state.best["weights"] = on_cpu(dict(weights), pinned=False)
            self._is_written = False

    def write(self) -> None:
        """Let the thread write best.pt, unless it has; `state.wait` says if it cannot."""
        if not self._is_written:
            self._is_written = True
            self._not_before_s = math.inf  # until it is known how long it takes
            self._state.in_background(self._save, (self._state.best or {})["weights"])

    def _save(self, weights: dict[str, Tensor]) -> None:
        begun_s = time.monotonic()
        save_weights(weights, self._run.folder / "best.pt")
        now_s = time.monotonic()
        self._not_before_s = now_s + (now_s - begun_s) / WRITING

    def end_epoch(self, epoch: int) -> str:
        """Write best.pt if it is time; why the run ends now by `--patience`, or nothing."""
        if time.monotonic() > self._not_before_s:
            self.write()
        patience, best = self._run.options.patience, self._state.best
        if patience and best and epoch - best["epochs"] >= patience:
            return f"no improvement since epoch {best['epochs']}"
        return ""

    def summary(self) -> dict[str, Any]:
        """What summary.json says of it."""
        found = {k: v for k, v in (self._state.best or {}).items() if k != "weights"}
        if weights := (self._state.best or {}).get("weights"):
            found["weights_sha256"] = weights_sha256(weights)
        return {"best": found} if found else {}


def sign(metric: str) -> int:
    """-1 if the lowest value of a metric is the best one: of losses and errors; else 1."""
    return -1 if "loss" in metric or "error" in metric else 1


def warn_of_unknown_metric(by: str | None, classes: int) -> None:
    """Warn before the first epoch of a --best-by that `score_classes` does not give.

    A score of your own may give it, so it is refused only after the first epoch.
    """
    known = ["train_loss", "val_loss", "val_accuracy", *(["val_top5"] if classes > 5 else [])]
    if classes and by not in (None, "none", *known):
        log.warning(f"--best-by {by}: the metrics of classes are {', '.join(known)}")
