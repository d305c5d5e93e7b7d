"""The full training state: copied after a step, and loaded by a run that resumes.

Training waits only for the copy in memory. A thread writes it while training continues: on rank 0,
or on every rank if each one has a part of the state.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from common import log
from common.errors import InputError, TrainingError
from common.group.collectives import agreed, gather, gather_numbers, gather_to_rank_0
from common.group.devices import synchronize
from common.group.process_group import group_for_threads
from common.seeds import rng_state, seed_everything, set_rng_state
from common.snapshots.snapshot_files import FORMAT, keep_newest, newest_name, unlike, write

_SHAPED_LIKE_THE_PARAMETER = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""Of the tensors that an optimizer holds; others have shapes of their own."""
_POSITION = ("epoch", "batch", "step", "metrics_bytes", "metrics_sha256")


class Stateful(Protocol):
    """A model, an optimizer or a scaler, whose state is a dict of tensors and numbers."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Replace the state."""


@dataclass
class TrainingState:
    """Everything that training changes: what a snapshot must hold for an exact resume.

    The learning rate is a pure function of `step`, and so has no state.
    """

    parts: Mapping[str, Stateful]
    """By name. "model" is the unwrapped model, so that no name begins with `module.`."""
    loss_sum: Tensor
    """Sum over the epoch's steps so far, float64, on the device: one number for each of this rank's
    samples in a batch, or one in all if the recipe has only the mean."""
    mesh: DeviceMesh | None = None
    """Of all ranks, if each one has a part of the state (a pipeline's stage, shards of tensors) and
    writes its own file. None: all ranks have the same state, and rank 0 writes it."""
    sizes: Sequence[int] = ()
    """Losses of each rank in a batch, if some ranks have more samples than others."""
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    step: int = 0
    """Optimizer steps done since the start."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at the last snapshot."""
    metrics_sha256: str = sha256().hexdigest()
    """Hash of metrics.jsonl at the last snapshot; of an empty file before it."""
    best: dict[str, Any] | None = None
    """The best epoch before the last evaluation: its summary, and on rank 0 its weights."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Hashes of a few samples (`common.data.same_samples`)."""
    history: dict[str, Any] = field(default_factory=dict)
    """When the run first began [s, Unix], and the time of its steps until now [s]."""
    saved_step: int = -1
    """Step of the newest snapshot, which is not written twice."""
    # On Linux nice() holds for one thread: training comes first if cores are few.
    _writer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,))
    )
    _writing: list[Future[None]] = field(default_factory=list)
    _group: dist.ProcessGroup | None = None

    def save(self, folder: Path, identity: Mapping[str, Any], keep: int) -> None:
        """Copy the state and let rank 0 write it; every rank calls this after the same step.

        Returns when the copy is made and the previous snapshot is on the disk.

        Args:
            folder: of the run's snapshots.
            identity: what must be the same in a run that loads it.
            keep: how many snapshots stay in the folder, the newest ones.

        Raises:
            TrainingError: a loss is not finite, or the previous snapshot could not be written.
        """
        if self.saved_step == self.step:
            return
        self.wait()
        losses = gather_numbers(self.loss_sum.sum() if self.sizes else self.loss_sum)
        refuse_non_finite(losses, self.step, folder)
        mine: dict[str, Any] = {"rng": rng_state(), "loss_sum": self.loss_sum.reshape(-1)}
        parts: dict[str, Any] = {}
        with agreed():
            if self.mesh is not None or dist.get_rank() == 0:
                parts = {name: part.state_dict() for name, part in self.parts.items()}
                _refuse_what_no_run_would_load(parts)
        if self.mesh is not None:
            from common.snapshots.shards import take_apart  # imports sympy, which takes long

            mine["parts"], mine["pieces"] = take_apart(parts, self.mesh)
            parts = {}
        mine, parts = on_cpu((mine, parts))  # the next step changes the originals
        content = {
            "format": FORMAT,
            "identity": dict(identity),
            "world_size": dist.get_world_size(),
            "best": self.best,
            "samples": self.samples,
            "history": self.history,
            **{name: getattr(self, name) for name in _POSITION},
        }
        if self.mesh is not None:
            content |= {"mesh": list(self.mesh.shape), "mean_loss_sum": losses.mean()}
            self._group = self._group or group_for_threads()
            self.in_background(self._write_shard, folder, content, mine, keep)
        elif ranks := gather_to_rank_0(mine):
            held = {
                name: _trained_and_held(self.parts[name], state) for name, state in parts.items()
            }
            content |= {"ranks": ranks, "parts": parts, "held": held}
            self.in_background(_write, folder, self.step, content, keep)
        self.saved_step = self.step

    def in_background(self, write: Callable[..., None], *given: Any) -> None:
        """Let the thread write a file, after those it has still to write."""
        self._writing.append(self._writer.submit(write, *given))

    def wait_for_own(self) -> None:
        """Wait for this rank's files; raises as `wait`, but on this rank only."""
        while self._writing:
            self._writing.pop(0).result()

    def wait(self) -> None:
        """Wait until the last snapshot and best.pt are on the disk; every rank calls this.

        Raises:
            TrainingError: weights are not finite, or the file cannot be written.
        """
        with agreed():
            self.wait_for_own()

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum.zero_()

    def resume(
        self, found: dict[str, Any], seed: int, *, steps_per_epoch: int, last_step: int
    ) -> None:
        """Load a snapshot's state; every rank calls this.

        On another number of ranks the model, the optimizer, the position and the order of samples
        are still exact, but each rank's random generators start from (seed, rank, step).

        Raises:
            InputError: the snapshot does not hold this run's state; or its epoch, batch and step
                contradict each other or the data, or are after the run's `last_step`.
        """
        with agreed():
            try:
                self._load(found, seed)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever other content makes torch or Python raise
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise InputError(unlike(found["file"], what)) from error
            done = self.epoch * steps_per_epoch + self.batch
            if self.step != done or self.batch > steps_per_epoch:
                place = f"step {self.step} is not after {self.batch} batches of epoch {self.epoch}"
                raise InputError(unlike(found["file"], place))
            if self.step > last_step:
                raise InputError(
                    f"snapshot {found['file']} is of step {self.step}, after this run's last step "
                    f"{last_step}: give a larger --max-steps, or another --output-dir"
                )

    def _load(self, found: dict[str, Any], seed: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mesh = None if self.mesh is None else list(self.mesh.shape)
        same = (found["world_size"], found.get("mesh")) == (world_size, mesh)
        present = {name: part.state_dict() for name, part in self.parts.items()}
        if self.mesh is not None:
            from common.snapshots.shards import put_together

            mine, parts = put_together(found["shards"], rank, present)
            losses = mine["loss_sum"] if same else found["mean_loss_sum"]
        else:
            ranks = found["ranks"]
            if len(ranks) != found["world_size"]:
                raise ValueError(f"it is of {len(ranks)} ranks")
            parts = found["parts"]
            losses = torch.cat([entry["loss_sum"] for entry in ranks])
            if self.sizes and len(losses) == sum(self.sizes):
                losses = losses.split(list(self.sizes))[rank]
            else:
                losses = losses.mean() if self.sizes else losses.chunk(world_size)[rank]
            mine = ranks[rank % len(ranks)]
        if unlike_ours := parts.keys() ^ self.parts.keys():
            raise ValueError(f"other parts: {', '.join(sorted(unlike_ours))}")
        for name, part in self.parts.items():
            _refuse_other_state(part, parts[name], found.get("held", {}).get(name))
            part.load_state_dict(parts[name])
        for name in _POSITION:
            setattr(self, name, found[name])
        if min(self.epoch, self.batch, self.step, self.metrics_bytes) < 0:
            raise ValueError("a negative position")
        self.saved_step, self.best = self.step, found.get("best")
        self.history = found.get("history", {})  # older snapshots have none
        if self.best:
            weights = dict(self.best.pop("weights"))
            self.best |= {} if rank else {"weights": weights}
        before = found.get("samples", {})
        if other := next((k for k, v in self.samples.items() if before.get(k, v) != v), None):
            log.warning(
                f"{other} is another one than when this snapshot was written: the run goes on, but "
                "not to the same bits"
            )
        if losses.dtype != self.loss_sum.dtype:
            raise ValueError(f"loss_sum is {losses.dtype}")
        self.loss_sum = losses.to(self.loss_sum.device, copy=True)
        if same:
            set_rng_state(mine["rng"])
            return
        seed_everything(seed, rank, self.step)
        if not found["identity"].get("virtual_ranks"):
            names = None if self.mesh is None else self.mesh.mesh_dim_names
            theirs, ours = (_sizes(names, each) for each in (found.get("mesh"), mesh))
            log.warning(
                f"the snapshot is of {found['world_size']} ranks{theirs}, this run has {world_size}"
                f"{ours}: it resumes at the same sample, but not with the same bits"
            )

    def _write_shard(
        self, folder: Path, content: dict[str, Any], mine: dict[str, Any], keep: int
    ) -> None:
        """In the thread of each rank: write its file; on rank 0, then write which files there are.

        Raises:
            TrainingError, PeerError: a rank cannot write, and every rank raises.
        """
        rank, step = dist.get_rank(), content["step"]
        own = {**mine["parts"]["model"], **{k: piece for k, (piece, _) in mine["pieces"].items()}}
        with agreed(self._group):
            _refuse_non_finite_weights(own, step, folder)
            name = write(folder, step, mine, rank).name
        names = gather(name, self._group)
        if rank == 0:
            if unseen := [name for name in names if not (folder / name).is_file()]:
                raise TrainingError(
                    f"rank 0 does not see {unseen[0]} in {folder}, where another rank wrote it: "
                    "--output-dir must be on a file system that all hosts share"
                )
            _write(folder, step, content | {"shards": names}, keep)


def on_cpu(state: Any, *, pinned: bool = True) -> Any:
    """A copy of nested lists and dicts whose tensors are on the CPU.

    `pinned`: a GPU copies into page-locked memory, which is faster, and which torch keeps for the
    next copy. Where there is none left, it copies into other memory.
    """
    gpus = set()

    def copied(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            gpus.add(tensor.device)
            if pinned:
                with suppress(RuntimeError):
                    own = torch.empty_like(tensor, device="cpu", pin_memory=True)
                    return own.copy_(tensor.detach(), non_blocking=True)
        return tensor.detach().to("cpu", copy=True)

    state = tree_map_only(Tensor, copied, state)
    synchronize(*gpus)
    return state


def _sizes(names: tuple[str, ...] | None, mesh: list[int] | None) -> str:
    """A mesh for a message."""
    pairs = zip(names or (), mesh or (), strict=False)
    return f" ({', '.join(f'{name} {size}' for name, size in pairs)})" if mesh else ""


def _write(folder: Path, step: int, content: dict[str, Any], keep: int) -> None:
    """In the thread of rank 0: check the weights, write the snapshot, and remove old ones."""
    if "parts" in content:  # else each rank has checked its shard
        _refuse_non_finite_weights(content["parts"]["model"], step, folder)
    write(folder, step, content)
    keep_newest(folder, keep)


def _refuse_non_finite_weights(weights: dict[str, Any], step: int, folder: Path) -> None:
    for name, value in weights.items():
        # The sum is cheap. It is not finite if a term is not, but also if it overflows.
        if value is not None and not value.sum().isfinite() and not value.isfinite().all():
            raise TrainingError(
                f"{name} is not finite after step {step}, and is not saved: try a lower --lr or "
                f"--warmup-epochs; last good snapshot: {newest_name(folder)}"
            )


def refuse_non_finite(losses: Tensor, step: int, folder: Path, what: str = "loss") -> None:
    """Raise TrainingError on every rank if any rank's loss is not finite.

    `losses` is (world_size, any number), the same on every rank; `what` names them.
    """
    bad = [rank for rank, values in enumerate(losses) if not values.isfinite().all()]
    if bad:
        advice = "try a lower --lr or --warmup-epochs"
        if what == "loss" and step == 1:
            advice = "before the first update: look for inputs and targets that are not finite"
        elif "val_loss" in what:
            advice += ", or look for validation samples that are not finite"
        elif "loss" not in what:
            advice = "look at the score function"
        raise TrainingError(
            f"the {what} is not finite on rank {', '.join(map(str, bad))} by step {step}: "
            f"{advice}; last good snapshot: {newest_name(folder)}"
        )


def _refuse_what_no_run_would_load(parts: Mapping[str, Any]) -> None:
    """Raise TrainingError for a state of more than tensors, numbers and texts."""
    for name, state in parts.items():
        torch.save(tree_map_only(Tensor, lambda _: None, state), file := BytesIO())
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except UnpicklingError as error:
            kind = re.search(r"GLOBAL (\S+)", str(error)) or ["", "value"]
            raise TrainingError(
                f"the state_dict() of {name}, given to loop.resume, holds a "
                f"{kind[1]}; a snapshot holds only tensors, numbers and texts, so that loading it "
                "runs no code: convert it, for instance by float()"
            ) from error


def _trained_and_held(part: Any, state: dict[str, Any]) -> list[list[int]]:
    """Of an optimizer: which parameters it trains, and of which it has a state.

    These are fewer if the loss has not depended on some; LBFGS has one, at the first parameter.
    """
    if not isinstance(part, torch.optim.Optimizer):
        return []
    parameters = [p for group in part.param_groups for p in group["params"]]
    trained = [index for index, p in enumerate(parameters) if p.requires_grad]
    return [trained, [*state["state"]]]


def _refuse_other_state(part: Any, given: dict[str, Any], held: list[list[int]] | None) -> None:
    """Raise ValueError for entries that `part` would ignore, miss or convert.

    `held`: what `_trained_and_held` gave when the snapshot was written. None: not known.
    """
    if isinstance(part, torch.optim.Optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        trained, having = _trained_and_held(part, given)
        before = held or [trained, trained if having else []]
        if [{*trained}, {*having}] != [{*indices} for indices in before]:
            raise ValueError(f"an optimizer of {len(given['state'])} parameters")
        pairs: list[tuple[str, Any, Any]] = [
            (f"{name} {index}", value, parameters[index])
            for index, state in given["state"].items()
            for name, value in state.items()
            if isinstance(value, Tensor) and name in _SHAPED_LIKE_THE_PARAMETER
        ]
    else:
        own = part.state_dict()
        pairs = [(name, given.get(name), own.get(name)) for name in own.keys() | given.keys()]
    for name, theirs, ours in pairs:
        if _kind(theirs) != _kind(ours):
            raise ValueError(f"{name} is {_kind(theirs)}, not {_kind(ours)}")


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__
