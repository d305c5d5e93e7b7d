"""ResNet-50 in bf16 on images from one loader, by ddp_launch, plain PyTorch or Accelerate.

    python -m benchmarks.peers.images ddp_launch cuda FOLDER [--compile]

`make gpu-check` runs it. Each contestant gets the same images, as bytes from the same loading
processes, on one device. The time is that of steps 20 to 120: without the start and compilation.
The last line is JSON. On a CPU, steps are few and small, to try this script.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.gpu import Setting, Training
from common.data import datasets
from common.data.batches import DeviceBatches
from common.data.datasets import ArraySamples, Data, DataOptions
from common.data.loaders import make_loader
from common.group.devices import synchronize
from recipes.ddp_launch import train


class Sizes:
    """Of the images and the work on a device."""

    def __init__(self, device: torch.device) -> None:
        large = device.type == "cuda"
        self.side, self.batch, self.workers = (224, 256, 12) if large else (32, 8, 1)
        self.first, self.last = (20, 120) if large else (2, 6)
        self.precision = "bf16" if large else "fp32"  # portable kernels are slow at bf16


def images(options: DataOptions, seed: int, make: Any = datasets.fake_data) -> Data:
    """`--data fake` as bytes, in an epoch of 51,200 images: no epoch begins within the time."""
    data: Data = make(options, seed)
    assert isinstance(data.train, ArraySamples)
    data.train.source[0] = data.train.source[0].mul(32).add(128).clamp(0, 255).byte()
    data.train.indices = [*data.train.indices] * 50
    return data


def time_steps(device: torch.device, sizes: Sizes) -> list[float]:
    """A list that gets the time after the first and the last of the timed steps [s]."""
    stamps: list[float] = []
    steps = itertools.count(1)

    def note(*_: Any) -> None:
        if next(steps) in (sizes.first, sizes.last):
            synchronize(device)
            stamps.append(time.perf_counter())

    register_optimizer_step_post_hook(note)
    return stamps


def recipe(device: torch.device, sizes: Sizes, folder: Path, *, compiled: bool) -> None:
    """ddp_launch as one process."""
    datasets.fake_data = images
    options = {
        "--data": "fake",
        "--model": "resnet50",
        "--stem": "large",
        "--image-size": sizes.side,
        "--global-batch-size": sizes.batch,
        "--precision": sizes.precision,
        "--num-workers": sizes.workers,
        "--max-steps": sizes.last,
        "--epochs": 1,
        "--device": device.type,
        "--nproc": 1,  # in this process, whose steps are timed
        "--output-dir": folder,
    }
    words = [str(word) for pair in options.items() for word in pair]
    words += ["--channels-last", "--no-augment", "--no-deterministic"]
    if status := train.main([*words, *(["--compile"] if compiled else [])]):
        sys.exit(status)


def batches(device: torch.device, sizes: Sizes) -> Iterator[Any]:
    """As many batches as there are steps, from the recipe's loader."""
    data = images(DataOptions(data="fake", image_size=sizes.side, augment=False), 0)
    keys = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = [
        [(0, key) for key in keys[start : start + sizes.batch]]
        for start in range(0, sizes.last * sizes.batch, sizes.batch)
    ]
    loader = make_loader(
        data.train, wanted, num_workers=sizes.workers, pin_memory=device.type == "cuda"
    )
    yield from DeviceBatches(loader, device, torch.float32, data.mean, data.std)


def plain(device: torch.device, sizes: Sizes, *, compiled: bool) -> None:
    """The loop of benchmarks/gpu.py: autocast, fused SGD, nothing else."""
    torch.backends.cudnn.benchmark = True
    setting = Setting(sizes.batch, sizes.precision, compiled=compiled)
    step = Training(setting, device, sizes.side)
    for pictures, labels in batches(device, sizes):
        step.images = pictures.contiguous(memory_format=torch.channels_last)
        step.labels = labels
        step()


def accelerate(device: torch.device, sizes: Sizes, *, compiled: bool) -> None:
    """The same model and optimizer, prepared by Hugging Face Accelerate."""
    from accelerate import Accelerator

    torch.backends.cudnn.benchmark = True
    low = "bf16" if sizes.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=low, cpu=device.type == "cpu")
    made = Training(Setting(sizes.batch, sizes.precision), device, sizes.side)
    model, optimizer = accelerator.prepare(made.model, made.optimizer)
    forward = torch.compile(model, dynamic=False) if compiled else model
    for pictures, labels in batches(device, sizes):
        optimizer.zero_grad()
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(forward(pictures), labels)
        accelerator.backward(loss)
        optimizer.step()


def main(arguments: list[str]) -> None:
    """Train, and print what was measured."""
    name, device, folder = arguments[0], torch.device(arguments[1]), Path(arguments[2])
    sizes, compiled = Sizes(device), "--compile" in arguments
    stamps = time_steps(device, sizes)
    if name == "ddp_launch":
        recipe(device, sizes, folder, compiled=compiled)
    else:
        {"plain": plain, "accelerate": accelerate}[name](device, sizes, compiled=compiled)
    first, last = stamps
    found = {
        "images_per_s": (sizes.last - sizes.first) * sizes.batch / (last - first),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
