"""Does ddp_launch learn as well as a plain trainer made of torchvision's own parts?

The plain trainer below shares only the image files of the first task with the recipe. Its models,
initial weights, transforms, data sets and samplers are torchvision's and torch's.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m benchmarks.learning TASK SEED FOLDER     the plain trainer; `measure` starts it
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from common.figure import save_figure
from recipes.tune_loader.compare import write_photos
from tools.comparison import in_turn, run_recipe, spread
from tools.fresh import run_fresh


@dataclass(frozen=True)
class Task:
    """What both trainers do: a ResNet-18, SGD with momentum 0.9, a cosine schedule."""

    title: str
    data: tuple[str, ...]
    """Options of ddp_launch."""
    epochs: int
    global_batch_size: int
    lr: float
    weight_decay: float = 5e-4


TASKS = {
    "photos": Task("1,000 photos at 64 px", ("imagefolder", "--image-size", "64"), 4, 32, 0.02),
    "digits": Task("digits", ("digits",), 6, 96, 0.05),
}
TRAINERS = {
    "ddp_launch": "ddp_launch",
    "by_epoch": "ddp_launch --lr-schedule cosine-by-epoch",
    "plain": "torchvision's model, transforms and loop",
}
RESNET50 = {
    "--zero-init-residual, its default": "--zero-init-residual",
    "--no-zero-init-residual": "--no-zero-init-residual",
}
CONVNET_SEEDS = 10
QUARTERS = [
    (photo, (x, y, x + 320, y + 213)) for photo in (0, 1) for y in (0, 213) for x in (0, 320)
]
"""The eight classes of photos. Some look alike (the sky), so no model can tell every image."""


class Digits(Dataset[tuple[Any, int]]):
    """scikit-learn's digits as images of Pillow."""

    def __init__(self, transform: Any) -> None:
        self.digits, self.transform = load_digits(), transform

    def __len__(self) -> int:
        return len(self.digits.target)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = Image.fromarray((self.digits.images[index] * 255 / 16).astype(np.uint8))
        return self.transform(picture), int(self.digits.target[index])


def make_plain(task: str, seed: int, folder: Path) -> tuple[Dataset[Any], Dataset[Any], nn.Module]:
    """Training data, validation data and model, as in torchvision's documentation."""
    if task == "photos":
        normal = [
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
        augmented = transforms.Compose(
            [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), *normal]
        )
        plain = transforms.Compose([transforms.Resize(73), transforms.CenterCrop(64), *normal])
        return (
            ImageFolder(folder / "train", augmented),
            ImageFolder(folder / "val", plain),
            resnet18(num_classes=8),
        )
    normal = [transforms.ToTensor(), transforms.Normalize((0.305,), (0.376,))]
    shifted = transforms.Compose([transforms.RandomCrop(8, padding=1), *normal])
    order = np.random.default_rng(seed).permutation(1797).tolist()
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return (
        Subset(Digits(shifted), order[:1437]),
        Subset(Digits(transforms.Compose(normal)), order[1437:]),
        model,
    )


def train_plain(name: str, seed: int, folder: Path) -> None:
    """Train as one of torchrun's two ranks; rank 0 prints the accuracy after each epoch."""
    task = TASKS[name]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    train, val, model = make_plain(name, seed, folder)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(1000 * seed + rank)  # the ranks' augmentation differs
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=seed, drop_last=True)
    size = task.global_batch_size // world_size
    loader = DataLoader(train, size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world_size)), 64)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=task.lr, momentum=0.9, weight_decay=task.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, task.epochs * len(loader), task.lr / 100
    )
    accuracies = []
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for images, labels in val_loader:
                right = (model(images).argmax(1) == labels).sum()
                counts += torch.tensor([float(right), float(len(labels))])
        dist.all_reduce(counts)
        accuracies.append(float(counts[0] / counts[1]))
    if rank == 0:
        print(json.dumps(accuracies))
    dist.destroy_process_group()


def train_recipe(name: str, options: Sequence[str | Path], seed: int, folder: Path) -> list[float]:
    """Validation accuracy after each epoch of a recipe's run."""
    run_recipe(name, [*options, "--seed", str(seed), "--snapshot-every", "0"], folder)
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["val_accuracy"] for line in lines if "val_accuracy" in line]


