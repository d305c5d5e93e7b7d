"""What a measurement depends on: this machine, the code and the libraries."""

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from common.git import changed_files, git, image_commit, output
from common.launch.capacity import memory_limit
from common.stack import running_versions


def describe_machine() -> dict[str, Any]:
    """This machine, the code and the libraries, to be recorded with every measurement."""
    commit, changed = git("rev-parse", "HEAD"), changed_files()
    lock = Path(sys.prefix) / "lock.txt"  # the Makefile puts the lock of the environment there
    cuda = torch.cuda.is_available()
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    sha, dirty, changed = (commit.strip(), bool(changed), changed) if commit else image_commit()
    return {
        "git_commit": sha,
        "git_dirty": dirty,
        "changed_files": changed,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else None,
        "image_digest": os.environ.get("RECIPES_IMAGE_DIGEST"),
        "stack": os.environ.get("RECIPES_STACK"),
        "python": platform.python_version(),
        **running_versions(),
        "torch": torch.__version__,
        "driver": (output(*smi).partition("\n")[0] or None) if cuda else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_limit_bytes": memory_limit(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
