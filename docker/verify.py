"""What the image's build and `make lock` ask of the table of stacks.

python docker/verify.py lock STACK         docker/stacks/STACK.txt pins the same
python docker/verify.py installed STACK    and that is what torch loads, from the pinned wheels
python docker/verify.py constraints STACK  the table's torch and torchvision, for `make lock`
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.errors import InputError
from common.stack import differences, mapped_libraries, running_versions, stacks, strangers

# What a lock calls the parts of a stack; of the run-time library's version, CUDA's is two numbers.
_WHEELS = {
    "torch": r"torch==(\S+)",
    "torchvision": r"torchvision==(\S+)",
    "cuda": r"nvidia-cuda-runtime(?:-cu\d+)?==(\d+\.\d+)",
    "nccl": r"nvidia-nccl-cu\d+==(\S+)",
    "cudnn": r"nvidia-cudnn-cu\d+==(\S+)",
}


def locked_versions(lock: str) -> dict[str, str]:
    """The versions of a stack's parts in the text of a lock file."""
    found = {part: re.search(rf"(?m)^{wheel}", lock) for part, wheel in _WHEELS.items()}
    return {part: match[1] if match else "none" for part, match in found.items()}


def main(what: str, stack: str) -> str | None:
    """Check, and return what is wrong."""
    if what == "constraints":
        print("\n".join(f"{part}=={stacks()[stack][part]}" for part in ("torch", "torchvision")))
        return None
    try:
        differences(stack, {})
    except InputError as error:
        return f"error: {error}"
    lock = ROOT / "docker" / "stacks" / f"{stack}.txt"
    wrong = differences(stack, locked_versions(lock.read_text()))
    if what == "installed":
        import torch
        import torchvision

        boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
        torchvision.ops.nms(boxes, torch.ones(1), 0.5)  # fails where the operators do not load
        found = running_versions()
        wrong += differences(stack, found) + strangers()
        for name in ("libcudart", "libcublas", "libcudnn", "libnccl"):
            wrong += [] if mapped_libraries(name) else [f"torch has not loaded {name}"]
        print(f"{stack}: " + ", ".join(f"{part} {number}" for part, number in found.items()))
    return f"error: {'; '.join(wrong)}" if wrong else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
