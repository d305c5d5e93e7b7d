"""Data parallelism by hand: bare tensors, a copy of the parameters on each device.

Each step splits the batch and runs forward and backward on every device. An all-reduce of four
lines sums the gradients, and every device updates its own copy of the parameters. DataParallel and
DistributedDataParallel do the same; here nothing is hidden. Use it to learn, on any list of
devices. `cpu cpu` works too, but is no faster than `cpu`: both share the cores and take turns.

    make run RECIPE=dp_scratch                                       all GPUs, or cpu cpu
    make run RECIPE=dp_scratch ARGS="--devices cuda:0 cuda:1"        these two
    make run RECIPE=dp_scratch ARGS=--show                           scatter and all-reduce, printed
    make image-run RECIPE=dp_scratch                                 the same in the image
    srun --ntasks 1 --gpus 2 python -m recipes dp_scratch            one Slurm task with two GPUs

The default takes about 25 s on 2 CPU cores, reaches a validation accuracy of 0.97, and ends with
the batch-size lesson: the same training with larger batches, as a figure.

Source: Zhang et al., "Dive into Deep Learning", section 13.5, Training on Multiple GPUs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common import cli, log
from common.data.datasets import DataOptions, load_data
from common.data.loaders import rank_loaders
from common.group.devices import choose_devices
from common.launch.ranks import Ranks
from common.option_rules import may_change
from common.run import Loop, RunOptions, make_loaders, make_plan, start
from common.terminal import set_up_logs
from common.training import Default, ScheduleOptions, evaluate
from recipes.dp_scratch.lenet import initialize, lenet, refuse_other_images
from recipes.dp_scratch.lesson import show_lesson
from recipes.dp_scratch.show import show_steps

NAME = "dp_scratch"


@dataclass(frozen=True)
class ParallelOptions:
    """Which devices share the work."""

    devices: tuple[str, ...] | None = None
    """Devices, such as `cuda:0 cuda:1`, or `cpu cpu` to learn. None: all GPUs, else `cpu cpu`."""
    lesson: bool = may_change(True)
    """At the end, train again with larger batches and draw a figure (the batch-size lesson)."""
    show: bool = may_change(False)
    """Print what each device holds before and after a scatter and an all-reduce. Trains nothing."""


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: RunOptions = field(default_factory=partial(RunOptions, precision="fp32"))
    data: DataOptions = field(default_factory=partial(DataOptions, image_size=28))
    optimizer: ScheduleOptions = field(
        default_factory=partial(ScheduleOptions, epochs=15, lr=Default(0.2))
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        if self.run.precision not in ("fp32", "fp64"):
            raise ValueError("dp_scratch computes in --precision fp32 or fp64")


class Replicas(nn.Module):
    """The parameters, copied to each device. It is a module only because `evaluate` takes one."""

    def __init__(self, parameters: dict[str, Tensor], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.copies = [
            {name: own.to(device, copy=True).requires_grad_() for name, own in parameters.items()}
            for device in devices
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Logits, computed on the first device alone."""
        return lenet(self.copies[0], images)

    def state_dict(self, **_options: Any) -> Any:
        """One copy of the parameters: all copies are equal."""
        return {name: value.detach() for name, value in self.copies[0].items()}

    def load_state_dict(self, state_dict: Any, *_: Any, **_options: Any) -> Any:
        """Copy parameters to every device."""
        for copy in self.copies:
            for name, value in copy.items():
                value.data.copy_(state_dict[name])


def scatter(batch: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Each device's part of the batch, on the device; sizes differ by one sample at most."""
    parts = batch.tensor_split(len(devices))
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


def all_reduce(tensors: Sequence[Tensor]) -> None:
    """Replace each device's tensor by the sum over devices."""
    for other in tensors[1:]:
        tensors[0].add_(other.to(tensors[0].device))
    for other in tensors[1:]:
        other.copy_(tensors[0])


def train_step(replicas: Replicas, images: Tensor, labels: Tensor, lr: float) -> Tensor:
    """One step of gradient descent on all devices; returns the mean loss on the first device.

    `images` are (samples, 1, 28, 28), with at least one sample per device; `labels` (samples,).
    """
    devices = replicas.devices
    parts = zip(replicas.copies, scatter(images, devices), scatter(labels, devices), strict=True)
    losses = [cross_entropy(lenet(copy, x), y, reduction="sum") for copy, x, y in parts]
    for loss in losses:  # this only starts work on a GPU, so all GPUs compute at the same time
        loss.backward()
    for name in replicas.copies[0]:
        gradients: list[Any] = [copy[name].grad for copy in replicas.copies]
        all_reduce(gradients)
        for copy, gradient in zip(replicas.copies, gradients, strict=True):
            copy[name].data.sub_(gradient, alpha=lr / len(labels))
            copy[name].grad = None
    return torch.stack([loss.detach().to(devices[0]) for loss in losses]).sum() / len(labels)


def train(config: Config, ranks: Ranks) -> None:
    """Train in this one process; the run's folder is `config.run.output_dir`."""
    seed = config.run.seed
    choose = partial(choose_devices, config.parallel.devices, config.run.device, on_cpu=2)
    if config.parallel.show:
        set_up_logs(ranks)
        show_steps(choose(), scatter, all_reduce)
        return

    # seed, devices, process group, folder
    with start(NAME, config, ranks, choose) as run:
        devices, device, dtype = choose(), run.device, run.dtype  # run.devices: each once
        log.info(f"the batch is split over {', '.join(map(str, devices))}")

        # data
        data = load_data(config.data, seed, ranks)
        refuse_other_images(data)
        plan = make_plan(config.optimizer, len(data.train), 1, devices=len(devices), uneven=True)
        loader, val_loader = make_loaders(run, config.data, data, plan)

        # model, parallelise
        replicas = Replicas(initialize(dtype), devices)

        # resume
        loop = Loop(run, plan, data)
        if loop.resume(model=replicas):
            # loop
            for _ in loop.epochs():
                for images, labels in loop.steps(loader):
                    loss = train_step(replicas, images, labels, loop.lr)
                    loop.after_step(loss)
                loop.save()  # before the evaluation, which may take long
                result = evaluate(replicas, val_loader, len(data.val))
                loop.after_epoch(result, replicas.state_dict)

            # report
            loop.finish(replicas.state_dict())

        if config.parallel.lesson:  # it may be missing in the folder of a finished run
            show_lesson(
                lambda: Replicas(initialize(dtype), [device]),
                train_step,
                lambda size: rank_loaders(
                    data, config.data, [size], seed, 0, device, dtype, run.folder
                ),
                len(data.val),
                seed,
                run.folder,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    cli.end_process(main())
