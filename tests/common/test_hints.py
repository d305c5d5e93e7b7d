"""The table of known failures: real messages, and the advice that belongs to them."""

import ctypes
import mmap
import re
from dataclasses import fields
from importlib import import_module
from typing import get_type_hints

import pytest
import torch
from torch.distributed import DistBackendError

from common import hints
from common.launch.ranks import Ranks
from common.launch.report import _error_line
from common.launch.start import LaunchOptions
from common.stack import mapped_libraries
from tests.helpers.commands import ROOT


def table(text: str) -> list[tuple[str, str]]:
    """Advice and message of each entry `ADVICE <- MESSAGE`, which goes on in indented lines."""
    entries = re.sub(r"\n +", " ", text.strip()).split("\n")
    return [(advice, message) for advice, _, message in (e.partition(" <- ") for e in entries)]


# As torch 2.15, gloo, NCCL and the kernel say it.
MESSAGES = table("""
--timeout-s <- RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for
    recv operation to complete
look for its error <- RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:60649:
    Connection reset by peer
look for its error <- RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer
    [10.0.0.2]:34567
different collectives <- [enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <=
    op.nbytes. 56556 vs 4
half the --global-batch-size <- OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
half the --global-batch-size <- RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0.
    DefaultCPUAllocator: can't allocate memory
--shm-size=8g <- RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is
    possible that dataloader's workers are out of shared memory
--num-workers 0 <- RuntimeError: DataLoader worker (pid(s) 17079) exited unexpectedly
a loading process died <- FileNotFoundError: [Errno 2] No such file or directory
labels are 0 to classes - 1 <- IndexError: Target 3 is out of bounds.
another MASTER_PORT <- DistNetworkError: The server socket has failed to listen on any local network
    address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in
    use
fewer GPUs than processes <- AcceleratorError: CUDA error: invalid device ordinal
let __getitem__ give an int <- RuntimeError: expected target dtype to be Long or Byte, but got Bool
label.float() <- RuntimeError: Expected floating point type for target with class probabilities, got
    Bool
label.float() <- RuntimeError: Found dtype Bool but expected Float
label.float() <- RuntimeError: Subtraction, the `-` operator, with two bool tensors is not
    supported.
first gradient in a later step <- TypeError: expected Tensor as element 1 in argument 2, but got
    NoneType
leave sparse out <- RuntimeError: `_fused_sgd` does not support sparse gradients
model(images)['logits'] <- TypeError: cross_entropy_loss(): argument 'input' (position 1) must be
    Tensor, not dict
name each of them <- ValueError: too many values to unpack (expected 2)
outputs.squeeze(1) <- UserWarning: Using a target size (torch.Size([16])) that is different to the
    input size
reduction='none' <- RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated
docker/README.md#stacks <- RuntimeError: The NVIDIA driver on your system is too old (found version
    12040)
/etc/hosts <- gaierror: [Errno -2] Name or service not known
--output-dir <- PermissionError: [Errno 13] Permission denied: '/data/runs'
NCCL_SOCKET_IFNAME <- DistBackendError: NCCL error ... ncclSystemError: System call (e.g. socket,
    malloc) or external library call failed
GLOO_SOCKET_IFNAME <- RuntimeError: [gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find
    interface for: [10.1.2.3]
GLOO_SOCKET_IFNAME <- RuntimeError: Unable to find address for: eth7
took no part in the loss <- RuntimeError: Expected to have finished reduction in the prior iteration
    before starting
--no-deterministic <- RuntimeError: adaptive_avg_pool2d_backward_cuda does not have a deterministic
    implementation
half the --global-batch-size <- rank 1 on n1 was killed by SIGKILL
--device cpu names the cause <- AcceleratorError: CUDA error: device-side assert triggered
ulimit -n 65536 <- OSError: [Errno 24] Too many open files: 'a.jpg'
ulimit -n 65536 <- RuntimeError: received 0 items of ancdata
ulimit -n 65536 <- RuntimeError: unable to open shared memory object </torch_7_8_9> in read-write
    mode: Too many open files (24)
larger --pids-limit <- RuntimeError: can't start new thread
larger --pids-limit <- RuntimeError: unable to start watchdog thread
larger --pids-limit <- RuntimeError Resource temporarily unavailable
os._exit() <- rank 1 on n1 ended too early (status 0)
TORCH_DISTRIBUTED_DEBUG=DETAIL <- rank 1 on n1 was killed by SIGABRT
--shm-size=8g <- rank 1 on n1 was killed by SIGBUS
PYTHONFAULTHANDLER=1 <- rank 1 on n1 was killed by SIGSEGV
systemctl start nvidia-fabricmanager <- RuntimeError: Unexpected error from cudaGetDeviceCount().
    Did you run some cuda functions before calling NumCudaDevices() that might have already set an
    error? Error 802: system not yet initialized
reboot the host <- RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda
    functions before calling NumCudaDevices() that might have already set an error? Error 803:
    system has unsupported display driver / cuda driver combination
leave cuda-compat out <- Error 804: forward compatibility was attempted on non supported HW
nvidia_uvm <- RuntimeError: CUDA unknown error - this may be due to an incorrectly set up
    environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the
    available devices to be zero.
nvidia_uvm <- CUDA error 999: unknown error
nvidia_uvm <- AcceleratorError: CUDA error: unknown error
not CUDA's folder stubs <- CUDA error 34: CUDA driver is a stub library
MIG mode <- AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable
exclusive mode <- AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable
STACK=cu128 <- CUDA error: no kernel image is available for execution on the device
check CUDA_VISIBLE_DEVICES <- CUDA error 100: no CUDA-capable device is detected
check CUDA_VISIBLE_DEVICES <- RuntimeError: No CUDA GPUs are available
--gpus all <- RuntimeError: Found no NVIDIA driver on your system. Please check that
CUDA_VISIBLE_DEVICES <- invalid choice 'cuda:1' for argument '--device'
every launcher sets it <- Unrecognized options: --local_rank, 0
as many classes as sub-folders <- Unrecognized options: --num_classes, 5
a flag takes no value <- Unrecognized options: False
without MPI <- invalid choice 'mpi' for argument '--backend'
""")


