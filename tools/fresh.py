"""Run Python programs as if no launcher had started this process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import STATUS_BAD_INPUT, InputError, TrainingError
from common.launch.process import end_with_parent, python_path

OF_A_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "RECIPES_",
)
"""How the variables of a launcher begin."""


def run_fresh(
    module: str, arguments: Sequence[str | Path], env: Mapping[str, str] | None = None
) -> str:
    """Run `python -m MODULE ARGUMENTS`, with `env` added to the environment; return its stdout.

    Raises:
        InputError: it ended with status 2; holds its error line.
        TrainingError: it failed otherwise.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env=fresh_environment(env),
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
    )
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    message = lines[-1].removeprefix("error: ") if lines else done.stderr[-500:]
    kind = InputError if done.returncode == STATUS_BAD_INPUT else TrainingError
    raise kind(f"{' '.join(map(str, arguments))}: {message}")


def fresh_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, and with the project's path."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
    given = {**own, **(more or {})}
    return {**given, "PYTHONPATH": python_path(given.get("PYTHONPATH"))}
