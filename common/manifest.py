"""The manifest: what it takes to say that two runs were the same run."""

import hashlib
import os
import platform
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import log
from common.fingerprint import fingerprint, unlike
from common.git import changed_files, git, image_commit, output
from common.group.collectives import gather
from common.identity import differences
from common.kernels import PORTABLE
from common.launch.capacity import memory_limit
from common.launch.process import command_line
from common.masking import masked_command, masked_diff
from common.stack import running_versions

# Never the whole environment: it may hold credentials.
_ENVIRONMENT = (
    *PORTABLE,
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_DIST_USE_NCCL2",
)
_START = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",  # an elastic job's may change
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
)


def describe_run(devices: list[torch.device], seed: int, data_fingerprint: str) -> dict[str, Any]:
    """Everything outside the options that a result may depend on; empty except on rank 0.

    Calls a collective.

    Args:
        devices: of this rank.
        seed: of the run.
        data_fingerprint: from `common.data.datasets.load_data`.
    """
    gpus = [torch.cuda.get_device_name(gpu) for gpu in devices if gpu.type == "cuda"]
    # On a GPU without --deterministic, cuDNN chooses kernels by timing: nothing could be compared.
    fixed = devices[0].type == "cpu" or torch.are_deterministic_algorithms_enabled()
    ranks = gather((socket.gethostname(), gpus, fingerprint(devices[0]) if fixed else {}))
    if dist.get_rank() > 0:
        return {}
    hosts, _, fingerprints = zip(*ranks, strict=True)
    for rank, theirs in enumerate(fingerprints):
        if names := unlike(fingerprints[0], theirs):
            log.warning(
                f"rank {rank} on {hosts[rank]} computes other bits than rank 0 on {hosts[0]} "
                f"({', '.join(names)}): the result repeats only if each rank is again on the "
                "same kind of machine"
            )
            break
    return {
        "command": masked_command(command_line()),
        **describe_machine(),
        "gpus": [name for _, names, _ in ranks for name in names],
        "world_size": len(ranks),
        "hosts": sorted(set(hosts)),
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
        "fingerprint": fingerprints[0],
        "environment": environment(),
        "start": {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "folder": str(Path("/proc/self/cwd").readlink()),  # cwd() fails if it was removed
            **{name: os.environ[name] for name in _START if name in os.environ},
        },
        "data_fingerprint": data_fingerprint,
    }


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


def environment() -> dict[str, str]:
    """The variables that may decide a result, and all of NCCL's, without secrets."""
    kept = (n for n in os.environ if n in _ENVIRONMENT or n.startswith(("NCCL_", "TORCH_NCCL_")))
    pairs = (masked_diff(f"{name}={os.environ[name]}") for name in sorted(kept))
    return dict(pair.split("=", 1) for pair in pairs)


def continued(now: dict[str, Any], then: dict[str, Any], step: int) -> dict[str, Any]:
    """The manifest `now`; under `before`, what was different until `step`, newest last."""
    before = then.pop("before", [])
    changed = {
        name: then[name]
        for name in differences(then, now)
        if name in then and name not in ("command", "seed", "start")
    }
    if changed:
        before.append({"until_step": step, **changed})
    # A change of hosts is usual, and TrainingState.resume warns about the number of ranks.
    others = [name for name in changed if name not in ("hosts", "world_size", "fingerprint")]
    if names := unlike(changed.get("fingerprint") or {}, now.get("fingerprint") or {}):
        log.warning(
            f"operations give other bits than before step {step} "
            f"({', '.join(names)}): the weights will be those of no run on one machine"
        )
    if others:
        log.warning(
            f"resuming from step {step} with another {', '.join(others)}: manifest.json keeps the "
            "values before it"
        )
    return {**now, "before": before} if before else now
