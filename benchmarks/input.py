"""Loading photos: JPEG files to normalised batches, beside the classic pipeline with Pillow."""

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DataOptions, load_data
from common.data.loaders import rank_loaders
from common.figure import save_figure
from common.group.process_group import process_group
from common.launch.process import keep_freed_memory
from common.launch.ranks import Ranks
from recipes.tune_loader.compare import write_photos
from tools.comparison import in_turn, ratios, spread
from tools.fresh import run_fresh

PHOTOS, BATCH_SIZE, WORKERS, EPOCHS = 480, 32, 2, 3
VARIANTS = {
    "classic": "open, RandomResizedCrop, flip, ToTensor, Normalize with Pillow's images",
    "classic, memory kept": "the same, with the setting of malloc that every rank here has",
    "ours": "`--data imagefolder`",
}
CPU = torch.device("cpu")
CLASSIC = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


def write_files(folder: Path, train: int = PHOTOS) -> None:
    """JPEG files of 500x375 px: `train` in train/, and 8 in val/."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", 8)):
        write_photos(folder / part, count, random)


def samples_per_s(batches: Iterable[Sequence[Tensor]]) -> float:
    """Speed over EPOCHS epochs, after one epoch in which the loading processes start."""
    for _ in batches:
        pass
    start_s = time.perf_counter()
    count = sum(len(images) for _ in range(EPOCHS) for images, _ in batches)
    return count / (time.perf_counter() - start_s)


def run_variant(variant: str, root: Path) -> float:
    """Speed of loading and normalising, without training [samples/s]."""
    torch.set_num_threads(1)
    if variant != "classic":
        keep_freed_memory()  # as every rank does
    if variant != "ours":
        return samples_per_s(
            DataLoader(
                ImageFolder(root / "train", CLASSIC),
                BATCH_SIZE,
                shuffle=True,
                drop_last=True,
                num_workers=WORKERS,
                persistent_workers=True,
            )
        )
    options = DataOptions("imagefolder", root, verify_images=False, num_workers=WORKERS)
    with process_group(Ranks(), CPU, "gloo", 60):
        data = load_data(options, 0, Ranks())
        batches, _ = rank_loaders(data, options, [BATCH_SIZE], 0, 0, CPU, torch.float32, root)
        return samples_per_s(batches)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The pipelines take turns, each in a fresh process."""
    write_files(folder)

    def one(variant: str, _round: int) -> float:
        return float(run_fresh("benchmarks.input", [variant, folder]).split()[-1])

    runs = in_turn(list(VARIANTS), one, rounds)
    rows = [
        [
            VARIANTS[name],
            f"{statistics.median(found):,.0f}",
            "1" if name == "classic" else spread(ratios(found, runs["classic"])),
        ]
        for name, found in runs.items()
    ]
    table = {
        "title": f"JPEG files of 500x375 px to normalised batches of {BATCH_SIZE} at 224 px, "
        f"{WORKERS} loading processes, nothing else to do; median (least to most) of {rounds} "
        "rounds in turn.",
        "columns": ["", "samples/s", "against the classic pipeline"],
        "rows": rows,
    }
    return {"tables": [table], "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """Samples/s of each variant; each run is a point."""

    def plot(axes: Any) -> None:
        for place, (name, speeds) in enumerate(result["runs"].items()):
            axes.plot(speeds, [place] * len(speeds), "o", alpha=0.5)
            axes.plot(statistics.median(speeds), place, "k|", markersize=20, label=name)
        axes.set_yticks(range(len(result["runs"])), list(result["runs"]))
        axes.set(xlabel="samples/s", ylim=(-0.5, len(result["runs"]) - 0.5))
        axes.set_xlim(left=0)

    save_figure(path, plot)


if __name__ == "__main__":
    print(run_variant(sys.argv[1], Path(sys.argv[2])))
