"""Known failures and what to do about each: the only table of advice."""

import difflib
import re
from collections.abc import Collection

SHARED_MEMORY_HINT = "in a container give --shm-size=8g or --ipc=host"

WATCHDOG = "Watchdog caught collective operation timeout"
"""What torch's watchdog of NCCL says before it aborts a rank that waited too long."""

WAITED = rf"{WATCHDOG}|(?:collective|NCCL) operation timed out"
"""The same, and as the backend nccl2 of torch 2.15 says it."""

LOST = r"remote process exited|async error(?!.*cuda error)|communicator was aborted"
"""What NCCL says on a rank when another one is gone."""

_TIMED_OUT = rf"Timed out waiting \d+ms|{WAITED}"

# What a rank says when another rank is gone or silent: the cause is in the other rank's message.
_FOLLOWS = (
    r"Connection (closed|reset) by (remote )?peer|Connection refused|Broken pipe|Application "
    rf"timeout caused pair closure|{_TIMED_OUT}|{LOST}|NET/IB.*: Got completion from peer"
)


def _read(text: str) -> dict[str, str]:
    """Each pattern, and its advice: the indented lines below it. A pattern goes on after a |."""
    entries = re.findall(r"(?m)^((?:\S.*\|\n)*\S.*)\n((?: .*\n)+)", text)
    return {pattern.replace("\n", ""): " ".join(advice.split()) for pattern, advice in entries}


