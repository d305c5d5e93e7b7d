"""The table of known failures: real messages, and the advice that belongs to them."""

import pytest

from common.launch import hints

# As torch 2.15, gloo, NCCL and the kernel say it.
MESSAGES = [
    (
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for "
        "recv operation to complete",
        "--timeout-s",
    ),
    (
        "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:60649: "
        "Connection reset by peer",
        "look for its error",
    ),
    (
        "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:34567",
        "look for its error",
    ),
    (
        "[enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. "
        "56556 vs 4",
        "different collectives",
    ),
    (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "half the --global-batch-size",
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
        "can't allocate memory",
        "half the --global-batch-size",
    ),
    (
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory",
        "--shm-size=8g",
    ),
    ("RuntimeError: DataLoader worker (pid(s) 17079) exited unexpectedly", "--num-workers 0"),
    (
        "DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
        "already in use",
        "another MASTER_PORT",
    ),
    ("AcceleratorError: CUDA error: invalid device ordinal", "fewer GPUs than processes"),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)",
        "make doctor",
    ),
    ("gaierror: [Errno -2] Name or service not known", "/etc/hosts"),
    ("PermissionError: [Errno 13] Permission denied: '/data/runs'", "--output-dir"),
    (
        "DistBackendError: NCCL error ... ncclSystemError: System call (e.g. socket, malloc) "
        "or external library call failed",
        "NCCL_SOCKET_IFNAME",
    ),
    (
        "RuntimeError: [gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find "
        "interface for: [10.1.2.3]",
        "GLOO_SOCKET_IFNAME",
    ),
    (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting",
        "took no part in the loss",
    ),
    (
        "RuntimeError: adaptive_avg_pool2d_backward_cuda does not have a deterministic "
        "implementation",
        "--no-deterministic",
    ),
    ("rank 1 on n1 was killed by SIGKILL", "half the --global-batch-size"),
    ("rank 1 on n1 was killed by SIGABRT", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ("invalid choice 'cuda:1' for argument '--device'", "CUDA_VISIBLE_DEVICES"),
    ("Unrecognized options: --batch-size, 32", "--global-batch-size"),
    ("Unrecognized options: --use_syncbn", "--sync-bn"),
    ("Unrecognized options: --nproc-per-node=2", "--nproc"),
    ("Unrecognized options: --dist_url, tcp://10.0.0.1:29500", "--master-addr"),
    ("invalid choice 'mpi' for argument '--backend'", "without MPI"),
]


@pytest.mark.parametrize(("message", "advice"), MESSAGES)
def test_known_failures_have_their_advice(message: str, advice: str) -> None:
    assert advice in hints.hint(message)


def test_every_line_of_the_table_is_met() -> None:
    met = {hints.hint(message) for message, _ in MESSAGES}
    assert len(met) == len(hints._TABLE)


def test_what_is_not_known_gets_no_advice() -> None:
    assert hints.hint("KeyError: 'fc'") == ""
    assert hints.with_hint("KeyError: 'fc'") == "KeyError: 'fc'"


def test_what_follows_from_another_ranks_failure() -> None:
    following = [message for message, _ in MESSAGES if hints.follows(RuntimeError(message))]
    assert len(following) == 3
    assert all("gloo/transport" in message for message in following)
    of_a_loader = ConnectionResetError(104, "Connection reset by peer")
    assert not hints.follows(of_a_loader)
    assert "a loading process died" in hints.hint(f"ConnectionResetError {of_a_loader}")
