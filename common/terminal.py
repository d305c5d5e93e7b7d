"""What the person sees: rank 0's lines and progress bar."""

import logging
import sys
import threading
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from common.files import mebibytes
from common.launch.ranks import Ranks

log = logging.getLogger("recipes")
tqdm.set_lock(threading.RLock())  # tqdm's default lock is a semaphore, which a killed rank leaks


def set_up_logs(ranks: Ranks) -> None:
    """Rank 0 talks to the person; the other ranks write to files only (see `Run`)."""
    log.handlers.clear()
    log.setLevel(logging.INFO)
    log.propagate = False
    with suppress(AttributeError):  # in a test, stdout is no file
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if ranks.is_main:
        log.addHandler(_Terminal())


def progress_bar(
    total: int, initial: int, ranks: Ranks, unit: str = "step", desc: str | None = None
) -> "tqdm[Any]":
    """A bar on rank 0's stderr; updated twice a minute if stderr is not a terminal."""
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=desc,
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
        file=_Quiet(sys.stderr),
        disable=not ranks.is_main,
    )


def show_table(rows: dict[str, Any]) -> None:
    """Show names and values, one pair per line."""
    width = max(map(len, rows))
    lines = (f"  {name:<{width}}  {_shown(name, value)}" for name, value in rows.items())
    log.info("\n".join(["", *lines, ""]))


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return mebibytes(value)
    if name == "peak_memory_bytes":
        return ", ".join(map(mebibytes, value))
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        line = f"{mark}{record.getMessage()}"
        with suppress(OSError, ValueError):  # training continues without a terminal
            if sys.stderr.isatty():
                tqdm.write(line, file=sys.stdout)  # keeps the progress bar intact
            else:
                print(line, flush=True)


class _Quiet:
    """A stream whose reader may end: what it can no longer take is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write, if anybody reads."""
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush, if anybody reads."""
        with suppress(OSError, ValueError):
            self._stream.flush()
