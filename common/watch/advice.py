"""What would make a run faster: of where its time goes, and of what its GPU leaves unused."""

import math

from torch import Tensor

from common.watch.clock import KINDS, STEP

_DATA, _COMMUNICATION, _SAVE = 0.2, 0.3, 0.1
"""From which share on something stands out: of the time of the steps; of all time for saving."""

ENOUGH_S = 10.0
"""Steps of less time say nothing of a longer run [s]."""

LONG_S = 600.0
"""A run that still takes so long is told in the middle, not only at its end [s]."""

_FREE = 0.5
"""A GPU that leaves this share of its memory free has room for larger batches."""


def steps_s(seconds: Tensor) -> Tensor:
    """Time of each rank's steps [s], from all ranks' `Clock.seconds` (ranks, KINDS)."""
    return seconds[:, [KINDS.index(kind) for kind in STEP]].sum(dim=1)


def advice(seconds: Tensor, workers: int | None = 0, cores: int = 1) -> list[str]:
    """What stands out in all ranks' `Clock.seconds`, and what to do about it.

    Nothing if nothing stands out, or if the steps took less than `ENOUGH_S`.

    Args:
        seconds: (ranks, KINDS).
        workers: loading processes of each rank. None: the recipe has no such option.
        cores: CPU cores of each rank.
    """
    own, steps, said = dict(zip(KINDS, seconds.T, strict=True)), steps_s(seconds), list[str]()
    if steps.max() < ENOUGH_S:
        return said
    data, waits = ((own[kind] / steps.clamp(min=1e-9)) for kind in ("data", "communication"))
    if data.max() > _DATA:
        rank, share = int(data.argmax()), min(float(data.max()), 0.99)
        enough = math.ceil((workers or share) / (1 - share))
        waited = f"for {share:.0%} of its steps' time rank {rank} waited for data"
        smaller = ", and smaller images (make pack) need fewer" if enough > cores else ""
        how = (
            f": about --num-workers {enough} would do (CPU cores per rank: {cores}); `make run "
            f"RECIPE=tune_loader` measures it{smaller}"
        )
        said.append(waited + ("" if workers is None else how))
    if (least := float(waits.min())) > _COMMUNICATION:  # not if a rank waits for a slow one only
        said.append(
            f"communication took at least {least:.0%} of the steps' time on every rank and was not "
            "hidden behind computing: larger batches per rank, or --gradient-compression bf16"
        )
    if (save := float((own["save"] / seconds.sum(dim=1)).max())) > _SAVE:
        said.append(f"saving took {save:.0%} of the time: a larger --snapshot-every, a faster disk")
    return said


def advice_for_gpu(*, compiles: bool | None, memory_share: float) -> list[str]:
    """What a GPU leaves unused in a long run.

    Args:
        compiles: by torch.compile. None: the recipe has no such option.
        memory_share: the run's share of the GPU's memory.
    """
    said = []
    if compiles is False:
        said.append("--compile trains faster (ResNet-50 on an H200: 1.47 times), to other bits")
    if memory_share < 1 - _FREE:
        said.append(
            f"training uses {memory_share:.0%} of the GPU's memory: a larger --global-batch-size "
            "may train faster"
        )
    return said
