"""What the commands beside the recipes share: their options and how they end."""

import argparse
import signal
from collections.abc import Callable
from typing import NoReturn

from common.errors import STATUS_FINISHED, InputError
from common.launch.ranks import Ranks
from common.launch.report import report


def attempt(body: Callable[[], int | None]) -> int:
    """Run a command that has no state to save; return the exit status."""
    try:
        return body() or STATUS_FINISHED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # the outermost frame: every failure becomes a status
        return report(error, Ranks())


class Parser(argparse.ArgumentParser):
    """For commands with few options. `about` is their --help, printed as it is."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"python -m recipes {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of ending the process."""
        raise InputError(f"{message}. --help lists the options")
