"""The folder that a run leaves (README.md, "What a run leaves")."""

import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError
from common.files import mebibytes, save_weights, weights_sha256, write_json
from common.group.collectives import agreed, broadcast
from common.launch.ranks import Ranks
from common.run.options import MAY_DIFFER_BY_HOST, RunOptions, decisive, flatten
from common.run.snapshot import TrainingState
from common.run.snapshot_files import differences, list_snapshots, refuse_mismatch

log = logging.getLogger("recipes")


class Run:
    """One run's folder. Every rank has one of these; rank 0 alone writes."""

    def __init__(
        self, recipe: str, config: Any, options: RunOptions, ranks: Ranks, *devices: torch.device
    ) -> None:
        """Make the folder if need be and write nothing over. Calls collectives.

        Args:
            recipe: its name.
            config: all options.
            options: those of the run.
            ranks: this process's.
            devices: that this process uses; the loss is on the first.

        Raises:
            InputError: a folder that cannot be written, or other options than rank 0's.
        """
        self._flat = flatten(config)
        given = {k: v for k, v in self._flat.items() if k not in MAY_DIFFER_BY_HOST}
        rank_0 = broadcast(given)
        with agreed():
            if detail := differences(rank_0, given):
                raise InputError(f"not started like rank 0: {detail}")
        with agreed():
            self.folder = options.output_dir or Path()
            if options.output_dir is None and ranks.is_main:
                self.folder = new_folder(Path("runs") / recipe)
        self.folder = broadcast(self.folder)
        self.devices, self.options = list(dict.fromkeys(devices)), options
        self.snapshots = self.folder / "snapshots"
        self.recipe, self.ranks = recipe, ranks
        self._started_s = time.monotonic()
        self._metrics: Any = None
        self._tensorboard: Any = None
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

    def identity(self, global_batch_size: int, fingerprint: str) -> dict[str, Any]:
        """The options that must be the same for a snapshot to be of this run."""
        return {
            "recipe": self.recipe,
            **decisive(self._flat),
            "total_batch_size": global_batch_size,
            "data_fingerprint": fingerprint,
        }

    def resolve(self, **options: Any) -> None:
        """Put what an `auto` came to in its place, in config.json and in the run's identity."""
        self._flat |= options

    def finished(self, last_step: int) -> bool:
        """Whether the folder holds the end of this very run, which then stays as it is."""
        done = None
        if self.ranks.is_main and (self.folder / "summary.json").is_file():
            done = json.loads((self.folder / "summary.json").read_text())
        done = broadcast(done)
        if not done or done["steps"] < last_step:
            return False
        log.info(f"already finished after step {done['steps']}: {self.folder} stays as it is")
        self._show(done)
        return True

    def begin(
        self,
        manifest: dict[str, Any],
        state: TrainingState,
        class_names: list[str],
        global_batch_size: int,
    ) -> None:
        """Write config and manifest and open the metrics, cut back to the resumed position.

        Raises:
            InputError: the folder holds another run without snapshots.
        """
        with agreed():
            if self.ranks.is_main:
                held = self.folder / "config.json"
                ours = {
                    "recipe": self.recipe,
                    **self._flat,
                    "output_dir": str(self.folder),
                    "global_batch_size": global_batch_size,
                    "device": self.devices[0].type,
                    "backend": dist.get_backend(),
                }
                if held.is_file() and not list_snapshots(self.snapshots):
                    theirs = json.loads(held.read_text())
                    refuse_mismatch(decisive(theirs), decisive(ours), f"folder {self.folder}")
                write_json(held, ours)
                write_json(self.folder / "manifest.json", self._continued(manifest, state.step))
                write_json(self.folder / "class_indices.json", dict(enumerate(class_names)))
                self._metrics = (self.folder / "metrics.jsonl").open("ab")
                # A snapshot from another folder speaks of another file: nothing of it is here.
                self._metrics.truncate(min(state.metrics_bytes, self._metrics.tell()))
                self._metrics.seek(0, os.SEEK_END)
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(
                    str(self.folder / "tensorboard"), purge_step=state.step + 1
                )

    def _continued(self, manifest: dict[str, Any], step: int) -> dict[str, Any]:
        """The manifest with what was otherwise until `step`, newest last, under `before`."""
        file = self.folder / "manifest.json"
        then = json.loads(file.read_text()) if step and file.is_file() else {}
        before = then.pop("before", [])
        changed = {
            name: value
            for name, value in then.items()
            if name not in ("command", "seed", "start") and manifest.get(name) != value
        }
        if changed:
            before.append({"until_step": step, **changed})
        # Another host is nothing unusual, and of another number of ranks the snapshot speaks.
        if others := [name for name in changed if name not in ("hosts", "world_size")]:
            log.warning(
                f"goes on from step {step} with other {', '.join(others)}: manifest.json "
                "keeps what it was before"
            )
        return {**manifest, "before": before} if before else manifest

    def metrics(self, step: int, epoch: int, **values: float) -> None:
        """Add a line to metrics.jsonl and the scalars to TensorBoard; rank 0 only acts."""
        if not self.ranks.is_main:
            return
        line = json.dumps({"step": step, "epoch": epoch, **values}, allow_nan=False)
        self._metrics.write(line.encode() + b"\n")
        self._metrics.flush()
        names = {
            "loss": "loss",
            "val_accuracy": "accuracy",
            "lr": "learning_rate",
            "samples_per_s": "samples_per_s",
            "val_loss": "val_loss",
        }
        for key, name in names.items():
            if key in values:
                self._tensorboard.add_scalar(name, values[key], step)

    @property
    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl so far; 0 on other ranks."""
        return int(self._metrics.tell()) if self._metrics else 0

    def save_epoch_weights(self, state_dict: dict[str, Tensor], epoch: int) -> None:
        """Keep the weights as they are after `epoch`; rank 0 only acts."""
        if self.ranks.is_main:
            save_weights(state_dict, self.folder / "weights" / f"epoch_{epoch:04d}.pt")

    def finish(self, state_dict: dict[str, Tensor], **summary: Any) -> None:
        """Write model.pt and summary.json and print the table; rank 0 only acts."""
        if not self.ranks.is_main:
            return
        weights = {name: value.detach().cpu() for name, value in state_dict.items()}
        save_weights(weights, self.folder / "model.pt")
        content = {
            "recipe": self.recipe,
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


def new_folder(parent: Path) -> Path:
    """A folder named by the time, made here: a second run of the same second gets another."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        try:
            (parent / f"{stamp}{suffix}").mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"{parent} cannot be written: {error}; give --output-dir") from error
        return parent / f"{stamp}{suffix}"
    raise InputError(f"{parent} holds a hundred runs of {stamp}: give --output-dir")


def result_folder(given: Path | None, recipe: str, kind: str) -> Path:
    """The folder of a measurement, made if need be; it must hold none of its kind yet.

    Args:
        given: by the user, or None.
        recipe: whose folder under runs/ is taken where none is given.
        kind: the JSON file's name without its suffix.

    Raises:
        InputError: it holds one, or cannot be written.
    """
    folder = given or new_folder(Path("runs") / recipe)
    if (folder / f"{kind}.json").exists():
        raise InputError(
            f"{folder} holds a {kind} already ({kind}.json): choose another --output-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--output-dir {folder} cannot be written: {error}") from error
    return folder


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run's folder has logged, in that order: a dict a line of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return mebibytes(value)
    if name == "peak_memory_bytes":
        return ", ".join(map(mebibytes, value))
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
