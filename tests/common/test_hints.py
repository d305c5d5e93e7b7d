"""The table of known failures: real messages, and the advice that belongs to them."""

import ctypes
import mmap
from dataclasses import fields
from importlib import import_module
from typing import Any, get_type_hints

import pytest
import torch
from torch.distributed import DistBackendError

from common import hints
from common.launch.ranks import Ranks
from common.launch.report import _error_line
from common.launch.start import LaunchOptions
from common.stack import mapped_libraries
from tests.helpers.commands import ROOT

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
    ("FileNotFoundError: [Errno 2] No such file or directory", "a loading process died"),
    ("IndexError: Target 3 is out of bounds.", "labels are 0 to classes - 1"),
    (
        "DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
        "already in use",
        "another MASTER_PORT",
    ),
    ("AcceleratorError: CUDA error: invalid device ordinal", "fewer GPUs than processes"),
    ("ValueError: too many values to unpack (expected 2)", "name each of them"),
    (
        "UserWarning: Using a target size (torch.Size([16])) that is different to the input size",
        "outputs.squeeze(1)",
    ),
    (
        "RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated",
        "reduction='none'",
    ),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)",
        "docker/README.md#stacks",
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
    ("RuntimeError: Unable to find address for: eth7", "GLOO_SOCKET_IFNAME"),
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
    ("AcceleratorError: CUDA error: device-side assert triggered", "--device cpu names the cause"),
    ("OSError: [Errno 24] Too many open files: 'a.jpg'", "ulimit -n 65536"),
    ("RuntimeError: received 0 items of ancdata", "ulimit -n 65536"),
    (
        "RuntimeError: unable to open shared memory object </torch_7_8_9> in read-write mode: "
        "Too many open files (24)",
        "ulimit -n 65536",
    ),
    ("RuntimeError: can't start new thread", "larger --pids-limit"),
    ("RuntimeError: unable to start watchdog thread", "larger --pids-limit"),
    ("RuntimeError Resource temporarily unavailable", "larger --pids-limit"),
    ("rank 1 on n1 ended too early (status 0)", "os._exit()"),
    ("rank 1 on n1 was killed by SIGABRT", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ("rank 1 on n1 was killed by SIGBUS", "--shm-size=8g"),
    ("rank 1 on n1 was killed by SIGSEGV", "PYTHONFAULTHANDLER=1"),  # NVIDIA/nccl#2106
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
        "before calling NumCudaDevices() that might have already set an error? Error 802: system "
        "not yet initialized",  # pytorch#35710
        "systemctl start nvidia-fabricmanager",
    ),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
        "before calling NumCudaDevices() that might have already set an error? Error 803: system "
        "has unsupported display driver / cuda driver combination",  # nvidia-docker#1256
        "reboot the host",
    ),
    ("Error 804: forward compatibility was attempted on non supported HW", "leave cuda-compat out"),
    (
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, "
        "e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the "
        "available devices to be zero.",
        "nvidia_uvm",
    ),
    ("CUDA error 999: unknown error", "nvidia_uvm"),
    ("AcceleratorError: CUDA error: unknown error", "nvidia_uvm"),
    ("CUDA error 34: CUDA driver is a stub library", "not CUDA's folder stubs"),
    ("AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable", "MIG mode"),
    (
        "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "exclusive mode",
    ),
    ("CUDA error: no kernel image is available for execution on the device", "STACK=cu128"),
    ("CUDA error 100: no CUDA-capable device is detected", "check CUDA_VISIBLE_DEVICES"),
    ("RuntimeError: No CUDA GPUs are available", "check CUDA_VISIBLE_DEVICES"),
    ("RuntimeError: Found no NVIDIA driver on your system. Please check that", "--gpus all"),
    ("invalid choice 'cuda:1' for argument '--device'", "CUDA_VISIBLE_DEVICES"),
    ("Unrecognized options: --local_rank, 0", "every launcher sets it"),
    ("Unrecognized options: --num_classes, 5", "as many classes as sub-folders"),
    ("Unrecognized options: False", "a flag takes no value"),
    ("invalid choice 'mpi' for argument '--backend'", "without MPI"),
]


