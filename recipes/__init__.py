"""Recipes: one folder each, listed by `python -m recipes`."""

import signal

_interrupt = signal.getsignal(signal.SIGINT)
if _interrupt == signal.default_int_handler:  # Ctrl-C during an import would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from common import cli  # noqa: E402, F401 - sets what torch reads when it is imported

signal.signal(signal.SIGINT, _interrupt)