def filled(message: str) -> tuple[str, str]:
    """A message of NCCL in the library, and as it is said, of `TEXT | WHAT; FILLS; IT`."""
    text, _, words = message.partition(" | ")
    values = [int(word) if word.isdecimal() else word for word in words.split("; ") if word]
    return text, text % tuple(values)


# NCCL 2.27.5, 2.28.9 and 2.30.7 have all of them, but "Duplicate GPU" (up to 2.28.9) and "Multiple
# Ranks" (from 2.30.7 on).
NCCL = [
    (advice, *filled(message))
    for advice, message in table("""
--shm-size=8g <- Error while %s shared memory segment %s (size %ld), error: %s (%d) | creating;
    /dev/shm/nccl-WU88OE; 9637888; No space left on device; 28
--shm-size=8g <- Error: failed to extend %s to %ld bytes, error: %s (%d) | /dev/shm/nccl-WU88OE;
    9637892; No space left on device; 28
able to write <- Error: failed to create shared memory file %s, error %s (%d) |
    /dev/shm/nccl-XXXXXX; Permission denied; 13
NCCL_CUMEM_HOST_ENABLE=0, or in a container add --cap-add SYS_NICE <- Error while %s shared memory
    segment %s (size %ld), error: %s (%d) | attaching to; /dev/shm/nccl-; 0; No such file or
    directory; 2
memlock=-1 <- Call to ibv_reg_mr failed with error %s | Cannot allocate memory
memlock=-1 <- Call to ibv_reg_mr_iova2 failed with error %s | Cannot allocate memory
memlock=-1 <- Call to ibv_create_cq failed with error %s | Cannot allocate memory
--device /dev/infiniband <- Call to ibv_open_device failed
--device /dev/infiniband <- NET/IB : Unable to open device %s | mlx5_0
NCCL_IB_GID_INDEX <- Call to ibv_modify_qp failed with %d %s, %s | 110; Connection timed out; on dev
    mlx5_0:1
one process per GPU <- Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx | 1; 0;
    110592
one process per GPU <- Multiple Ranks are using the same GPU/Partition. Set
    NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.
the same image <- Mismatched NCCL version detected : rank %d version %d rank %d version %d | 0;
    23007; 1; 22809
NCCL_NVLS_ENABLE=0 <- Failed to bind NVLink SHARP (NVLS) Multicast memory of size %ld : CUDA error
    %d '%s'. | 2097152; 801; operation not supported
NCCL_MNNVL_ENABLE=0 <- MNNVL (cliqueSize %d) is available but not working on this system. Check the
    IMEX | 4
NCCL_P2P_DISABLE=1 <- Could not enable P2P between dev %d(=%lx) and dev %d(=%lx) | 0; 110592; 1;
    253952
NCCL_P2P_DISABLE=1 <- Cuda failure %d '%s' | 217; peer access is not supported between
NCCL_SOCKET_IFNAME <- Bootstrap : no socket interface found
a firewall <- connect to %s returned %s, exceeded error retry count | 10.0.0.2<4567>; No route to
    host
look for its error <- Connection closed by remote peer %s | n2<4567>
look for its error <- NET/IB: Got completion from peer %s with status= | 10.0.0.2<4567>
different collectives <- NET/Socket : peer %s message truncated : receiving %d bytes instead of %d |
    10.0.0.2<4567>; 8; 4
half the --global-batch-size <- Cuda failure %d '%s' | 2; out of memory
half the --global-batch-size <- Failed to CUDA malloc %ld bytes | 4194304
nvidia-fabricmanager <- Cuda failure %d '%s' | 802; system not yet initialized
nvidia_uvm <- Cuda failure %d '%s' | 999; unknown error
--gpus all <- Failed to load CUDA driver!
""")
]


def from_nccl(said: str) -> Exception:
    """An error of NCCL as torch raises it."""
    return DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or device error. \n"
        f"Last error:\n{said}"
    )


def test_what_nccl_says_is_shown_whole_with_its_advice() -> None:
    for advice, _, said in NCCL:
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
        missing = [text for _, text, _ in NCCL if code.find(text.encode()) < 0]
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


def test_known_failures_have_their_advice() -> None:
    for advice, message in MESSAGES:
        assert advice in hints.hint(message), message


def test_every_line_of_the_table_is_met() -> None:
    texts = [message for _, message in MESSAGES] + [said for _, _, said in NCCL]
    met = {hints.hint(text) for text in texts}
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


def test_an_option_of_tutorials_is_known_by_its_meaning() -> None:
    known = options_of("ddp_launch")
    for typed, here in OTHER_NAMES.items():
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
    following = [message for _, message in MESSAGES if hints.follows(RuntimeError(message))]
    assert len(following) == 3
    assert all("gloo/transport" in message for message in following)
    of_a_loader = ConnectionResetError(104, "Connection reset by peer")
    assert not hints.follows(of_a_loader)
    assert "a loading process died" in hints.hint(f"ConnectionResetError {of_a_loader}")
