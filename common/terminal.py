"""What the person sees: rank 0's lines and progress bar."""

import logging
import os
import shutil
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from common import log
from common.launch.ranks import Ranks
from common.masking import printable

tqdm.set_lock(threading.RLock())  # tqdm's default lock is a semaphore, which a killed rank leaks


def set_up_logs(ranks: Ranks) -> None:
    """Rank 0 talks to the person; the other ranks write to files only (see `Run`)."""
    log.handlers.clear()
    log.setLevel(logging.WARNING if "RECIPES_CHECK" in os.environ else logging.INFO)
    log.propagate = False
    with suppress(AttributeError):  # in a test, stdout is no file
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if ranks.is_main:
        log.addHandler(_Terminal())


def progress_bar(
    total: int | None,
    initial: int = 0,
    *,
    main: bool = True,
    unit: str = "step",
    desc: str | None = None,
    keep: bool = True,
) -> "tqdm[Any]":
    """A bar on rank 0's stderr (`main`); if stderr is not a terminal, a line twice a minute.

    Without `keep` it disappears at its end, and is not shown if that comes before the first line.
    """
    on_terminal = sys.stderr.isatty()
    every_s = 0.1 if on_terminal else 30.0
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=desc,
        leave=keep,
        delay=0 if keep or on_terminal else every_s,
        mininterval=every_s,
        ncols=shutil.get_terminal_size().columns if on_terminal else None,
        file=_Bars(sys.stderr),
        disable=not main,
    )


def show_table(rows: dict[str, Any]) -> None:
    """Show names and values, one pair per line."""
    shown = {printable(name): printable(_shown(name, value)) for name, value in rows.items()}
    width = max(map(len, shown))
    lines = (f"  {name:<{width}}  {value}" for name, value in shown.items())
    log.info("\n".join(["", *lines, ""]))


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return mebibytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(k, v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(name, one) for one in value)
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError):  # training continues without a terminal
            beside = tqdm.external_write_mode if sys.stderr.isatty() else nullcontext
            with beside(_Bars(sys.stderr)):  # keeps the progress bars intact
                print(printable(f"{mark}{record.getMessage()}", keep="\n\t"), flush=True)


@dataclass(frozen=True)
class _Bars:
    """A stream for bars: in place on a terminal, else each on a line. Its reader may end."""

    stream: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        """Write, if anybody reads."""
        with suppress(OSError, ValueError):
            if not self.stream.isatty():
                text = f"{text.strip()}\n".lstrip()
            self.stream.write(text)

    def flush(self) -> None:
        """Flush, if anybody reads."""
        with suppress(OSError, ValueError):
            self.stream.flush()


def mebibytes(number: float) -> str:
    """A number of bytes for a table."""
    return f"{number / 2**20:,.0f} MiB"
