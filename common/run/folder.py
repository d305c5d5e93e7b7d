"""The folder that a run leaves (README.md, "What a run leaves")."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.datasets import Data
from common.errors import InputError
from common.files import mebibytes, new_folder, save_weights, weights_sha256, write_json
from common.group.collectives import agreed, broadcast
from common.launch.ranks import Ranks
from common.run.manifest import describe_run
from common.run.options import (
    MAY_DIFFER_BY_HOST,
    RunOptions,
    decisive,
    flatten,
    refuse_another_run,
    refuse_unlike_rank_0,
)
from common.run.snapshot import TrainingState
from common.run.snapshot_files import list_snapshots

log = logging.getLogger("recipes")

_IN_TENSORBOARD = {"val_accuracy": "accuracy", "lr": "learning_rate"}
"""Names in metrics.jsonl that are different in TensorBoard."""


class Run:
    """The folder of one run. Every rank has a Run; apart from logs/, rank 0 alone writes."""

    def __init__(self, recipe: str, config: Any, ranks: Ranks, *devices: torch.device) -> None:
        """Make the folder and this rank's log; overwrite nothing. Calls collectives.

        This process uses all `devices`; the loss is on the first.

        Raises:
            InputError: the folder cannot be written, or the options are not rank 0's.
        """
        self.config, self.ranks = config, ranks
        self.options: RunOptions = config.run
        self.devices = list(dict.fromkeys(devices))
        self._started_s = time.monotonic()
        self._values = {"recipe": recipe, **flatten(config)}
        given = {k: v for k, v in self._values.items() if k not in MAY_DIFFER_BY_HOST}
        refuse_unlike_rank_0(given, "not started like rank 0")
        folder = self.options.output_dir
        with agreed():
            if ranks.is_main:
                folder = folder or new_folder(Path("runs") / recipe)
        self.folder: Path = broadcast(folder)
        self.snapshots = self.folder / "snapshots"
        with agreed():
            try:
                (self.folder / "logs").mkdir(parents=True, exist_ok=True)
                file = logging.FileHandler(self.folder / "logs" / f"rank_{ranks.rank}.log")
            except OSError as error:
                raise InputError(
                    f"--output-dir {self.folder} cannot be written: {error}"
                ) from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
        self._metrics: Any = None
        self._tensorboard: Any = None

    def resolve(self, **options: Any) -> None:
        """Record what an `auto` was resolved to, in config.json and in the run's identity."""
        self._values |= options

    def identity(self, global_batch_size: int, fingerprint: str) -> dict[str, Any]:
        """What must be the same in a snapshot for this run to resume from it."""
        return {
            **decisive(self._values, self.config),
            "total_batch_size": global_batch_size,
            "data_fingerprint": fingerprint,
        }

    def finished(self, last_step: int) -> bool:
        """Whether this run has already reached its last step; if so, show its summary."""
        summary = None
        if self.ranks.is_main and (self.folder / "summary.json").is_file():
            summary = json.loads((self.folder / "summary.json").read_text())
        summary = broadcast(summary)
        if not summary or summary["steps"] < last_step:
            return False
        log.info(f"already finished after step {summary['steps']}: {self.folder} is unchanged")
        self._show(summary)
        return True

    def begin(self, state: TrainingState, data: Data, global_batch_size: int) -> None:
        """Write config and manifest, and open the metrics, cut at the resumed step.

        Raises:
            InputError: the folder holds another run, which has no snapshots.
        """
        manifest = describe_run(self.devices, self.options.seed, data.fingerprint)
        with agreed():
            if self.ranks.is_main:
                self._write_record(manifest, state.step, global_batch_size)
                write_json(self.folder / "class_indices.json", dict(enumerate(data.class_names)))
                self._metrics = (self.folder / "metrics.jsonl").open("ab")
                # A snapshot from another folder may count more bytes than this file has.
                self._metrics.truncate(min(state.metrics_bytes, self._metrics.tell()))
                self._metrics.seek(0, os.SEEK_END)
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(
                    str(self.folder / "tensorboard"), purge_step=state.step + 1
                )

    def _write_record(self, manifest: dict[str, Any], step: int, global_batch_size: int) -> None:
        held, record = self.folder / "config.json", self.folder / "manifest.json"
        if held.is_file() and not list_snapshots(self.snapshots):
            theirs = decisive(json.loads(held.read_text()), self.config)
            refuse_another_run(theirs, decisive(self._values, self.config), f"folder {self.folder}")
        resolved = {
            "output_dir": str(self.folder),
            "global_batch_size": global_batch_size,
            "device": self.devices[0].type,
            "backend": dist.get_backend(),
        }
        write_json(held, {**self._values, **resolved})
        then = json.loads(record.read_text()) if step and record.is_file() else {}
        write_json(record, _continued(manifest, then, step))

    def metrics(self, step: int, epoch: int, **values: float) -> None:
        """Add a line to metrics.jsonl and the scalars to TensorBoard, on rank 0."""
        if not self.ranks.is_main:
            return
        line = json.dumps({"step": step, "epoch": epoch, **values}, allow_nan=False)
        self._metrics.write(line.encode() + b"\n")
        self._metrics.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(_IN_TENSORBOARD.get(name, name), value, step)

    @property
    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl so far; 0 on other ranks."""
        return int(self._metrics.tell()) if self._metrics else 0

    def finish(self, state_dict: dict[str, Tensor], **summary: Any) -> None:
        """Write model.pt and summary.json and print the table, on rank 0."""
        if not self.ranks.is_main:
            return
        weights = {name: value.detach().cpu() for name, value in state_dict.items()}
        save_weights(weights, self.folder / "model.pt")
        content = {
            "recipe": self._values["recipe"],
            "world_size": self.ranks.world_size,
            **summary,
            **({} if self.options.deterministic else {"deterministic": False}),
            "elapsed_s": round(time.monotonic() - self._started_s, 3),
            "weights_sha256": weights_sha256(weights),
        }
        write_json(self.folder / "summary.json", content)
        self._tensorboard.close()
        self._metrics.close()
        self._show(content)

    def _show(self, summary: dict[str, Any]) -> None:
        rows = {k: _shown(k, v) for k, v in summary.items()} | {"output_dir": str(self.folder)}
        width = max(map(len, rows))
        log.info("\n".join(["", *(f"  {k:<{width}}  {v}" for k, v in rows.items()), ""]))


def _continued(now: dict[str, Any], then: dict[str, Any], step: int) -> dict[str, Any]:
    """The manifest `now`; under `before`, what was different until `step`, newest last."""
    before = then.pop("before", [])
    changed = {
        name: value
        for name, value in then.items()
        if name not in ("command", "seed", "start") and now.get(name) != value
    }
    if changed:
        before.append({"until_step": step, **changed})
    # A change of hosts is usual, and TrainingState.resume warns about the number of ranks.
    if others := [name for name in changed if name not in ("hosts", "world_size")]:
        log.warning(
            f"resuming from step {step} with another {', '.join(others)}: manifest.json keeps the "
            "values before it"
        )
    return {**now, "before": before} if before else now


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return mebibytes(value)
    if name == "peak_memory_bytes":
        return ", ".join(map(mebibytes, value))
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
