"""`--check`: all that a run does before its first step, in a folder that is removed afterwards."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils._pytree import tree_leaves

from common import log
from common.data.datasets import Data
from common.errors import Checked, TrainingError
from common.snapshots.state import TrainingState
from common.terminal import mebibytes

if TYPE_CHECKING:
    from common.run.folder import Run
    from common.run.plan import Plan


def folder_of_check() -> Path | None:
    """The folder in which a check runs; None if this is no check."""
    text = os.environ.get("RECIPES_CHECK")
    return Path(text) if text else None


def bytes_to_write(parts: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of model.pt, and of a snapshot with the weights of the best epoch. A collective.

    Args:
        parts: of the training state, before its first step.
    """
    state = parts["model"]
    weights = getattr(state, "full_state_dict", state.state_dict)()
    model = sum(value.numel() * value.element_size() for value in tree_leaves(weights))
    options = getattr(parts.get("optimizer"), "defaults", {})
    moments = 2 if "betas" in options else bool(options.get("momentum"))
    return model, model * (2 + moments)


def end_check(
    run: "Run", state: TrainingState, data: Data, plan: "Plan", steps_left: int
) -> NoReturn:
    """Say what the run would do, and end. A collective.

    Raises:
        Checked: always.
    """
    model, snapshot = bytes_to_write(state.parts)
    if run.ranks.is_main:
        place = run.before.absolute()
        while not place.exists():
            place = place.parent
        if (free := shutil.disk_usage(place).free) < model + 2 * snapshot:
            log.warning(f"{place} has {mebibytes(free)} left, less than two snapshots and model.pt")
        after = f" after step {state.step}" if state.step else ""
        try:
            print(
                f"ok: {len(data.train):,} training and {len(data.val):,} validation samples, batch "
                f"size {plan.global_batch_size}, {steps_left:,} steps "
                f"({plan.steps_per_epoch} per epoch){after}, model.pt of {model:,} bytes, "
                f"a snapshot about {snapshot:,}",
                flush=True,
            )
        except OSError as error:
            raise TrainingError(
                f"cannot write to stdout ({error.strerror}): make room, then run the same command "
                "again"
            ) from error
    raise Checked