# NCCL and the driver come first: patterns below match some of their messages, too.
_TABLE = _read(rf"""
attaching to shared memory segment|cuMem host allocations
    on a host whose NUMA nodes differ, NCCL may fail like this: set NCCL_CUMEM_HOST_ENABLE=0, or in
    a container add --cap-add SYS_NICE
shared memory (segment|file)|failed to extend /dev/shm|killed by SIGBUS
    make room in /dev/shm, which each user must be able to write: {SHARED_MEMORY_HINT}
ibv_(reg|create)\w+ failed with error Cannot allocate memory
    InfiniBand may lock too little memory: ulimit -l unlimited; docker: --ulimit memlock=-1; Slurm:
    PropagateResourceLimitsExcept=MEMLOCK
Call to ibv_(open|query|modify)|NET/IB : Unable to
    choose InfiniBand or RoCE ports that reach each other (NCCL_IB_HCA, and NCCL_IB_GID_INDEX
    unset), give a container --device /dev/infiniband, or set NCCL_IB_DISABLE=1
Duplicate GPU detected|Multiple Ranks are using the same GPU
    start one process per GPU, or give --backend gloo, with which ranks can share a GPU
Mismatched NCCL version
    give every host the same image or environment
NVLink SHARP|multicast-bind|MNNVL
    restart nvidia-fabricmanager (and nvidia-imex) on the host, or do without: NCCL_NVLS_ENABLE=0
    NCCL_MNNVL_ENABLE=0
P2P is disabled between|Could not enable P2P|peer access is not supported
    these GPUs cannot read each other's memory: set NCCL_P2P_DISABLE=1, which is slower
no socket interface found|no device found (matching|after)|exceeded error retry count
    choose the interface that leads to the other hosts: NCCL_SOCKET_IFNAME (make doctor lists the
    interfaces); a firewall must let all ports pass between the hosts
Found no NVIDIA driver|Failed to load CUDA driver|CUDA driver is a stub
    install the driver on the host, or add the folder of its libraries to LD_LIBRARY_PATH (not
    CUDA's folder stubs); give a container --gpus all, and
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
system not yet initialized
    start the fabric manager of the driver's version on the host: systemctl start
    nvidia-fabricmanager
unsupported display driver / cuda driver combination|forward compatibility was attempted
    the kernel runs another version of the driver than its library: reboot the host after an
    update, and leave cuda-compat out of LD_LIBRARY_PATH
CUDA (unknown error|error: unknown error|error 999)|(Error|Cuda failure) 999
    load the module nvidia-uvm again on the host (sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm),
    then start the container again: /dev/nvidia-uvm must be in it
busy or unavailable
    another process has the GPU in exclusive mode (nvidia-smi -c DEFAULT ends that), or it is in
    MIG mode without an instance (nvidia-smi -L lists the instances)
no kernel image is available
    this GPU is older than the stack supports: STACK=cu128 supports the oldest ones
no CUDA-capable device|No CUDA GPUs are available
    check CUDA_VISIBLE_DEVICES, and that nvidia-smi -L lists a GPU, or in MIG mode an instance,
    whose files under /dev this user may open
ended too early
    its work was not done: look for exit(), sys.exit() or os._exit() in the code that it runs
killed by SIGKILL
    perhaps out of memory (see dmesg): try half the --global-batch-size
killed by SIGSEGV
    a library crashed; PYTHONFAULTHANDLER=1 shows where. If in NCCL, NCCL_CUMEM_HOST_ENABLE=0 may
    help
killed by SIGABRT
    its own message is above. Did all ranks call the same collectives, and use every parameter?
    TORCH_DISTRIBUTED_DEBUG=DETAIL names them
Too many open files|received 0 items of ancdata
    raise the limit of open files (ulimit -n 65536), or give fewer --num-workers
DataLoader worker .*(exited unexpectedly|Bus error|is killed by signal)|unable to (mmap|
open) shared memory|^(ConnectionResetError|ConnectionRefusedError|EOFError)|
^FileNotFoundError:? \[Errno 2\] No such file or directory$
    a loading process died: out of memory, or /dev/shm is too small ({SHARED_MEMORY_HINT});
    --num-workers 0 shows its own error
{_TIMED_OUT}
    a rank did not answer within --timeout-s: it hangs, is much slower than the others, or calls
    other collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL names them), or the network is cut
{_FOLLOWS}
    a rank that this rank talked to is gone: look for its error, on its host; one without an error
    was killed, perhaps out of memory, or has called exit()
op\.preamble\.length|Mismatch between collective|message truncated
    the ranks call different collectives, or tensors of different sizes:
    TORCH_DISTRIBUTED_DEBUG=DETAIL names them
CUDA out of memory|Cuda failure.*out of memory|Failed to CUDA|can't allocate memory|
Cannot allocate memory|MemoryError
    out of memory: try half the --global-batch-size, a smaller --image-size, or fewer --num-workers
can't start new thread|unable to start watchdog thread|pthread_create failed|
^(\w+Error:? )?Resource temporarily unav
    this container or user may start no more processes and threads: give it a larger --pids-limit,
    or raise ulimit -u; two ranks need about 30
Address already in use|EADDRINUSE
    give another MASTER_PORT; on one host leave it out
invalid device ordinal
    fewer GPUs than processes: set --nproc (Slurm: --ntasks-per-node) to the number of GPUs that
    nvidia-smi lists
driver version is insufficient|driver on your system is too old
    choose a stack for an older driver (docker/README.md#stacks), or update the driver
device-side assert
    the same command with --device cpu names the cause: often a label that is no class of the model
Name or service not known|Temporary failure in name resolution|gethostname
    a host name does not resolve: use IP addresses, or add the name to /etc/hosts
Permission denied|Read-only file system
    choose an --output-dir that you may write, and a --data-path that you may read
No route to host|Network is unreachable|ncclSystemError|unable to find ((network )?interface|
address for)
    choose the interface that leads to the other hosts: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME
    (make doctor lists the interfaces)
Expected to have finished reduction in the prior iteration
    a parameter took no part in the loss on this rank: every rank must use every parameter in every
    step, or freeze it, or DDP needs find_unused_parameters=True (TORCH_DISTRIBUTED_DEBUG=DETAIL
    names it)
does not have a deterministic implementation
    choose another operation, or add --no-deterministic and give up the same bits
values to unpack \(expected
    if these are the parts of your samples, name each of them in the last line of the traceback, as
    in images, labels, weights (docs/bring-your-own.md, Samples)
Target -?\d+ is out of bounds
    a label is no class of the model: labels are 0 to classes - 1, so correct the label, or give
    the model more outputs (Data.class_names, or your own model's last layer)
expected target dtype to be Long
    labels are the numbers of classes: let __getitem__ give an int
got Bool|Found dtype Bool|two bool tensors
    this loss compares floats: let __getitem__ give label.float()
does not support sparse gradients|sparse gradients, please consider|Sparse.*allreduce
    an Embedding(sparse=True) has them: leave sparse out, or give those parameters to an optimizer
    that takes them, as torch.optim.SGD(..., fused=False)
expected Tensor as element \d+ in argument \d+, but got NoneType
    a parameter had its first gradient in a later step: use it in each step, or give this optimizer
    fused=False
cross_entropy_loss.*argument 'input'.*must be Tensor, not
    the model returns more than its logits: take them out, as in model(images)['logits']
Using a target size .* different to the input size
    give the targets and the model's outputs the same shape, as with outputs.squeeze(1)
    (docs/bring-your-own.md, The loss)
zero-dimensional tensor .* cannot be concatenated
    a loss function gave one number for the whole batch: give it reduction='none', for one loss per
    sample (docs/bring-your-own.md, The loss)
invalid choice '(cuda:|\d)[\d,]*' for argument '--device'
    give --device cuda, and the GPUs' numbers in CUDA_VISIBLE_DEVICES
Unrecognized options: --local[-_]rank
    leave it out: every launcher sets it by itself
Unrecognized options: --num[-_]classes
    leave it out: the data have as many classes as sub-folders or labels
Unrecognized options: (true|false)\b
    a flag takes no value: --sync-bn turns it on, --no-sync-bn turns it off
'mpi'
    PyTorch's wheels are built without MPI; mpirun as a launcher works with gloo
""")
"""Pattern of a message to the advice. The first match counts."""