# NCCL's message in the library, what fills it, and its advice. NCCL 2.27.5, 2.28.9 and 2.30.7 have
# all of them, unless a version is given.
NCCL: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "Error while %s shared memory segment %s (size %ld), error: %s (%d)",
        ("creating", "/dev/shm/nccl-WU88OE", 9637888, "No space left on device", 28),
        "--shm-size=8g",
    ),
    (
        "Error: failed to extend %s to %ld bytes, error: %s (%d)",
        ("/dev/shm/nccl-WU88OE", 9637892, "No space left on device", 28),
        "--shm-size=8g",
    ),
    (
        "Error: failed to create shared memory file %s, error %s (%d)",
        ("/dev/shm/nccl-XXXXXX", "Permission denied", 13),
        "able to write",
    ),
    (
        "Error while %s shared memory segment %s (size %ld), error: %s (%d)",
        ("attaching to", "/dev/shm/nccl-", 0, "No such file or directory", 2),
        "NCCL_CUMEM_HOST_ENABLE=0, or in a container add --cap-add SYS_NICE",
    ),
    ("Call to ibv_reg_mr failed with error %s", ("Cannot allocate memory",), "memlock=-1"),
    ("Call to ibv_reg_mr_iova2 failed with error %s", ("Cannot allocate memory",), "memlock=-1"),
    ("Call to ibv_create_cq failed with error %s", ("Cannot allocate memory",), "memlock=-1"),
    ("Call to ibv_open_device failed", (), "--device /dev/infiniband"),
    ("NET/IB : Unable to open device %s", ("mlx5_0",), "--device /dev/infiniband"),
    (
        "Call to ibv_modify_qp failed with %d %s, %s",
        (110, "Connection timed out", "on dev mlx5_0:1"),
        "NCCL_IB_GID_INDEX",
    ),
    (
        "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx",  # up to 2.28.9
        (1, 0, 0x1B000),
        "one process per GPU",
    ),
    (
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to "
        "enable this configuration.",  # from 2.30.7 on
        (),
        "one process per GPU",
    ),
    (
        "Mismatched NCCL version detected : rank %d version %d rank %d version %d",
        (0, 23007, 1, 22809),
        "the same image",
    ),
    (
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size %ld : CUDA error %d '%s'.",
        (2097152, 801, "operation not supported"),
        "NCCL_NVLS_ENABLE=0",
    ),
    (
        "MNNVL (cliqueSize %d) is available but not working on this system. Check the IMEX",
        (4,),
        "NCCL_MNNVL_ENABLE=0",
    ),
    (
        "Could not enable P2P between dev %d(=%lx) and dev %d(=%lx)",
        (0, 0x1B000, 1, 0x3E000),
        "NCCL_P2P_DISABLE=1",
    ),
    ("Cuda failure %d '%s'", (217, "peer access is not supported between"), "NCCL_P2P_DISABLE=1"),
    ("Bootstrap : no socket interface found", (), "NCCL_SOCKET_IFNAME"),
    (
        "connect to %s returned %s, exceeded error retry count",
        ("10.0.0.2<4567>", "No route to host"),
        "a firewall",
    ),
    ("Connection closed by remote peer %s", ("n2<4567>",), "look for its error"),
    ("NET/IB: Got completion from peer %s with status=", ("10.0.0.2<4567>",), "look for its error"),
    (
        "NET/Socket : peer %s message truncated : receiving %d bytes instead of %d",
        ("10.0.0.2<4567>", 8, 4),
        "different collectives",
    ),
    ("Cuda failure %d '%s'", (2, "out of memory"), "half the --global-batch-size"),
    ("Failed to CUDA malloc %ld bytes", (4194304,), "half the --global-batch-size"),
    ("Cuda failure %d '%s'", (802, "system not yet initialized"), "nvidia-fabricmanager"),
    ("Cuda failure %d '%s'", (999, "unknown error"), "nvidia_uvm"),  # pytorch#170045
    ("Failed to load CUDA driver!", (), "--gpus all"),
]


def from_nccl(said: str) -> Exception:
    """An error of NCCL as torch raises it."""
    return DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or device error. \n"
        f"Last error:\n{said}"
    )


@pytest.mark.parametrize(("text", "filled", "advice"), NCCL)
def test_what_nccl_says_is_shown_whole_with_its_advice(
    text: str, filled: tuple[Any, ...], advice: str
) -> None:
    said = text % filled
    line = _error_line(from_nccl(said), Ranks())
    assert f": NCCL: {said}: " in line
    assert advice in line.partition(said)[2]


