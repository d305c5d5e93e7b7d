"""Failures that many people meet, and what to do about them: one table, read when a rank fails."""

import re

SHARED_MEMORY_HINT = "in a container give --shm-size=8g or --ipc=host"

_TIMED_OUT = r"Timed out waiting \d+ms|Watchdog caught collective operation timeout"

# What a rank says when another one is gone or silent: that one's own message is the cause.
_FOLLOWS = (
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Application timeout caused "
    rf"pair closure|{_TIMED_OUT}|NCCL communicator was aborted|"
    r"remote process exited or there was a network error"
)

_TABLE = {
    r"DataLoader worker .*(exited unexpectedly|Bus error|is killed by signal)|unable to (mmap|open)"
    r" shared memory|^(ConnectionResetError|ConnectionRefusedError|EOFError)": (
        f"a loading process died: out of memory, or /dev/shm is too small ({SHARED_MEMORY_HINT}); "
        "--num-workers 0 shows its own error"
    ),
    _TIMED_OUT: (
        "a rank did not answer within --timeout-s: it hangs, is much slower than the others, calls "
        "other collectives than they do (TORCH_DISTRIBUTED_DEBUG=DETAIL names them), or the "
        "network is cut"
    ),
    _FOLLOWS: "a rank that this one talked to is gone: look for what it said, on its host",
    r"op\.preamble\.length|Mismatch between collective": (
        "ranks call different collectives, or with other sizes: TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names them"
    ),
    r"CUDA out of memory|can't allocate memory|Cannot allocate memory|MemoryError": (
        "out of memory: try {batch}, --precision bf16, or fewer --num-workers"
    ),
    r"Address already in use|EADDRINUSE": "give another MASTER_PORT, or none on one host",
    r"invalid device ordinal|no CUDA-capable device": (
        "fewer GPUs than processes: start as many as nvidia-smi lists, by --nproc"
    ),
    r"driver version is insufficient|driver on your system is too old": (
        "take a stack that fits the driver (make doctor says which), or update it"
    ),
    r"Name or service not known|Temporary failure in name resolution|gethostname": (
        "a host's name does not resolve: give addresses, or complete /etc/hosts"
    ),
    r"Permission denied|Read-only file system": (
        "give another --output-dir or --data-path, with the rights for it"
    ),
    r"No route to host|Network is unreachable|unable to find (network )?interface|ncclRemoteError|"
    r"ncclSystemError": (
        "choose the interface that leads to the other hosts: GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME (make doctor lists them)"
    ),
    r"Expected to have finished reduction in the prior iteration": (
        "a parameter took no part in the loss on this rank: every rank must use all of them in "
        "every step, or freeze them"
    ),
    r"does not have a deterministic implementation": (
        "choose another operation, or give up the same bits by --no-deterministic"
    ),
}

global_batch_size = 0
"""Of the run that this process is part of, once it is known."""


def follows(error: Exception) -> bool:
    """Whether a failure is what another rank's failure looks like from here: torch's own error."""
    return isinstance(error, RuntimeError) and bool(re.search(_FOLLOWS, str(error)))


def timed_out(error: Exception) -> bool:
    """Whether another rank did not answer, rather than being gone."""
    return bool(re.search(_TIMED_OUT, str(error)))


def hint(message: str) -> str:
    """What to do about a failure; empty where the table does not know it."""
    for pattern, advice in _TABLE.items():
        if re.search(pattern, message, re.IGNORECASE):
            half = global_batch_size // 2
            return advice.format(
                batch=f"--global-batch-size {half}" if half else "a smaller --global-batch-size"
            )
    return ""
