"""The folder that a run leaves (README.md, "What a run leaves")."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from common import log, run_status
from common.data.datasets import Data
from common.errors import InputError, TrainingError
from common.git import changes
from common.group.collectives import agreed, broadcast
from common.group.devices import choose_backend
from common.identity import Options, decisive, refuse_another_run, refuse_unlike_rank_0
from common.kernels import bits_hold_on
from common.launch.ranks import Ranks
from common.launch.report import leave
from common.manifest import continued, describe_run
from common.output_folder import make_folder, not_writable
from common.owner import mark, own
from common.reading import bytes_in, read_json
from common.run.check import folder_of_check
from common.run.claim import claim, refuse_in_data, refuse_unwritable
from common.run.curves import Curves
from common.run.options import MAY_DIFFER_BY_HOST, RunOptions, flatten
from common.seeds import choose_precision, mixed_precision
from common.snapshots.snapshot_files import keep_newest, list_snapshots
from common.snapshots.state import TrainingState
from common.terminal import show_table
from common.training.models import how_to_build
from common.watch.clock import Clock, in_words
from common.watch.record import Watch
from common.weights import save_weights, weights_sha256
from common.writing import RESUME, part_from_copies, write_bytes, write_json, writing

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
        self._started_s = self._lap_s = time.monotonic()
        self.start_s: dict[str, float] = {}
        """The parts of the start of this rank, by what they were spent on [s]."""
        self.clock = Clock(*self.devices)
        self.device = self.devices[0]
        self.dtype, self.autocast, self.scaler = mixed_precision(
            self.options.precision, self.device
        )
        precision = choose_precision(self.options.precision, self.device)
        self._values = {"recipe": recipe, **flatten(config), "precision": precision}
        given = {k: v for k, v in self._values.items() if k not in MAY_DIFFER_BY_HOST}
        refuse_unlike_rank_0(given, "not started like rank 0")
        checked, folder = folder_of_check(), self.options.output_dir
        self._lock: IO[str] | None = None
        made: list[Path] = []
        with agreed():
            if ranks.is_main:
                if self._values.get("data") == "imagefolder":
                    refuse_in_data(folder or Path("runs"), Path(self._values["data_path"]))
                if checked and folder:
                    refuse_unwritable(folder)
                folder, self._lock, made = claim(checked or folder, recipe)
        self.folder: Path
        self.folder, made = broadcast((folder, made))
        if not self._lock:
            made = [path for path in made if path.name != ".lock"]  # only rank 0 gives that back
        self.before = (checked and self.options.output_dir) or self.folder
        self.snapshots = self.folder / "snapshots"
        self.logs = self.folder / "logs"
        with agreed():
            if not ranks.is_main:
                make_folder(self.folder)  # it is missing if hosts share no file system
            try:
                self._here = own(self.folder, self._lock)
                logs = self._here / "logs"
                logs.mkdir(exist_ok=True)
                own_log = logs / f"rank_{ranks.rank}.log"
                if made and not own_log.exists():
                    made = [self.logs / own_log.name, self.logs, *made]
                part_from_copies(own_log)
                file = logging.FileHandler(own_log, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise InputError(not_writable(self.folder, error)) from error
        run_status.claimed(self.folder, made, writes=ranks.is_main)
        if self._lock:
            inode = os.fstat(self._lock.fileno()).st_ino
            leave({"run": str(self.folder.absolute()), "inode": inode})
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
        log.info(f"output_dir: {self.folder}")
        if self.devices[0].type == "cpu":
            faster = self.options.portable and torch.cpu._is_avx512_supported()
            more = "; --no-portable trains faster here, to other bits" if faster else ""
            log.info(f"the same bits on {self._bits_hold_on}{more}")
        self._metrics: Any = None
        self._metrics_hash, self._metrics_bytes = hashlib.sha256(), 0
        self._curves: Curves | None = None
        self._hashes: dict[str, str] = {}

    @property
    def _bits_hold_on(self) -> str:
        # fp16 was not tried on other CPUs; torch.compile compiles for the CPU that is there.
        other = self.options.precision == "fp16" or self._values.get("compile")
        return bits_hold_on(self.devices[0], portable=self.options.portable and not other)

    def resolve(self, **options: Any) -> None:
        """Record what an `auto` was resolved to, in config.json and in the run's identity."""
        self._values |= options

    def identity(self, global_batch_size: int, data: Data) -> dict[str, Any]:
        """What must be the same on every rank, and in a snapshot to resume from."""
        return {
            **decisive(self._values, self.config),
            "total_batch_size": global_batch_size,
            "data_fingerprint": data.fingerprint,
            "samples": [len(data.train), len(data.val)],
            "indices_sha256": data.indices_sha256,
        }

    def refuse_another_run(self) -> None:
        """Raise InputError on every rank if the folder holds a run with other options."""
        with agreed():
            held = self.before / "config.json"
            if self.ranks.is_main and held.is_file():
                theirs = decisive(read_json(held), self.config)
                ours = decisive(self._values, self.config)
                refuse_another_run(theirs, ours, f"folder {self.before}", self._to_train_further())

    def finished(self, last_step: int, *, can_resume: bool) -> bool:
        """Whether nothing is left to do up to `last_step`; if so, show the run's summary.

        A run that has ended can train more steps, or write a lost file of weights, from a snapshot.

        Raises:
            InputError: something is left to do, but there is no snapshot (not `can_resume`).
        """
        summary: dict[str, Any] = {}
        with agreed():
            if self.ranks.is_main and (self.before / "summary.json").exists():
                summary = read_json(self.before / "summary.json", "steps")
                more = summary["steps"] < last_step != summary.get("planned_steps")
                files = ["model.pt", *(["best.pt"] if summary.get("best") else [])]
                lost = [name for name in files if not (self.before / name).exists()]
                if (more or lost) and not can_resume:
                    raise InputError(
                        f"the run in {self.before} has ended, but its "
                        f"{f'{lost[0]} is' if lost else 'snapshots are'} gone: choose another "
                        "--output-dir to train again"
                    )
                if more or lost:
                    summary = {}
        summary = broadcast(summary)
        if summary:
            early = f", early {summary['early']}" if "early" in summary else ""
            done = f"already finished after step {summary['steps']}{early}: "
            done += f"{self.before} is unchanged"
            if folder_of_check() and self.ranks.is_main:
                print(f"ok: {done}", flush=True)
            log.info(done + self._to_train_further())
            self._show(summary)
        return bool(summary)

    def _to_train_further(self) -> str:
        model = self.before / "model.pt"
        how = f"; to train its model further, give --weights {model} and another --output-dir"
        return how if "weights" in self._values and model.exists() else ""

    def begin(self, state: TrainingState, data: Data, global_batch_size: int) -> None:
        """Write config and manifest, and open the metrics, cut at the resumed step."""
        about = {"device": str(self.devices[0]), "world_size": self.ranks.world_size}
        with writing(self.logs):
            Watch(self.logs, self.ranks.rank, about, self.options.timeout_s, lambda: state.step)
        if self.ranks.local_rank == 0:
            leave({"watched": str(self.logs.absolute())})
        manifest = describe_run(self.devices, self.options.seed, data.fingerprint)
        manifest |= {"classes": list(data.class_names)} if data.class_names else {}
        with agreed():
            run_status.begun()
            if self.ranks.is_main:
                with writing(self.folder / "summary.json"):
                    # A run that goes on beyond its end has not finished any more.
                    (self._here / "summary.json").unlink(missing_ok=True)
                self._write_record(manifest, state.step, global_batch_size)
                records = _records(data, self._values)
                for name, content in records.items():
                    write_json(self.folder / name, content)
                if seen := records.get("preprocessing.json"):
                    self._hashes = {"preprocessing_sha256": preprocessing_sha256(seen)}
                with writing(self.folder / "metrics.jsonl"):
                    part_from_copies(self._here / "metrics.jsonl")
                    self._metrics = (self._here / "metrics.jsonl").open("ab+")
                    if os.fstat(self._metrics.fileno()).st_size != state.metrics_bytes:
                        self._metrics.truncate(state.metrics_bytes)
                    self._metrics.seek(0)
                    self._metrics_hash.update(self._metrics.read())
                    self._metrics_bytes = state.metrics_bytes
                mark("metrics.jsonl", os.fstat(self._metrics.fileno()))
                try:
                    self._curves = Curves(self._here / "tensorboard", state.step)
                except OSError as error:
                    log.warning(f"no curves for TensorBoard: {error.strerror}")

    def _write_record(self, manifest: dict[str, Any], step: int, global_batch_size: int) -> None:
        resolved = {
            "output_dir": str(self.folder),
            "global_batch_size": global_batch_size,
            "keep_snapshots": self.options.snapshots_on_the_way,
            "device": self.devices[0].type,
            "devices_used": list(map(str, self.devices)),  # a resumed run may use others
            "backend": choose_backend(self.options.backend, self.devices[0]),
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
            write_bytes(self.folder / f"changes_until_step_{step}.diff", kept.read_bytes())
            kept.unlink()
        if diff:
            write_bytes(kept, diff)

    def metrics(self, step: int, epoch: int, **values: float) -> None:
        """Add a line to metrics.jsonl and the scalars to TensorBoard, on rank 0."""
        if not self.ranks.is_main:
            return
        line = json.dumps({"step": step, "epoch": epoch, **values}, allow_nan=False) + "\n"
        self._refuse_altered_metrics()
        with writing(self.folder / "metrics.jsonl", then=RESUME):
            self._metrics.write(line.encode())
            self._metrics.flush()
        self._metrics_hash.update(line.encode())
        self._metrics_bytes += len(line.encode())
        self.curves(step, **values)

    def curves(self, step: int, **values: float) -> None:
        """Add scalars to TensorBoard, on rank 0."""
        try:
            if self._curves:
                named = {_IN_TENSORBOARD.get(name, name): value for name, value in values.items()}
                self._curves.add(step, named)
        except OSError as error:
            log.warning(f"no more curves for TensorBoard: {error.strerror}")
            self._close_curves()

    def _close_curves(self) -> None:
        with suppress(OSError):
            if self._curves:
                self._curves.close()
        self._curves = None

    def metrics_so_far(self) -> tuple[int, str]:
        """Length and SHA-256 of metrics.jsonl, which is now on the disk; 0 on other ranks."""
        if not self.ranks.is_main:
            return 0, ""
        self._refuse_altered_metrics()
        with writing(self.folder / "metrics.jsonl", then=RESUME):
            os.fsync(self._metrics.fileno())
        return self._metrics_bytes, self._metrics_hash.hexdigest()

    def _refuse_altered_metrics(self) -> None:
        """A snapshot of now would not fit the file, and no run could resume from it."""
        found, file = os.fstat(self._metrics.fileno()).st_size, self.folder / "metrics.jsonl"
        if found != self._metrics_bytes:
            how = "begin again in another --output-dir"
            for newest in list_snapshots(self.snapshots)[:1]:
                how = f"resume without it: --resume {newest} in another --output-dir"
            raise TrainingError(
                f"{file} was changed while this run wrote it (it has {found} bytes, not "
                f"{self._metrics_bytes}): restore it and run the same command, or {how}"
            )

    def finish(self, state_dict: dict[str, Tensor], *, all_epochs: bool, **summary: Any) -> None:
        """Write model.pt and summary.json and print the table, on rank 0.

        After all epochs, not only `--max-steps`, older snapshots are removed.
        """
        if not self.ranks.is_main:
            run_status.say(run_status.FINISHED)
            return
        weights = {name: value.detach().cpu() for name, value in state_dict.items()}
        save_weights(weights, self.folder / "model.pt")
        content = {
            "recipe": self._values["recipe"],
            "world_size": self.ranks.world_size,
            **summary,
            **({} if self.options.deterministic else {"deterministic": False}),
            "bits_hold_on": self._bits_hold_on,
            "elapsed_s": round(time.monotonic() - self._started_s, 3),
            "weights_sha256": weights_sha256(weights),
            **self._hashes,
        }
        write_json(self.folder / "summary.json", content)
        early = {"early": summary["early"]} if "early" in summary else {}
        run_status.say(run_status.FINISHED, **early)
        if all_epochs:  # else more steps may follow
            keep_newest(self.snapshots, self.options.keep_snapshots or 1)
        self._close_curves()
        self._metrics.close()
        if self._lock:
            self._lock.close()
        self._show(content)

    def lap(self, part: str, since_s: float | None = None) -> None:
        """A part of the start ends here, which began with the end of the one before."""
        now_s = time.monotonic()
        if part not in self.start_s:
            self.start_s[part] = round(now_s - (since_s or self._lap_s), 3)
            self._lap_s = now_s

    def _show(self, summary: dict[str, Any]) -> None:
        model = f"{self.folder / 'model.pt'} (how to use it: docs/use.md)"
        shown = {key: value for key, value in summary.items() if key != "preprocessing_sha256"}
        if spent_s := shown.get("time_s"):
            shown["time_s"] = in_words(spent_s)
        if start_s := shown.get("start_s"):
            shown["start_s"] = ", ".join(f"{part} {s:.1f}" for part, s in start_s.items())
        place = {"output_dir": str(self.folder), "output_dir_bytes": bytes_in(self.folder)}
        show_table({**shown, **place, "model": model})


def preprocessing_sha256(seen: Mapping[str, Any]) -> str:
    """SHA-256 of what preprocessing.json says of pixels and model; its user may rename classes."""
    kept = {key: value for key, value in seen.items() if key != "classes"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _records(data: Data, options: Options) -> dict[str, Any]:
    """Names and contents of the files that describe the data, and the model for it."""
    model = how_to_build(options, data.side)
    seen = {**data.preprocessing, **({"model": model} if model else {})}
    found = {
        "class_indices.json": dict(enumerate(data.class_names)),
        "preprocessing.json": seen if data.resize else None,
        "held_out.json": list(data.held_out),
    }
    return {name: content for name, content in found.items() if content}
