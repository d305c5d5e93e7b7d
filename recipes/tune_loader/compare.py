"""The sweep on JPEG files of 500x375 px, made here."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from common import cli
from common.figure import save_figure
from common.group.devices import choose_device
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from recipes.tune_loader.train import NAME, Config, measure_settings, median_of, plot

CLASSES = [(photo, (0, 0, 640, 427)) for photo in (0, 1, 0, 1)]
"""Four classes of crops of the whole photos: see `write_photos`."""


def write_photos(
    folder: Path,
    count: int,
    random: np.random.Generator,
    classes: Sequence[tuple[int, tuple[int, int, int, int]]] = CLASSES,
    widths: tuple[int, int] = (400, 560),
    size: tuple[int, int] = (500, 375),
) -> None:
    """JPEG files that are crops of the two photos in scikit-learn, one sub-folder per class.

    Args:
        folder: where the sub-folders go.
        count: number of files.
        random: chooses the crops.
        classes: for each class the photo, and the part of it (left, top, right, bottom) [px].
        widths: width of a crop, from and below [px].
        size: width and height of the images in the files [px].
    """
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(count):
        label = number % len(classes)
        photo, (left, top, right, bottom) = classes[label]
        width = int(random.integers(*widths))
        height = width * size[1] // size[0]
        x = int(random.integers(left, right - width))
        y = int(random.integers(top, bottom - height))
        path = folder / f"class_{label}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        crop = photos[photo].crop((x, y, x + width, y + height))
        crop.resize(size, Image.Resampling.LANCZOS).save(path, quality=85)


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Sweep over the user's own data, or over photos written here."""
    own = any(argument.startswith("--data") for argument in arguments)
    if not own:
        write_photos(folder / "photos", 480, np.random.default_rng(0))
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
        found, _ = measure_settings(config, device)
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
