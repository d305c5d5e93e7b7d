"""Curves for TensorBoard: scalars by step, in the folder of a run."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any


class Curves:
    """One event file, which is opened once and written by the caller's thread.

    TensorBoard's own writer opens its file again, by name, for each write in a thread of its own.
    When the disk is full or the folder is gone, that thread dies with a traceback.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Make `folder` and a new file in it. TensorBoard drops older curves after `step`.

        Raises:
            OSError: it cannot be written; the other methods raise it, too.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        writer = f"{socket.gethostname()}.{os.getpid()}.{nanoseconds}"
        self._event = Event
        self._file = (folder / f"events.out.tfevents.{seconds:010}.{writer}").open("xb")
        self._records = RecordWriter(self._file)
        self._add(step=step + 1, file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Add the values that the `scalars` have after a step."""
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        self._add(step=step, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise OSError(errno.ENOENT, "its file was removed")
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()
