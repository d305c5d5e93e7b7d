"""The sweep on a folder of photos of the size that cameras' thumbnails have, made here."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common import cli
from common.figure import save_figure
from common.group.devices import choose_device
from common.group.rendezvous import process_group
from common.launch.ranks import Ranks
from recipes.tune_loader.train import NAME, Config, median_of, plot, sweep


def write_photos(folder: Path, count: int = 480, width: int = 500, height: int = 375) -> None:
    """JPEG files of smooth random colours, in four classes."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        path = folder / f"class_{number % 4}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Sweep over the user's own data, or over photos written here."""
    own = any(argument.startswith("--data") for argument in arguments)
    if not own:
        write_photos(folder / "photos")
    photos = [
        "--data",
        "imagefolder",
        "--data-path",
        str(folder / "photos"),
        "--no-verify-images",
        "--global-batch-size",
        "32",
        "--samples",
        "640",
    ]
    _, config = cli.parse(NAME, Config, [*([] if own else photos), *arguments])
    config = replace(config, tune=replace(config.tune, rounds=rounds))
    device = choose_device(config.tune.device, Ranks())
    with process_group(Ranks(), device, "auto", 600):
        found, _ = sweep(config, device)
    rows = [
        [
            kind,
            number,
            f"{speed:,.0f}",
            f"{speed / median_of(speeds)[0]:.2f}",
            "recommended"
            if (number, kind == "pinned") == (found["num_workers"], found["pin_memory"])
            else "",
        ]
        for kind, speeds in found["samples_per_s"].items()
        for number, speed in median_of(speeds).items()
    ]
    what = "your data" if own else "480 JPEG files of 500x375 px, as for a ResNet at 224 px"
    table = {
        "title": f"Loading {found['samples']} samples of {what}, with nothing else to do; median "
        f"of {rounds} rounds.",
        "columns": ["memory", "loading processes", "samples/s", "against 0", ""],
        "rows": rows,
    }
    return {"tables": [table], "sweep": found}


def draw(result: dict[str, Any], path: Path) -> None:
    """Samples/s by number of processes."""
    save_figure(path, partial(plot, result["sweep"]))
