"""DataParallel: one process copies the model to every GPU in each step.

The batch is split over the GPUs, and each GPU computes on its copy. GPU 0 gathers the outputs and
the gradients, and takes the step. Many people learn this way first; `make bench
RECIPE=dp_resnet50` measures it against DistributedDataParallel. Use it for a quick try on one
machine, and ddp_launch for long runs. With fewer than two GPUs it replicates nothing.

    make run RECIPE=dp_resnet50                                      all visible GPUs, or the CPU
    make run RECIPE=dp_resnet50 ARGS="--device-ids 0 1"              a subset
    make image-run RECIPE=dp_resnet50                                the same in the image
    srun --ntasks 1 --gpus 4 python -m recipes dp_resnet50           one Slurm task with all GPUs

The default takes about 100 s on 2 CPU cores and reaches a validation accuracy of 0.96.

Source: PyTorch, "torch.nn.DataParallel"; linear scaling and warm-up: Goyal et al. 2017
(arXiv 1706.02677), section 2.
"""

import copy
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
from common.errors import InputError
from common.group.devices import choose_devices
from common.launch.ranks import Ranks
from common.run import Loop, RunOptions, make_loaders, make_model, make_plan, start
from common.training import (
    Default,
    ModelOptions,
    OptimizerOptions,
    build_model,
    evaluate,
    make_optimizer,
    set_lr,
    warm_up,
)
from recipes.dp_resnet50.report import show_inference

NAME = "dp_resnet50"


@dataclass(frozen=True)
class ParallelOptions:
    """Which devices share the work."""

    device_ids: tuple[int, ...] | None = None
    """GPUs to use, the leading one first; CUDA_VISIBLE_DEVICES renumbers them. None: all."""


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: RunOptions = field(default_factory=partial(RunOptions, cpu_threads=2))
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(
        default_factory=partial(ModelOptions, model="resnet50", zero_init_residual=True)
    )
    optimizer: OptimizerOptions = field(
        default_factory=partial(
            OptimizerOptions, epochs=12, lr=Default(0.05), warmup_epochs=1.0, weight_decay=5e-4
        )
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


class Autocast(nn.Module):
    """A model that enters autocast in its own forward.

    DataParallel's threads inherit that autocast is on, but not its dtype: they would compute in
    fp16 and not in bf16 (torch 2.15, parallel_apply).
    """

    def __init__(self, model: nn.Module, autocast: torch.autocast) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the model."""
        with copy.copy(self.autocast):  # one per thread, because it stores the previous state
            logits: Tensor = self.model(images)
        return logits


def train(config: Config, ranks: Ranks) -> None:
    """Train in this one process; the run's folder is `config.run.output_dir`."""
    options, seed = config.optimizer, config.run.seed

    # seed, devices, process group, folder
    choose = partial(choose_devices, config.parallel.device_ids, config.run.device)
    with start(NAME, config, ranks, choose) as run:
        devices, autocast, scaler = run.devices, run.autocast, run.scaler
        if len(devices) < 2:
            log.info(
                f"nn.DataParallel replicates nothing with fewer than 2 GPUs: {run.device} alone"
            )

        # data
        data = load_data(config.data, seed, ranks)
        plan = make_plan(options, len(data.train), 1, devices=len(devices))
        if len(devices) > 1 and config.model.dropout:
            raise InputError(
                "--dropout: a snapshot holds one GPU's random state only: use ddp_launch"
            )
        if len(devices) > 1 and config.model.compile:
            raise InputError("--compile cannot compile DataParallel's copies: use ddp_launch")
        loader, val_loader = make_loaders(run, config.data, data, plan)

        # model
        model = make_model(run, config.model, data, download=config.data.download)

        # parallelise
        # Each forward copies the model to all GPUs and scatters the batch over them. Outputs and
        # gradients come back to the first GPU. BatchNorm sees each GPU's slice.
        parallel: Any = torch.compile(model) if config.model.compile else model
        if len(devices) > 1:
            parallel = nn.DataParallel(Autocast(model, autocast), [d.index for d in devices])

        # optimizer
        optimizer = make_optimizer(model.parameters(), options, scaled=scaler.is_enabled())

        # resume
        loop = Loop(run, plan, data)
        if not loop.resume(model=model, optimizer=optimizer, scaler=scaler):
            return
        image, _ = data.train[(0, 0)]
        warm_up(parallel, loader.prepare(image), plan.global_batch_size, autocast)

        # loop
        for _ in loop.epochs():
            for images, labels in loop.steps(loader):
                set_lr(optimizer, loop.lr)
                with autocast:
                    loss = cross_entropy(parallel(images), labels)
                scaler.scale(loss).backward()
                if options.clip_grad_norm:
                    scaler.unscale_(optimizer)  # the norm is that of the true gradients
                    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(model, val_loader, len(data.val))
            loop.after_epoch(result, model.state_dict)

        # report
        # The names in `model` have no `module.` prefix, so that the weights load anywhere.
        loop.finish(model.state_dict())
        images, _ = next(iter(val_loader))
        plain = build_model(config.model, *data.sizes_for_model)
        show_inference(plain, model, images, run.folder / "model.pt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    cli.end_process(main())