def test_these_are_the_texts_of_the_pinned_nccl() -> None:
    loaded, number = mapped_libraries("libnccl.so"), ctypes.c_int()
    if not loaded:
        pytest.skip(f"torch {torch.__version__} loads no NCCL")
    ctypes.CDLL(str(loaded[0])).ncclGetVersion(ctypes.byref(number))
    if number.value not in (22705, 22809, 23007):
        pytest.skip(f"NCCL {number.value} is not pinned")
    other = "Duplicate GPU" if number.value == 23007 else "Multiple Ranks"
    with loaded[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        missing = [text for text, _, _ in NCCL if code.find(text.encode()) < 0]
    assert [text[: len(other)] for text in missing] == [other]


def test_an_error_of_nccl_without_a_last_error_is_not_cut_in_a_word() -> None:
    line = _error_line(from_nccl(""), Ranks())
    assert "ncclSystemError: System call (e.g. socket, malloc) or external library call" in line
    assert "NCCL_SOCKET_IFNAME" in line


def test_an_error_of_cuda_is_shown_without_torchs_advice_for_developers() -> None:
    said = (
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for "
        "`cudaErrorDevicesUnavailable' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more "
        "information.\nCUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1"
    )
    line = _error_line(torch.AcceleratorError(said), Ranks())
    assert ": CUDA error: CUDA-capable device(s) is/are busy or unavailable: another proc" in line


@pytest.mark.parametrize(("message", "advice"), MESSAGES)
def test_known_failures_have_their_advice(message: str, advice: str) -> None:
    assert advice in hints.hint(message)


def test_every_line_of_the_table_is_met() -> None:
    texts = [message for message, _ in MESSAGES]
    met = {hints.hint(message) for message in texts + [text % filled for text, filled, _ in NCCL]}
    assert len(met) == len(hints._TABLE)


OTHER_NAMES = {
    "--batch-size": "--global-batch-size or --batch-size-per-rank",
    "--use_syncbn": "--sync-bn",
    "--gpus": "--nproc",
    "--nproc-per-node": "--nproc",
    "--world_size": "--nproc",
    "--dist_url": "--master-addr",
    "--learning_rate": "--lr",
    "--workers": "--num-workers",
    "--output": "--output-dir",
    "--logdir": "--output-dir",
    "--data-dir": "--data-path",
    "--steps": "--max-steps",
    "--print-freq": "--log-every",
    "--save-freq": "--snapshot-every",
    "--gradient-accumulation-steps": "--accumulate",
    "--arch": "--model",
    "--fp16": "--precision",
    "--pretrained": "--weights or --resume",
    "--wd": "--weight-decay",
    "--max-grad-norm": "--clip-grad-norm",
}


def options_of(name: str) -> set[str]:
    config = import_module(f"recipes.{name}.train").Config
    groups = [LaunchOptions, *get_type_hints(config).values()]
    return {f"--{field.name.replace('_', '-')}" for kind in groups for field in fields(kind)}


@pytest.mark.parametrize(("typed", "here"), OTHER_NAMES.items())
def test_an_option_of_tutorials_is_known_by_its_meaning(typed: str, here: str) -> None:
    known = options_of("ddp_launch")
    assert hints.meant(typed, known) == here
    assert typed not in known


def test_no_option_is_advised_that_the_recipe_has_not() -> None:
    assert hints.meant("--gpus", options_of("dp_scratch")) == "--devices"
    assert hints.meant("--workers", {"--lr"}) == ""
    for path in ROOT.glob("recipes/*/train.py"):
        known = options_of(path.parent.name)
        for typed in OTHER_NAMES:
            advised = hints.meant(typed, known)
            assert {*filter(None, advised.split(" or "))} <= known


def test_a_file_that_is_not_there_is_no_loading_process() -> None:
    assert not hints.hint("FileNotFoundError: [Errno 2] No such file or directory: 'a.jpg'")
    line = _error_line(FileNotFoundError(2, "No such file or directory"), Ranks())
    assert "--num-workers 0 shows its own error" in line, "torch's DataLoader raises it like this"


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
