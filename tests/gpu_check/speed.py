"""ddp_launch beside the same loop in plain PyTorch and in Accelerate; one at a time."""

import json
import sys
from functools import partial
from importlib.util import find_spec

from tests.gpu_check.check import Check, Found, Part

AT_LEAST = 0.85
"""ddp_launch's share of plain PyTorch's images/s; it was 0.92 on one H200."""


def trained(check: Check, name: str, *more: str) -> Found:
    """Images/s and peak memory of a contestant (benchmarks/peers/images.py)."""
    if name == "accelerate" and not find_spec(name):
        return {"holds": True, "skipped": "Accelerate is not installed"}
    if more and not check.cuda:
        return {"holds": True, "skipped": "compilation takes minutes on a CPU"}
    folder = str(check.folder / check.name)
    words = ("-m", "benchmarks.peers.images", name, check.device, folder, *more)
    # All compile for the same GPU: what one has compiled, the next one finds.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(check.folder / "inductor")}
    found = json.loads(check.call(sys.executable, *words, env=cache).splitlines()[-1])
    speeds[name, *more] = found["images_per_s"]
    beside = speeds.get(("plain", *more))
    if name == "plain" or not beside:
        return {"holds": True, **found}
    share = found["images_per_s"] / beside
    slow = check.cuda and name == "ddp_launch" and share < AT_LEAST
    return {"holds": not slow, **found, "of_plain_pytorch": share}


speeds: dict[tuple[str, ...], float] = {}

PART = Part(
    {
        "plain_pytorch_images_per_s": partial(trained, name="plain"),
        "ddp_launch_images_per_s": partial(trained, name="ddp_launch"),
        "accelerate_images_per_s": partial(trained, name="accelerate"),
        "ddp_launch_compiled_images_per_s": lambda check: trained(check, "ddp_launch", "--compile"),
        "plain_pytorch_compiled_images_per_s": lambda check: trained(check, "plain", "--compile"),
    },
    check_s=110,
)
