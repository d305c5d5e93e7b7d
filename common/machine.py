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
    git = ("git", "-C", str(ROOT))
    commit, diff = _output(*git, "rev-parse", "HEAD"), _output(*git, "diff", "HEAD")
    lock = Path(sys.prefix) / "lock.txt"  # the Makefile puts the lock of the environment there
    cuda = torch.cuda.is_available()
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = _output(*smi) if cuda else None
    sha, dirty = (commit.decode().strip(), bool(diff)) if commit else _image_commit()
    return {
        "git_commit": sha,
        "git_dirty": dirty,
        "git_diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
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


def code_sha256() -> str:
    """SHA-256 over names and contents of the Python files that an image holds."""
    digest = hashlib.sha256()
    for folder in ("common", "recipes", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{content} {path.relative_to(ROOT)}\n".encode())
    return digest.hexdigest()


def _image_commit() -> tuple[str | None, bool | None]:
    """The commit that an image was built from, and whether this code is not the commit's.

    The image has its commit in RECIPES_COMMIT (with "-dirty" if files had changed), and the hash of
    its code beside its lock. Code that was mounted or added since has another hash.
    """
    built_from = os.environ.get("RECIPES_COMMIT", "unknown")
    if built_from == "unknown":
        return None, None
    record = Path(sys.prefix) / "code.sha256"
    same = record.is_file() and record.read_text().strip() == code_sha256()
    return built_from.removesuffix("-dirty"), built_from.endswith("-dirty") or not same


def _output(*command: str) -> bytes | None:
    """What a program prints, as bytes: a diff may be no text. None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
