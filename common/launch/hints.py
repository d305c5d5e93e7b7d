"""Known failures and what to do about each: the only table of advice."""

import re

SHARED_MEMORY_HINT = "in a container give --shm-size=8g or --ipc=host"

_TIMED_OUT = r"Timed out waiting \d+ms|Watchdog caught collective operation timeout"

# What a rank says when another rank is gone or silent: the cause is in the other rank's message.
_FOLLOWS = (
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Application timeout caused "
    rf"pair closure|{_TIMED_OUT}|NCCL communicator was aborted|"
    r"remote process exited or there was a network error"
)

_TABLE = {
    r"killed by SIGKILL": "perhaps out of memory (see dmesg): try half the --global-batch-size",
    r"killed by SIGABRT": (
        "its own message is above. Did all ranks call the same collectives, and use every "
        "parameter? TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
    ),
    r"DataLoader worker .*(exited unexpectedly|Bus error|is killed by signal)|unable to (mmap|open)"
    r" shared memory|^(ConnectionResetError|ConnectionRefusedError|EOFError)": (
        f"a loading process died: out of memory, or /dev/shm is too small ({SHARED_MEMORY_HINT}); "
        "--num-workers 0 shows its own error"
    ),
    _TIMED_OUT: (
        "a rank did not answer within --timeout-s: it hangs, is much slower than the others, or "
        "calls other collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL names them), or the network is cut"
    ),
    _FOLLOWS: "a rank that this rank talked to is gone: look for its error, on its host",
    r"op\.preamble\.length|Mismatch between collective": (
        "the ranks call different collectives, or tensors of different sizes: "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
    ),
    r"CUDA out of memory|can't allocate memory|Cannot allocate memory|MemoryError": (
        "out of memory: try half the --global-batch-size, --precision bf16, or fewer --num-workers"
    ),
    r"Address already in use|EADDRINUSE": "give another MASTER_PORT; on one host leave it out",
    r"invalid device ordinal|no CUDA-capable device": (
        "fewer GPUs than processes: set --nproc to the number of GPUs that nvidia-smi lists"
    ),
    r"driver version is insufficient|driver on your system is too old": (
        "choose a stack that fits the driver (make doctor says which), or update the driver"
    ),
    r"Name or service not known|Temporary failure in name resolution|gethostname": (
        "a host name does not resolve: use IP addresses, or add the name to /etc/hosts"
    ),
    r"Permission denied|Read-only file system": (
        "choose an --output-dir that you may write, and a --data-path that you may read"
    ),
    r"No route to host|Network is unreachable|unable to find (network )?interface|ncclRemoteError|"
    r"ncclSystemError": (
        "choose the interface that leads to the other hosts: GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME (make doctor lists the interfaces)"
    ),
    r"Expected to have finished reduction in the prior iteration": (
        "a parameter took no part in the loss on this rank: every rank must use every parameter "
        "in every step, or freeze it"
    ),
    r"does not have a deterministic implementation": (
        "choose another operation, or add --no-deterministic and give up the same bits"
    ),
    r"invalid choice 'cuda:": "give --device cuda, and the GPU's number in CUDA_VISIBLE_DEVICES",
    # How tutorials spell options.
    r"options: --(batch[-_]?size|bs)\b": "say --global-batch-size or --batch-size-per-rank",
    r"options: --(use[-_])?sync[-_]?bn": "say --sync-bn",
    r"options: --(nproc[-_]per[-_]node|world[-_]?size|(num[-_])?gpus)\b": (
        "say --nproc N for N processes on this host"
    ),
    r"options: --(dist[-_]?url|init[-_]method)\b": (
        "say --nnodes, --node-rank, --master-addr and --master-port; one host needs none of them"
    ),
    r"'mpi'": "PyTorch's wheels are built without MPI; mpirun as a launcher works with gloo",
}
"""Pattern of a message to the advice. The first match counts."""


def hint(message: str) -> str:
    """What to do about a failure; empty if the table does not know it."""
    found = (advice for pattern, advice in _TABLE.items() if re.search(pattern, message, re.I))
    return next(found, "")


def with_hint(message: str) -> str:
    """The message, with its advice after a colon."""
    return ": ".join(filter(None, [message, hint(message)]))


def follows(error: Exception) -> bool:
    """Whether torch raised `error` because another rank failed."""
    return isinstance(error, RuntimeError) and bool(re.search(_FOLLOWS, str(error)))


def timed_out(error: Exception) -> bool:
    """Whether another rank did not answer, rather than being gone."""
    return bool(re.search(_TIMED_OUT, str(error)))
