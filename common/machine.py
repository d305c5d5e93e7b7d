"""What a measurement depends on: this machine, the code and the libraries."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common import ROOT
from common.stack import running_versions


def describe_machine() -> dict[str, Any]:
    """This machine, the code and the libraries, to be recorded with every measurement."""
    commit, changed = git("rev-parse", "HEAD"), changed_files()
    lock = Path(sys.prefix) / "lock.txt"  # the Makefile puts the lock of the environment there
    cuda = torch.cuda.is_available()
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = _output(*smi) if cuda else b""
    built_from = os.environ.get("RECIPES_COMMIT", "")  # in an image: sha, or sha-dirty
    sha = commit.decode().strip() or built_from.removesuffix("-dirty") or None
    dirty = bool(changed) if commit else built_from.endswith("-dirty")
    return {
        "git_commit": sha,
        "git_dirty": dirty if sha else None,
        "changed_files": changed,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else None,
        "image_digest": os.environ.get("RECIPES_IMAGE_DIGEST"),
        "stack": os.environ.get("RECIPES_STACK"),
        "python": platform.python_version(),
        **running_versions(),
        "torch": torch.__version__,
        "driver": drivers.decode().partition("\n")[0] if drivers else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
    }


def changed_files() -> dict[str, str]:
    """SHA-256 of each file that is not as in the commit: changed, deleted, or new (`new_files`)."""
    changed = git("diff", "--name-only", "--relative", "-z", "HEAD").decode(errors="replace")
    return {name: _digest(ROOT / name) for name in [*changed.split("\0")[:-1], *new_files()][:1000]}


def new_files() -> list[str]:
    """Files that are not in the commit, and that git does not ignore."""
    names = git("ls-files", "--others", "--exclude-standard", "-z").decode(errors="replace")
    return names.split("\0")[:-1]


def _digest(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > 2**24:  # no code
            return f"{size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return str(error.strerror)


def git(*command: str) -> bytes:
    """What git says about this repository; nothing if it is none."""
    return _output("git", "-C", str(ROOT), *command)


def _output(*command: str) -> bytes:
    """What a program prints, as bytes: a diff may be no text. Nothing if it fails."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