def train_task(task: str, trainer: str, seed: int, folder: Path) -> list[float]:
    """Validation accuracy after each epoch of one trainer on one task, on two processes."""
    photos, given = folder / "photos", TASKS[task]
    if trainer == "plain":
        command = ["--standalone", "--nproc-per-node", "2", "-m", "benchmarks.learning"]
        said = run_fresh("torch.distributed.run", [*command, task, str(seed), photos])
        accuracies: list[float] = json.loads(said.splitlines()[-1])
        return accuracies
    options: list[str | Path] = ["--nproc", "2", "--model", "resnet18", "--data", *given.data]
    options += ["--data-path", photos] if task == "photos" else []
    for option in ("epochs", "global_batch_size", "lr", "weight_decay"):
        options += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
    if trainer == "by_epoch":
        options += ["--lr-schedule", "cosine-by-epoch"]
    return train_recipe("ddp_launch", options, seed, folder / f"{task}_{trainer}_{seed}")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Both tasks by both trainers, ResNet-50's first weights, and the default run, by seed."""
    random = np.random.default_rng(0)
    for part, count in (("train", 800), ("val", 200)):
        write_photos(folder / "photos" / part, count, random, QUARTERS, (40, 120), (96, 96))
    variants = [f"{task} {trainer}" for task in TASKS for trainer in TRAINERS]

    def one(variant: str, seed: int) -> list[float]:
        if variant in RESNET50:
            options = [RESNET50[variant]]
            return train_recipe("dp_resnet50", options, seed, folder / f"{variant}_{seed}")
        task, trainer = variant.split()
        return train_task(task, trainer, seed, folder)

    runs = in_turn([*variants, *RESNET50], one, rounds)
    default = in_turn(
        ["convnet"],
        lambda _, seed: train_recipe("ddp_launch", ["--nproc", "2"], seed, folder / f"seed_{seed}"),
        CONVNET_SEEDS,
    )
    return {"tables": tables(runs, default), "runs": {**runs, **default}}


def tables(
    runs: Mapping[str, list[list[float]]], default: Mapping[str, list[list[float]]]
) -> list[dict[str, Any]]:
    """The tasks by epoch; the other runs half-way and at the end."""
    seeds = len(next(iter(runs.values())))
    longest = max(task.epochs for task in TASKS.values())
    rows = []
    for name, task in TASKS.items():
        for trainer, words in TRAINERS.items():
            by_epoch = [spread(found, 3) for found in zip(*runs[f"{name} {trainer}"], strict=True)]
            rows.append([task.title, words, *by_epoch, *[""] * (longest - len(by_epoch))])
    beside = {
        "title": f"ResNet-18 on 2 processes, validation accuracy after each epoch: median (least "
        f"to most) of {seeds} seeds.",
        "columns": ["data", "trainer", *map(str, range(1, longest + 1))],
        "rows": rows,
    }
    others = {"dp_resnet50 " + name: runs[name] for name in RESNET50}
    others["ddp_launch, the default run"] = default["convnet"]
    half = {
        "title": "Validation accuracy of default runs half-way through their epochs and at the "
        "end: median (least to most).",
        "columns": ["run", "seeds", "half-way", "at the end"],
        "rows": [
            [
                name,
                len(found),
                spread([run[len(run) // 2 - 1] for run in found], 3),
                spread([run[-1] for run in found], 3),
            ]
            for name, found in others.items()
        ],
    }
    return [beside, half]


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracies at the end; the figure shows the tasks by epoch, and another schedule."""
    runs = result["runs"]

    def at_the_end(name: str) -> str:
        return spread([run[-1] for run in runs[name]], 3)

    rows = [
        [f"{name}: {who}", at_the_end(f"{name} {trainer}")]
        for name in TASKS
        for trainer, who in {"ddp_launch": "ddp_launch", "plain": "the plain trainer"}.items()
    ]
    rows += [["default run: dp_resnet50 " + name, at_the_end(name)] for name in RESNET50]
    rows.append(["default run: ddp_launch", at_the_end("convnet")])
    seeds = [len(runs[name]) for name in (next(iter(RESNET50)), "convnet")]
    tasks = ", ".join(f"{task.title} for {task.epochs} epochs" for task in TASKS.values())
    return [
        {
            "title": f"Median (least to most) of {seeds[0]} seeds (last row: {seeds[1]}). "
            f"ResNet-18 on 2 processes: {tasks}.",
            "columns": ["", "validation accuracy at the end"],
            "rows": rows,
        }
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy by epoch: a line for the median, a band from the lowest to the highest."""

    def plot(*panels: Any) -> None:
        for axes, (name, task) in zip(panels, TASKS.items(), strict=True):
            epochs = range(1, task.epochs + 1)
            for trainer, words in TRAINERS.items():
                by_epoch = list(zip(*result["runs"][f"{name} {trainer}"], strict=True))
                axes.plot(epochs, [statistics.median(found) for found in by_epoch], label=words)
                axes.fill_between(
                    epochs, [min(f) for f in by_epoch], [max(f) for f in by_epoch], alpha=0.2
                )
            axes.set(xlabel="epoch", ylabel="validation accuracy", title=task.title, ylim=(0, 1))
            axes.set_xticks(list(epochs))
            axes.legend(loc="lower right")

    save_figure(path, plot, panels=len(TASKS))


if __name__ == "__main__":
    train_plain(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
