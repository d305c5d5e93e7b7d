"""DistributedDataParallel: one process per device, started by torch.multiprocessing.

The same training as ddp_launch (`make diff-ddp` shows the difference), but the recipe starts its
ranks itself, so no launcher is needed. Use it on one machine; use ddp_launch for several hosts.
Under torchrun, srun or mpirun it starts no processes: each process is already a rank.

    make run RECIPE=ddp_spawn                                  one machine, GPUs or CPUs
    srun python -m recipes ddp_spawn                           one Slurm task per device

The default takes about 10 s on 2 CPU cores and reaches a validation accuracy of 0.98.

Source: PyTorch, "Multiprocessing package - torch.multiprocessing", Spawning subprocesses.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from common import cli
from common.data.datasets import DataOptions, load_data
from common.launch.port import listen
from common.launch.process import end_process, run_rank
from common.launch.ranks import Ranks
from common.launch.start import Child, interrupts_held, prepare_launch, supervise
from common.run import (
    Loop,
    MicroBatches,
    RunOptions,
    make_loaders,
    make_model,
    make_plan,
    start,
)
from common.training import (
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    cross_entropy_of_samples,
    evaluate,
    make_optimizer,
    set_lr,
    synchronize_batch_norm,
)

NAME = "ddp_spawn"


@dataclass(frozen=True)
class Config:
    """All options, in groups that mean the same in every recipe."""

    run: RunOptions = field(default_factory=RunOptions)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, parallel = config.optimizer, config.parallel

    # seed, devices, process group, folder
    with start(NAME, config, ranks) as run:
        device, scaler = run.device, run.scaler

        # data
        data = load_data(config.data, config.run.seed, ranks)
        plan = make_plan(
            options,
            len(data.train),
            ranks.world_size,
            virtual_ranks=parallel.virtual_ranks,
            micro_batches=parallel.accumulate,
        )
        loader, val_loader = make_loaders(run, config.data, data, plan)

        # model
        model = make_model(run, config.model, data, download=config.data.download)
        loss_function = cross_entropy_of_samples(config.loss, data).to(device, run.dtype)

        # parallelise
        model = synchronize_batch_norm(model, device) if parallel.sync_bn else model
        # Sends rank 0's weights to all ranks, and averages gradients while backward() runs.
        ddp = DistributedDataParallel(
            torch.compile(model) if config.model.compile else model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # saves one copy of the gradients
        )

        # optimizer
        optimizer = make_optimizer(model.parameters(), options, scaled=scaler.is_enabled())

        # resume
        loop = Loop(run, plan, data)
        micro_batches = MicroBatches(ddp, parallel, loop)
        if not loop.resume(model=model, optimizer=optimizer, scaler=scaler):
            return  # the run is finished already
        # DDP reorders its sums after one backward pass: do one now, else a resume changes the bits.
        micro_batches.warm_up(loader.prepare(data.train[(0, 0)][0]))  # epoch 0, sample 0: its image

        # loop
        for _ in loop.epochs(ddp):  # times ddp's steps, to find a slow rank
            for batch in loop.steps(loader):  # those of the epoch that are still to do
                set_lr(optimizer, loop.lr)
                losses = []
                for images, labels in micro_batches.of(batch):  # DDP sends with the last one
                    with run.autocast:
                        losses.append(loss_function(ddp(images), labels))
                    loss = losses[-1].sum() / plan.loss_divisor  # DDP averages to the batch mean
                    scaler.scale(loss).backward()
                if options.clip_grad_norm:
                    scaler.unscale_(optimizer)  # the norm is that of the true gradients
                    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(torch.cat(losses))  # logs, saves, stops on a signal
            loop.save()  # before the evaluation, which may take long
            # Not ddp: it would wait for the other ranks, which may have fewer batches.
            result = evaluate(model, val_loader, len(data.val))
            loop.after_epoch(result, model.state_dict)  # keeps the weights if they are the best

        # report
        loop.finish(model.state_dict())


def worker(local_rank: int, config: Config, nproc: int, store: socket) -> None:
    """Run one rank, in a process that `spawn` started."""
    address, port = store.getsockname()
    if local_rank != 0:
        store.close()
    ranks = Ranks(
        local_rank,
        local_rank,
        nproc,
        nproc,
        "spawn",
        address,
        port,
        listen_fd=store.fileno() if local_rank == 0 else None,
    )
    end_process(run_rank(lambda: train(config, ranks), ranks))


def spawn(config: Config, nproc: int, port: int) -> int:
    """Start `nproc` ranks on this machine and wait for them; returns the exit status."""
    with listen("127.0.0.1", port) as store:
        prepare_launch()
        with interrupts_held():
            context = start_processes(
                worker, (config, nproc, store), nprocs=nproc, join=False, start_method="spawn"
            )
    processes = enumerate(context.processes)
    return supervise([Child(r, p.pid, partial(getattr, p, "exitcode")) for r, p in processes])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments, spawn)


if __name__ == "__main__":
    end_process(main())
