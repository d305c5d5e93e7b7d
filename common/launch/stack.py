"""The stacks: which torch, CUDA, NCCL and cuDNN belong together, and whether they are what runs.

`docker/stacks.json` is the table. PyPI's wheels bring all of it; the driver alone is the host's. In
an image (RECIPES_STACK is set) another version than the table's is refused before training.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from common import ROOT
from common.errors import InputError

TABLE = ROOT / "docker" / "stacks.json"

# What a lock calls the parts of a stack; the CUDA version is the run-time library's first two.
_WHEELS = {
    "torch": r"torch==(\S+)",
    "torchvision": r"torchvision==(\S+)",
    "cuda": r"nvidia-cuda-runtime(?:-cu\d+)?==(\d+\.\d+)",
    "nccl": r"nvidia-nccl-cu\d+==(\S+)",
    "cudnn": r"nvidia-cudnn-cu\d+==(\S+)",
}

_CUDA_LIBRARIES = (
    "libcublas",
    "libcudart",
    "libcudnn",
    "libcufft",
    "libcufile",
    "libcupti",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libnccl",
    "libnvJitLink",
    "libnvrtc",
    "libnvshmem",
    "libnvToolsExt",
)

_ASK_NCCL = """\
import ctypes, sys
number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(number.value)
"""


def stacks() -> dict[str, dict[str, str]]:
    """Name of a stack to its versions (torch, torchvision, cuda, nccl, cudnn) and oldest driver."""
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
    return table


def locked_versions(lock: str) -> dict[str, str]:
    """The versions of a stack's parts in the text of a lock file."""
    found = {part: re.search(rf"(?m)^{wheel}", lock) for part, wheel in _WHEELS.items()}
    return {part: match[1] if match else "none" for part, match in found.items()}


def running_versions() -> dict[str, str]:
    """The versions of a stack's parts that this process has loaded. Imports torch."""
    import torch

    cudnn = torch.backends.cudnn.version()
    found = mapped_libraries("libnccl.so")
    return {
        "torch": torch.__version__.split("+")[0],
        "torchvision": version("torchvision").split("+")[0],
        "cuda": torch.version.cuda or "none",
        "nccl": _dotted(_ask_loaded(found[0])) if found else "none",
        "cudnn": _dotted(cudnn) if cudnn else "none",
    }


def mapped_libraries(name: str = "") -> list[Path]:
    """Shared libraries in this process's memory whose file name begins with `name`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line}
    return sorted(path for path in paths if path.name.startswith(name))


def strangers() -> list[str]:
    """A phrase for each CUDA library in memory that is not one of the environment's wheels.

    Torch's search path comes before LD_LIBRARY_PATH, but that of NVIDIA's own libraries does not:
    cuBLAS may find another cuBLASLt there. The driver's libraries are the host's and may be.
    """
    import torch

    wheels = Path(torch.__file__).resolve().parents[1]
    return [
        f"{path} is not of the locked wheels"
        for path in mapped_libraries()
        if path.name.startswith(_CUDA_LIBRARIES) and not path.resolve().is_relative_to(wheels)
    ]


def differences(stack: str, found: dict[str, str]) -> list[str]:
    """A phrase for each part whose version is not the table's; `found` may say less of it.

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


def check_environment(stack: str | None = None) -> None:
    """In an image: refuse another NCCL than `stack` has that the environment brings.

    Called before torch is imported, because a preloaded NCCL can break the import itself
    (pytorch#122571), and only the version would tell why. One in LD_LIBRARY_PATH is not what torch
    takes, but whatever else asks for NCCL there (a plugin, a test program) takes it.

    Raises:
        InputError: with both versions, the file and the variable that brings it.
    """
    stack = stack or os.environ.get("RECIPES_STACK")
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH") if stack else ():
        for entry in filter(None, re.split("[: ]", os.environ.get(variable, ""))):
            path = Path(entry) if variable == "LD_PRELOAD" else Path(entry, "libnccl.so.2")
            if not path.name.startswith("libnccl.so") or not path.is_file():
                continue
            command = [sys.executable, "-c", _ASK_NCCL, str(path)]
            said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            found = {"nccl": _dotted(int(said)) if said.isdecimal() else "unknown"}
            for difference in differences(str(stack), found):
                raise InputError(f"{variable} brings {difference} ({path}): unset {variable}")


def check_versions() -> None:
    """In an image: refuse to run with other versions than the stack's.

    Raises:
        InputError: with both versions of each part that differs.
    """
    stack = os.environ.get("RECIPES_STACK")
    if not stack:
        return
    try:
        different = differences(stack, running_versions()) + strangers()
    except RuntimeError as error:  # torch's own: cuDNN is another than it was built with
        different = [str(error)]
    if different:
        raise InputError(
            f"this image does not run what it is named after: {'; '.join(different)}: build it "
            "anew (make image), or take out what was added to it or its environment"
        )


def check_driver(driver: str = "libcuda.so.1") -> None:
    """Refuse a host whose NVIDIA driver is too old for this torch, and say what fits it.

    A driver runs what was built for its own major version of CUDA or an older one:
    https://docs.nvidia.com/deploy/cuda-compatibility (minor version compatibility).

    Args:
        driver: its library; where there is none there is no driver, and all is well.

    Raises:
        InputError: the driver is too old.
    """
    import torch

    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) or torch.version.cuda is None:
        return
    newest, needed = number.value // 1000, int(torch.version.cuda.split(".")[0])
    if newest >= needed:
        return
    fit = [name for name, parts in stacks().items() if int(parts["cuda"].split(".")[0]) <= newest]
    drivers = [p["driver"] for p in stacks().values() if p["cuda"].startswith(f"{needed}.")]
    raise InputError(
        f"this host's NVIDIA driver knows CUDA {newest}.{number.value % 1000 // 10} at most, and "
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, which needs "
        f"{f'driver {min(drivers)} or newer' if drivers else 'a newer one'}: update the driver, "
        + (f"take stack {' or '.join(fit)} (STACK={fit[0]}), " if fit else "")
        + "or train with --device cpu"
    )


def _ask_loaded(path: Path) -> int:
    number = ctypes.c_int()
    ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))  # the one in memory, not another
    return number.value


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
