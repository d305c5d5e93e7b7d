"""The folder that a run leaves (README.md, "What a run leaves")."""

import errno
import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import log, restart
from common.data.datasets import Data
from common.errors import InputError, TrainingError
from common.files import (
    fix,
    lock,
    lost_file,
    new_folder,
    not_writable,
    read_json,
    save_weights,
    weights_sha256,
    write_json,
)
from common.git import changes
from common.group.collectives import agreed, broadcast
from common.identity import decisive, refuse_another_run, refuse_unlike_rank_0
from common.launch.ranks import Ranks
from common.launch.report import leave
from common.manifest import continued, describe_run
from common.run.options import MAY_DIFFER_BY_HOST, RunOptions, flatten
from common.snapshots.state import TrainingState
from common.terminal import show_table
from common.watch.record import Watch

_FILES = {
    *("config.json", "manifest.json", "metrics.jsonl", "summary.json", "class_indices.json"),
    *("preprocessing.json", "held_out.json", "changes.diff"),
    *("model.pt", "best.pt", "snapshots", "weights", "tensorboard", "logs"),
}
"""What a run writes into its folder, besides .lock."""

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
                restarted = restart.reached().folder
                folder = folder or Path(restarted or new_folder(Path("runs") / recipe))
                self._lock = _own(folder)
                restart.record(folder)
        self.folder: Path = broadcast(folder)
        self.snapshots = self.folder / "snapshots"
        self.logs = self.folder / "logs"
        own = self.logs / f"rank_{ranks.rank}.log"
        with agreed():
            try:
                own.parent.mkdir(parents=True, exist_ok=True)
                file = logging.FileHandler(own, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise InputError(not_writable(self.folder, error)) from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
        log.info(f"output_dir: {self.folder}")
        self._metrics: Any = None
        self._metrics_hash = hashlib.sha256()
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

    def refuse_another_run(self) -> None:
        """Raise InputError on every rank if the folder holds a run with other options."""
        with agreed():
            held = self.folder / "config.json"
            if self.ranks.is_main and held.is_file():
                theirs = decisive(read_json(held), self.config)
                ours = decisive(self._values, self.config)
                refuse_another_run(theirs, ours, f"folder {self.folder}", self._to_train_further())

    def finished(self, last_step: int, data: Data, *, can_resume: bool) -> bool:
        """Whether nothing is left to do up to `last_step`; if so, show the run's summary.

        A run that has ended can train more steps, or write a lost file again, from a snapshot.

        Raises:
            InputError: something is left to do, but there is no snapshot (not `can_resume`); or
                model.pt is not the one that the run wrote.
        """
        summary: dict[str, Any] = {}
        with agreed():
            if self.ranks.is_main and (self.folder / "summary.json").exists():
                summary = read_json(self.folder / "summary.json", "steps")
                more = summary["steps"] < last_step
                records = ("config.json", "manifest.json", *_records(data))
                lost = "" if more else lost_file(self.folder, summary, records)
                missing = f"{lost} is gone or damaged" if lost else "its snapshots are gone"
                what = f"the run in {self.folder} has ended, but {missing}"
                if lost and can_resume:
                    log.warning(f"{what}: it is written again")
                elif (more or lost) and not can_resume:
                    raise InputError(f"{what}: choose another --output-dir to train again")
                if more or lost:
                    summary = {}
        summary = broadcast(summary)
        if summary:
            done = f"already finished after step {summary['steps']}: {self.folder} is unchanged"
            log.info(done + self._to_train_further())
            show_table({**summary, "output_dir": str(self.folder)})
        return bool(summary)

    def _to_train_further(self) -> str:
        model = self.folder / "model.pt"
        how = f"; to train its model further, give --weights {model} and another --output-dir"
        return how if "weights" in self._values and model.exists() else ""

    def begin(self, state: TrainingState, data: Data, global_batch_size: int) -> None:
        """Write config and manifest, and open the metrics, cut at the resumed step."""
        about = {"device": str(self.devices[0]), "world_size": self.ranks.world_size}
        Watch(self.logs, self.ranks.rank, about, self.options.timeout_s, lambda: state.step)
        if self.ranks.local_rank == 0:
            leave({"watched": str(self.logs.absolute())})
        manifest = describe_run(self.devices, self.options.seed, data.fingerprint)
        with agreed():
            if self.ranks.is_main:
                self._write_record(manifest, state.step, global_batch_size)
                for name, content in _records(data).items():
                    write_json(self.folder / name, content)
                self._metrics = (self.folder / "metrics.jsonl").open("ab+")
                self._metrics.truncate(state.metrics_bytes)
                self._metrics.seek(0)
                self._metrics_hash.update(self._metrics.read())
                from torch.utils.tensorboard import SummaryWriter

                try:
                    self._tensorboard = SummaryWriter(
                        str(self.folder / "tensorboard"), purge_step=state.step + 1
                    )
                except UnicodeError as error:
                    log.warning(f"no curves: TensorBoard cannot write into such a folder ({error})")

    def _write_record(self, manifest: dict[str, Any], step: int, global_batch_size: int) -> None:
        resolved = {
            "output_dir": str(self.folder),
            "global_batch_size": global_batch_size,
            "device": self.devices[0].type,
            "devices_used": list(map(str, self.devices)),  # a resumed run may use others
            "backend": dist.get_backend(),
            "resume": f"step {step}" if step else "never",
        }
        write_json(self.folder / "config.json", {**self._values, **resolved})
        record, then = self.folder / "manifest.json", {}
        try:
            then = read_json(record) if step and record.is_file() else {}
        except InputError:
            log.warning(f"{record} was damaged: it is written again, without earlier starts")
        write_json(record, continued(manifest, then, step))
        diff, kept = changes() if manifest["changed_files"] else b"", self.folder / "changes.diff"
        if step and kept.exists() and kept.read_bytes() != diff:
            kept.rename(self.folder / f"changes_until_step_{step}.diff")
        if diff:
            kept.write_bytes(diff)

    def metrics(self, step: int, epoch: int, **values: float) -> None:
        """Add a line to metrics.jsonl and the scalars to TensorBoard, on rank 0."""
        if not self.ranks.is_main:
            return
        line = json.dumps({"step": step, "epoch": epoch, **values}, allow_nan=False) + "\n"
        try:
            self._metrics.write(line.encode())
            self._metrics.flush()
        except OSError as error:
            raise TrainingError(
                f"cannot write {self._metrics.name} ({error.strerror}): {fix(error)}, then "
                "run the same command to resume from the last snapshot"
            ) from error
        self._metrics_hash.update(line.encode())
        self.curves(step, **values)

    def curves(self, step: int, **values: float) -> None:
        """Add scalars to TensorBoard, on rank 0."""
        try:
            for name, value in values.items() if self._tensorboard else ():
                self._tensorboard.add_scalar(_IN_TENSORBOARD.get(name, name), value, step)
        except OSError as error:
            log.warning(f"no more curves for TensorBoard: {error}")
            self._tensorboard = None

    def metrics_so_far(self) -> tuple[int, str]:
        """Length and SHA-256 of metrics.jsonl, which is now on the disk; 0 on other ranks."""
        if not self.ranks.is_main:
            return 0, ""
        os.fsync(self._metrics.fileno())
        return self._metrics.tell(), self._metrics_hash.hexdigest()

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
        with suppress(OSError):
            if self._tensorboard:
                self._tensorboard.close()
        self._metrics.close()
        self._lock.close()
        show_table({**content, "output_dir": str(self.folder)})


def _records(data: Data) -> dict[str, Any]:
    """Names and contents of the files that describe the data."""
    found = {
        "class_indices.json": dict(enumerate(data.class_names)),
        "preprocessing.json": data.preprocessing if data.resize else None,
        "held_out.json": list(data.held_out),
    }
    return {name: content for name, content in found.items() if content}


def _own(folder: Path) -> IO[str]:
    """Make and lock the folder of a run.

    Raises:
        InputError: the folder cannot be written, belongs to a run that is still going, or holds
            files that look like a run's and are not.
    """
    try:
        if len(os.fsencode(folder.absolute())) > 3800:  # of 4,096 with the names of the files
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        folder.mkdir(parents=True, exist_ok=True)
        held, config = {path.name for path in folder.iterdir()}, folder / "config.json"
        ours = ".lock" in held or (config.is_file() and "recipe" in read_json(config))
        if not ours and (foreign := sorted(held & _FILES)):
            raise InputError(
                f"{folder} holds {', '.join(foreign)}, but neither config.json nor .lock of a run: "
                "choose another --output-dir"
            )
        return lock(folder)
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error
