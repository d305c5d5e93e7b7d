"""The full training state: taken after a step, and taken over by a run that goes on.

Training waits for a copy in memory only. A thread of rank 0 writes it while training goes on.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from common.errors import TrainingError
from common.group.collectives import agreed, gather_numbers, gather_to_rank_0
from common.run.snapshot_files import FORMAT, list_snapshots, newest_name, write
from common.seeds import rng_state, seed_everything, set_rng_state

_POSITION = ("epoch", "batch", "step", "metrics_bytes")
log = logging.getLogger("recipes")


class Stateful(Protocol):
    """A model, an optimizer, a scaler: what gives its state as a dict of tensors and numbers."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state."""
        ...


@dataclass
class TrainingState:
    """Everything that training changes: what a snapshot must hold for an exact resume.

    The learning rate is a pure function of `step`, and so has no state.
    """

    parts: Mapping[str, Stateful]
    """By name, "model" among them: unwrapped, so that no name begins with `module.`."""
    loss_sum: Tensor
    """Over the steps of the epoch so far, on the device in float64: a sum for each of this rank's
    places in the global batch, or one where the recipe has the mean only."""
    sharded: bool = False
    """Each rank's parts are its own (a pipeline's stages), not copies of rank 0's."""
    epoch: int = 0
    batch: int = 0
    """Batches done of the epoch."""
    step: int = 0
    """Optimizer steps done since the beginning."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this moment."""
    saved_step: int = -1
    """Of the newest snapshot: the same step is not written twice."""
    # Only this thread is niced, as Linux has it: training comes first where cores are few.
    _writer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,))
    )
    _writing: Future[None] | None = None

    def save(self, folder: Path, identity: Mapping[str, Any], keep: int) -> None:
        """Copy the state, and have rank 0 write it; every rank calls it, after the same step.

        It returns when the copy is made and the snapshot before this one is on the disk.

        Args:
            folder: of the run's snapshots.
            identity: the options that must be the same when it is loaded.
            keep: how many of the newest are left in the folder.

        Raises:
            TrainingError: a loss that is not finite (the last good snapshot stays the newest), or
                what `wait` raises of the snapshot before.
        """
        if self.saved_step == self.step:
            return
        self.wait()
        refuse_non_finite(gather_numbers(self.loss_sum), self.step, folder)
        mine: dict[str, Any] = {"rng": rng_state(), "loss_sum": self.loss_sum.reshape(-1)}
        parts: dict[str, Any] = {}
        if self.sharded or dist.get_rank() == 0:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
        # Copies: the next step changes the originals.
        mine, parts = _copied_to_cpu((mine, parts))
        if self.sharded:
            mine["parts"], parts = parts, {}
        ranks = gather_to_rank_0(mine)
        if dist.get_rank() == 0:
            content = {
                "format": FORMAT,
                "identity": dict(identity),
                "world_size": len(ranks),
                "ranks": ranks,
                **parts,
                **{name: getattr(self, name) for name in _POSITION},
            }
            self._writing = self._writer.submit(_write, folder, self.step, content, keep)
        self.saved_step = self.step

    def wait(self) -> None:
        """Until what `save` began is on the disk; every rank calls it.

        Raises:
            TrainingError: weights that are not finite, or a file that cannot be written; what was
                there before is untouched.
        """
        with agreed():
            if self._writing:
                writing, self._writing = self._writing, None
                writing.result()

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum.zero_()

    def resume(self, found: dict[str, Any], seed: int) -> None:
        """Take over a snapshot's state; every rank calls it.

        On another number of ranks the model, optimizer and position go on exactly, and so does the
        order of samples; each rank's random generators then start from (seed, rank, step).
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # What decides the number of shards is an option, and so part of the identity.
        assert not self.sharded or found["world_size"] == world_size
        parts = found["ranks"][rank]["parts"] if self.sharded else found
        for name, part in self.parts.items():
            part.load_state_dict(parts[name])
        for name in _POSITION:
            setattr(self, name, found[name])
        self.saved_step = self.step
        losses = torch.cat([entry["loss_sum"] for entry in found["ranks"]])
        self.loss_sum = losses.chunk(world_size)[rank].to(self.loss_sum.device)
        if found["world_size"] == world_size:
            set_rng_state(found["ranks"][rank]["rng"])
            return
        seed_everything(seed, rank, self.step)
        if not found["identity"].get("virtual_ranks"):
            log.warning(
                f"the snapshot is of {found['world_size']} ranks, this run has "
                f"{world_size}: it goes on at the same sample, not with the same bits"
            )


def _write(folder: Path, step: int, content: dict[str, Any], keep: int) -> None:
    """In the thread: check the weights, write them, and remove what is not to be kept."""
    shards = [entry["parts"] for entry in content["ranks"] if "parts" in entry] or [content]
    for name, value in (item for shard in shards for item in shard["model"].items()):
        # A sum is soon made, and not finite where a term is not; that of huge terms may be, too.
        if not value.sum().isfinite() and not value.isfinite().all():
            raise TrainingError(
                f"{name} is not finite after step {step}, and is not saved: try a lower --lr or a "
                f"--warmup-epochs; last good snapshot: {newest_name(folder)}"
            )
    write(folder, step, content)
    for old in list_snapshots(folder)[keep:]:
        old.unlink()


def refuse_non_finite(losses: Tensor, step: int, folder: Path) -> None:
    """Raise on every rank if any rank's loss is not finite.

    Args:
        losses: (world_size, any number), the same on every rank.
        step: optimizer steps done, for the message.
        folder: of the snapshots, for the message.

    Raises:
        TrainingError: names the ranks and the snapshot to go on from.
    """
    bad = [rank for rank, values in enumerate(losses) if not values.isfinite().all()]
    if bad:
        raise TrainingError(
            f"the loss is not finite on rank {', '.join(map(str, bad))} by step {step}: "
            f"try a lower --lr or a --warmup-epochs; last good snapshot: {newest_name(folder)}"
        )


def _copied_to_cpu(value: Any) -> Any:
    """The same with a copy of every tensor, on the CPU."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, value)
