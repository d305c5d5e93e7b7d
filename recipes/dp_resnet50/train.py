"""DataParallel: one process copies the model to every GPU anew in each step.

The batch is split over the GPUs, each computes on its copy, and GPU 0 gathers the outputs and the
gradients and takes the step: the first way to use several GPUs that people meet, here to be
measured against the better one (`--compare`). Use it for a quick try on one machine; for
anything that runs for long use ddp_launch. With fewer than two GPUs it replicates nothing.

    make run RECIPE=dp_resnet50                                      all visible GPUs, or the CPU
    make run RECIPE=dp_resnet50 ARGS="--device-ids 0 1"              a subset
    docker run --gpus all IMAGE dp_resnet50                          the same in the image
    srun --ntasks 1 --gpus 4 python -m recipes dp_resnet50           one Slurm task with all GPUs

The default takes about 60 s on 2 CPU cores and reaches a validation accuracy of 0.96.

Source: PyTorch, "torch.nn.DataParallel"; linear scaling and warm-up: Goyal et al. 2017
(arXiv 1706.02677), section 2.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from common import cli
from common.data.datasets import Data, DataOptions, load_data
from common.data.loaders import make_loaders
from common.errors import InputError, multiples_near
from common.files import mebibytes
from common.group.devices import choose_devices
from common.group.rendezvous import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.measure import Utilization, peak_memory_bytes
from common.run.folder import Run
from common.run.logs import announce, log, set_up_logs
from common.run.loop import Loop
from common.run.options import RunOptions
from common.run.snapshot import Stateful
from common.seeds import mixed_precision, seed_everything, set_determinism
from common.training.ddp import warm_up
from common.training.evaluate import evaluate
from common.training.models import (
    ModelOptions,
    build_model,
    prepare_model,
    set_train_mode,
    trained_as,
)
from common.training.optimizer import OptimizerOptions, make_sgd, set_lr

NAME = "dp_resnet50"


@dataclass(frozen=True)
class ParallelOptions:
    """Which devices share the work."""

    device_ids: tuple[int, ...] | None = None
    """GPUs to use, the first one leads; CUDA_VISIBLE_DEVICES hides and numbers them. None: all."""


@dataclass(frozen=True)
class Config:
    """All options; those of a group mean the same in every recipe."""

    run: RunOptions = field(default_factory=partial(RunOptions, cpu_threads=2))
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(
        default_factory=partial(ModelOptions, model="resnet50", zero_init_residual=True)
    )
    optimizer: OptimizerOptions = field(
        default_factory=partial(
            OptimizerOptions, epochs=12, lr=0.05, warmup_epochs=1.0, weight_decay=5e-4
        )
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


def show_inference(
    config: Config, data: Data, images: Tensor, path: Path, model: nn.Module
) -> None:
    """What the saved weights are for: a plain model on a CPU that predicts like the trained one."""
    plain = build_model(config.model, data.channels, len(data.class_names), data.side)
    plain.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    with torch.inference_mode():
        ours = plain.eval()(images.cpu().float()).argmax(1)
        theirs = model.eval()(images).argmax(1).cpu()
    same = int((ours == theirs).sum())
    log.info(f"{path.name} in a plain model on a CPU: {same} of {len(ours)} predictions the same")


class Autocast(nn.Module):
    """A model that enters autocast by itself.

    DataParallel's threads know that it is on but not for which type, and would take fp16 for bf16
    (torch 2.15, parallel_apply).
    """

    def __init__(self, model: nn.Module, autocast: torch.autocast) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the model."""
        with copy.copy(self.autocast):  # which keeps what it found: a copy for each thread
            logits: Tensor = self.model(images)
        return logits


def train(config: Config, ranks: Ranks) -> None:
    """Train in this one process; the run's folder is `config.run.output_dir`."""
    options, seed = config.optimizer, config.run.seed
    set_up_logs(ranks)

    # seed
    set_determinism(**config.run.determinism)
    seed_everything(seed)
    devices = choose_devices(config.parallel.device_ids, config.run.device)
    device = devices[0]
    announce(NAME, config.run, ranks, device)
    if len(devices) < 2:
        log.info(f"nn.DataParallel replicates nothing with fewer than 2 GPUs: {device} alone")
    dtype, autocast, scaler = mixed_precision(config.run.precision, device)
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        run = Run(NAME, config, config.run, ranks, *devices)

        # data
        data = load_data(config.data, seed, ranks)
        batch_size = options.total_batch_size(len(devices))
        if len(devices) > 1 and config.model.dropout:
            raise InputError(
                "--dropout draws from each GPU's generator, and snapshots hold the "
                "first one's: leave it out, or use ddp_launch"
            )
        if len(devices) > 1 and config.model.compile:
            raise InputError(
                "--compile: torch cannot compile what DataParallel copies anew in "
                "each step; use ddp_launch, or one device"
            )
        if batch_size % len(devices):
            raise InputError(
                f"--global-batch-size {batch_size} is not divided by the {len(devices)} devices, "
                f"some of which would idle: {multiples_near(batch_size, len(devices))} would be"
            )
        batches, loader, val_loader = make_loaders(
            data, config.data, batch_size, seed, ranks, device, dtype, run.folder
        )
        run.resolve(num_workers=loader.num_workers)

        # model
        model = prepare_model(config.model, *data.shape)
        model.to(device, dtype)

        # parallelise
        # Each forward copies the model to all GPUs and scatters the batch over them; the outputs
        # come back to the first one, and so do the gradients. BatchNorm looks at each GPU's slice.
        parallel = trained_as(config.model, model)
        if len(devices) > 1:
            parallel = nn.DataParallel(Autocast(model, autocast), [d.index for d in devices])

        # optimizer
        optimizer = make_sgd(model.parameters(), options, scaled=scaler.is_enabled())

        # resume
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        loop = Loop(run, parts, options, batches, data)
        if not loop.resume():
            return
        set_train_mode(model)
        image, _ = data.train[(0, 0)]
        warm_up(parallel, loader.prepare(image), batch_size, autocast)

        # loop
        utilization = Utilization(devices)
        for epoch in loop.epochs():
            batches.set_epoch(epoch, loop.state.batch, loop.steps_left)
            for images, labels in loader:
                set_lr(optimizer, loop.lr)
                with autocast:
                    loss = nn.functional.cross_entropy(parallel(images), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(model, val_loader, len(data.val), device)
            loop.after_epoch(result, model.state_dict())

        # report
        peaks, used = peak_memory_bytes(devices), utilization.stop()
        # `model` and not `parallel`: names without `module.`, so that it loads anywhere.
        loop.finish(model.state_dict(), gpu_utilization_percent=used)
        for gpu, peak, percent in zip(devices, peaks, used, strict=False):  # none on a CPU
            share = "not sampled" if percent is None else f"{percent:.0f} %"
            log.info(f"  {gpu}: peak memory {mebibytes(peak)}, utilisation {share}")
        images, _ = next(iter(val_loader))
        show_inference(config, data, images, run.folder / "model.pt", model)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    end_process(main())
