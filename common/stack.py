"""The stacks: which torch, CUDA, NCCL and cuDNN belong together, and whether these are running.

`docker/stacks.json` is the table. PyPI's wheels bring everything but the driver, which is the
host's. An image (RECIPES_STACK is set) refuses to train with other versions than its stack's.
"""

import ctypes
import json
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import ROOT
from common.errors import InputError

# Neither NCCL's plugins (libnccl-net.so), which no wheel has, nor CUPTI, which a profiler brings.
_CUDA_LIBRARIES = re.compile(
    r"lib(cublas|cudart|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl\.|nvJitLink|nvrtc|"
    r"nvshmem|nvToolsExt)"
)


def stacks() -> dict[str, dict[str, str]]:
    """Name of a stack to its versions (torch, torchvision, cuda, nccl, cudnn) and oldest driver."""
    table: dict[str, dict[str, str]] = json.loads((ROOT / "docker" / "stacks.json").read_text())
    return table


def differences(stack: str, found: dict[str, str]) -> list[str]:
    """A phrase for each part whose version is not the stack's; `found` may be less exact.

    Raises:
        InputError: no such stack.
    """
    if stack not in stacks():
        raise InputError(f"no stack {stack!r}: there are {', '.join(stacks())}")
    pinned = stacks()[stack]
    return [
        f"{part} {number} where {stack} pins {pinned[part]}"
        for part, number in found.items()
        if not f"{pinned[part]}.".startswith(f"{number}.")
    ]


def running_versions() -> dict[str, str]:
    """The versions of a stack's parts that this process has loaded. Imports torch."""
    import torch

    cudnn, nccl = torch.backends.cudnn.version(), ctypes.c_int()
    if loaded := mapped_libraries("libnccl.so"):  # torch itself knows only what it was built with
        ctypes.CDLL(str(loaded[0])).ncclGetVersion(ctypes.byref(nccl))
    return {
        "torch": torch.__version__.split("+")[0],
        "torchvision": version("torchvision").split("+")[0],
        "cuda": torch.version.cuda or "none",
        "nccl": _dotted(nccl.value) if loaded else "none",
        "cudnn": _dotted(cudnn) if cudnn else "none",
    }


def mapped_libraries(name: str = "") -> list[Path]:
    """Shared libraries in this process's memory whose file name begins with `name`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line}
    return sorted(path for path in paths if path.name.startswith(name))


def strangers() -> list[str]:
    """A phrase for each loaded CUDA library that is not in the environment's wheels.

    Torch searches its wheels before LD_LIBRARY_PATH, but NVIDIA's libraries do not: cuBLAS may find
    another cuBLASLt. The driver's libraries belong to the host and are not checked.
    """
    import torch

    wheels = Path(torch.__file__).resolve().parents[1]
    return [
        f"{path} is not from the locked wheels"
        for path in mapped_libraries()
        if _CUDA_LIBRARIES.match(path.name) and not path.resolve().is_relative_to(wheels)
    ]


def check_environment() -> None:
    """Raise InputError on a system without a folder for temporary files, which torch needs."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(
            f"{error.strerror}: torch needs one: set TMPDIR, or in a container give --tmpfs /tmp"
        ) from None


def check_versions() -> None:
    """In an image: refuse to train with other versions than the stack's.

    Raises:
        InputError: with both versions of each part that differs.
    """
    check_environment()  # torchrun has not come through the front door
    stack = os.environ.get("RECIPES_STACK")
    if not stack:
        return
    try:
        different = differences(stack, running_versions()) + strangers()
    except RuntimeError as error:  # torch found another cuDNN than it was built with
        different = [str(error)]
    if different:
        raise InputError(
            f"this image does not run the versions of stack {stack}: {'; '.join(different)}: build "
            "it again (make image), or remove what was added to the image or its environment"
        )


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
