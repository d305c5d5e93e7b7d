"""The manifest: what it takes to say that two runs were the same run."""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common import ROOT
from common.group.collectives import gather
from common.launch.process import command_line
from common.launch.stack import running_versions

# Never the whole environment: it may hold credentials.
_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "SLURM_JOB_NUM_NODES",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
_START = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")

# The value of an option with such a name; the user part of a URL; tokens with a known prefix.
_SECRET = re.compile(
    r"""(?ix) ( --[\w-]*(?:token|secret|passw|credential|key)[\w-]* [=\s]+ ) (?: '[^']*' | \S+ )
    | ( \w:// ) [^/\s@']+ (?=@)
    | \b (?: gh[pousr]_ | github_pat_ | glpat- | hf_ | xox[abp]- | sk- | AKIA ) [\w-]{8,}"""
)


def describe_run(devices: list[torch.device], seed: int, data_fingerprint: str) -> dict[str, Any]:
    """Everything outside the options that a result may depend on. Calls a collective.

    Args:
        devices: of this rank.
        seed: of the run.
        data_fingerprint: from `common.data.datasets.load_data`.
    """
    gpus = [torch.cuda.get_device_name(gpu) for gpu in devices if gpu.type == "cuda"]
    hosts = gather((socket.gethostname(), gpus))
    return {
        "command": without_secrets(command_line()),
        **describe_machine(),
        "gpus": [name for _, names in hosts for name in names],
        "world_size": len(hosts),
        "hosts": sorted({host for host, _ in hosts}),
        "seed": seed,
        "determinism": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cpu_threads": torch.get_num_threads(),
        },
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "start": {name: os.environ[name] for name in _START if name in os.environ},
        "data_fingerprint": data_fingerprint,
    }


def describe_machine() -> dict[str, Any]:
    """This machine, the code and the libraries, to be recorded with every measurement."""
    git = ("git", "-C", str(ROOT))
    commit, diff = _output(*git, "rev-parse", "HEAD"), _output(*git, "diff", "HEAD")
    lock = Path(sys.prefix) / "lock.txt"  # the Makefile puts the lock of the environment there
    cuda = torch.cuda.is_available()
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = _output(*smi) if cuda else None
    built_from = os.environ.get("RECIPES_COMMIT", "")  # in an image: sha, or sha-dirty
    sha = commit.decode().strip() if commit else built_from.removesuffix("-dirty") or None
    dirty = bool(diff) if commit else built_from.endswith("-dirty")
    return {
        "git_commit": sha,
        "git_dirty": dirty if sha else None,
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


def without_secrets(command: str) -> str:
    """The command with `***` in place of tokens and passwords."""
    return _SECRET.sub(r"\1\2***", command)


def _output(*command: str) -> bytes | None:
    """What a program prints, as bytes: a diff may be no text. None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