_GPUS = r"(nproc|processes|gpus|devices)-per-node|world-?size|(num-|n-)?(gpus|procs|processes)"
_OTHER_NAMES: list[tuple[str, ...]] = [
    (r"batch-?size|bs", "--global-batch-size", "--batch-size-per-rank"),
    (r"local-?rank|num-?classes",),  # there is no such option, and none is near
    (r"(use-)?sync-?bn", "--sync-bn"),
    (_GPUS, "--devices", "--device-ids"),  # of a recipe of one process
    (_GPUS, "--nproc"),
    (r"dist-?url|init-method", "--master-addr"),
    (r"learning-rate|base-lr", "--lr"),
    (r"(num-|n-)?(data-|loader-)?workers", "--num-workers"),
    (r"(out|output|save|log|work|run)(-?dir|-path|-folder)?", "--output-dir"),
    (r"(data|dataset|train)-?(dir|root|folder)|root", "--data-path"),
    (r"(num-|max-|train-)?(steps|iters|iterations)", "--max-steps"),
    (r"(print|log)-(freq|interval|steps)", "--log-every"),
    (r"(save|checkpoint|snapshot)-(freq|interval|steps|every)", "--snapshot-every"),
    (r"(gradient|grad)-accum(ulation)?(-steps)?|accumulate-grad-batches", "--accumulate"),
    (r"arch|model-name", "--model"),
    (r"amp|fp16|bf16|dtype|mixed-precision", "--precision"),
    (r"pretrained|checkpoint|ckpt", "--weights", "--resume"),
    (r"wd", "--weight-decay"),
    (r"class-weights?", "--class-weights"),
    (r"class-weights?",),
    (r"max-(grad-)?norm|grad(ient)?-clip(ping)?", "--clip-grad-norm"),
]
"""Pattern of an option as tutorials spell it, without `--`; the options here that mean the same."""


def meant(option: str, known: Collection[str]) -> str:
    """The options of `known` that mean what `option` means elsewhere, or that look like it."""
    name = option.lstrip("-").replace("_", "-").lower()
    for pattern, *names in _OTHER_NAMES:
        here = [n for n in names if n in known]
        if re.fullmatch(pattern, name) and (here or not names):
            return " or ".join(here)
    names = [other.removeprefix("--") for other in known]  # what all have in common is no likeness
    return next((f"--{near}" for near in difflib.get_close_matches(name, names, n=1)), "")


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
