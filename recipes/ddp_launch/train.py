"""DistributedDataParallel: one process per device, started by a launcher.

Every rank holds a copy of the model and takes its slice of each global batch. Gradients are
averaged while the backward pass runs, so all copies take the same step. Use it whenever the model
fits on one device, on one host or on several. If the model does not fit, split it instead.

    make run RECIPE=ddp_launch                                 one machine, GPUs or CPUs
    torchrun --nproc-per-node 2 -m recipes.ddp_launch.train    the same, started by torchrun
    srun python -m recipes ddp_launch                          one Slurm task per device

The default takes about 10 s on 2 CPU cores and reaches a validation accuracy of 0.98.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common import cli
from common.data.datasets import DataOptions, load_data
from common.data.loaders import make_loaders
from common.group.devices import choose_device
from common.group.process_group import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.replicas import audit
from common.run.announce import announce
from common.run.folder import Run
from common.run.loop import Loop
from common.run.options import RunOptions
from common.seeds import mixed_precision, seed_everything, set_determinism
from common.snapshots.state import Stateful
from common.terminal import set_up_logs
from common.training.ddp import (
    ParallelOptions,
    micro_batches,
    set_comm_hook,
    synchronize_batch_norm,
    warm_up,
)
from common.training.evaluate import evaluate
from common.training.models import ModelOptions, move, prepare_model, set_train_mode
from common.training.optimizer import OptimizerOptions, make_optimizer, set_lr
from common.training.virtual_ranks import seed_shards, use_virtual_ranks

NAME = "ddp_launch"


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: RunOptions = field(default_factory=RunOptions)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, parallel, seed = config.optimizer, config.parallel, config.run.seed
    set_up_logs(ranks)

    # seed
    set_determinism(**config.run.determinism)
    seed_everything(seed)  # the same initial weights on every rank
    device = choose_device(config.run.device, ranks)
    announce(NAME, config.run, ranks, device)
    dtype, autocast, scaler = mixed_precision(config.run.precision, device)
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        run = Run(NAME, config, ranks, device)

        # data
        data = load_data(config.data, seed, ranks)
        options, batch_size = options.fit(
            len(data.train), ranks.world_size, parallel.parts_per_rank(ranks.world_size)
        )
        batches, loader, val_loader = make_loaders(
            data, config.data, batch_size, seed, ranks, device, dtype, run.folder
        )
        run.resolve(num_workers=loader.num_workers)
        micro_batch_size = parallel.micro_batch_size(batches.batch_size_per_rank)

        # model
        model = prepare_model(config.model, *data.sizes_for_model, download=config.data.download)
        run.resolve(**config.model.resolved(data.side))
        move(model, device, dtype)

        # parallelise
        if parallel.sync_bn:
            model = synchronize_batch_norm(model, device)
        # Sends rank 0's weights to all ranks, and averages gradients while backward() runs.
        ddp = DistributedDataParallel(
            torch.compile(model) if config.model.compile else model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # saves one copy of the gradients
        )
        set_comm_hook(ddp, parallel)
        if parallel.virtual_ranks:  # the same bits on any number of processes
            use_virtual_ranks(
                ddp, parallel.virtual_ranks, batch_size, config.run.timeout_s, parallel.audit
            )

        # optimizer
        optimizer = make_optimizer(model.parameters(), options, scaled=scaler.is_enabled())

        # resume
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        loop = Loop(run, parts, options, batches, data, check_replicas=parallel.check_replicas)
        if not loop.resume():
            return
        set_train_mode(model)
        # A resumed run must add gradients in the same order as an uninterrupted run.
        inputs, *_ = data.train[(0, 0)]
        warm_up(ddp, loader.prepare(inputs), micro_batch_size, autocast)

        # loop
        loop.compute.follow(ddp)  # finds a rank that is slower than the others
        for epoch in loop.epochs():
            batches.set_epoch(epoch, loop.state.batch, loop.steps_left)
            for batch in loader:
                set_lr(optimizer, loop.lr)
                if parallel.virtual_ranks:
                    seed_shards(ddp, seed, loop.state.step)
                losses = []
                for images, labels in micro_batches(ddp, batch, parallel.accumulate):
                    with autocast:
                        losses.append(cross_entropy(ddp(images), labels, reduction="none"))
                    scaler.scale(losses[-1].sum() / batches.batch_size_per_rank).backward()
                if parallel.audit:
                    loop.stop_if_corrupt(audit(ddp.module, autocast))
                if options.clip_grad_norm:
                    scaler.unscale_(optimizer)  # the norm is that of the true gradients
                    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(torch.cat(losses))
            loop.save()  # before the evaluation, which may take long
            # The model inside, because ddp's forward would wait for the other ranks.
            result = evaluate(model, val_loader, len(data.val))
            loop.after_epoch(result, model.state_dict)

        # report
        loop.finish(model.state_dict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    end_process(main())
