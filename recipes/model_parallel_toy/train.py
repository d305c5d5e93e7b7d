"""Model parallelism: the layers of one model on several devices, then pipelined.

`split` puts the first layers on one device and the rest on the next: a model too large for one
device fits, but one device works while the other waits. `micro` cuts the batch into micro-batches,
so that GPUs overlap. `gpipe` and `1f1b` do it with one process per stage
(torch.distributed.pipelining; GPUs or CPUs, one host or several), and with `--data-parallel N` in N
copies of the pipeline. Use it when a model does not fit on one device; where it fits, ddp_launch is
simpler and faster.

    make run RECIPE=model_parallel_toy                                           split, one process
    make run RECIPE=model_parallel_toy ARGS="--schedule 1f1b --data-parallel 2"  4 processes
    docker run --gpus all IMAGE model_parallel_toy --schedule gpipe              in the image
    srun -n 2 python -m recipes model_parallel_toy --schedule gpipe              one task per stage

The default takes about 3 s on 2 CPU cores and reaches a validation accuracy of 0.96 on generated
points; `--model resnet50` trains on images (--data).

Sources: PyTorch, "Pipeline Parallelism"; GPipe, Huang et al. 2018 (arXiv 1811.06965), section 2.3;
1F1B, Narayanan et al. 2019, "PipeDream" (SOSP), section 3.2.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from common import cli
from common.data.datasets import Data, DataOptions, load_data
from common.data.loaders import make_loaders
from common.errors import InputError
from common.group.devices import choose_device, choose_devices
from common.group.rendezvous import gloo_does_not_disturb, process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.options import free
from common.run.folder import Run
from common.run.logs import announce, log, set_up_logs
from common.run.loop import Loop
from common.run.options import RunOptions
from common.run.snapshot import Stateful
from common.seeds import seed_everything, set_determinism
from common.training.ddp import warm_up
from common.training.evaluate import evaluate
from common.training.models import ModelOptions, build_model
from common.training.optimizer import OptimizerOptions, make_sgd, set_lr
from recipes.model_parallel_toy.split import Split, StageState, cut, generated_points

NAME = "model_parallel_toy"


@dataclass(frozen=True)
class ParallelOptions:
    """What is split, where it is cut, and in which order the pieces work."""

    model: Literal["toy", "resnet50"] = "toy"
    """toy: 10 inputs, a hidden layer of 10, 5 classes, on generated points."""
    norm: Literal["group", "batch"] = "group"
    """Normalisation of resnet50. batch sees one micro-batch at a time, so the number of
    micro-batches then changes the result."""
    schedule: Literal["split", "micro", "gpipe", "1f1b"] = "split"
    """split and micro: one process over several devices; gpipe and 1f1b: one process per stage."""
    stages: int = 2
    """Pieces of the model, cut where their floating-point operations are balanced."""
    micro_batches: int | None = None
    """Pieces of each batch. None: 1 for split, else 4."""
    data_parallel: int = 1
    """Copies of the pipeline, each with its share of the batch (gpipe and 1f1b)."""
    devices: tuple[str, ...] | None = None
    """One device per stage for split and micro, such as `cuda:0 cuda:1` or `cpu cpu`. None: all
    GPUs in turn, or the CPU."""
    timeline: bool = free(True)
    """gpipe and 1f1b: record the last step, for timeline.json and timeline.png."""

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        pieces = self.micro_batches
        if min(self.stages, self.data_parallel, pieces or 1) < 1:
            raise ValueError("--stages, --micro-batches and --data-parallel must be at least 1")
        if self.schedule == "split" and self.micro_batch_count > 1:
            raise ValueError("--schedule split has no micro-batches: --schedule micro has")
        if self.in_processes and self.stages < 2:
            raise ValueError(f"--schedule {self.schedule} needs --stages 2 or more")
        if self.schedule == "1f1b" and 1 < self.micro_batch_count < self.stages:
            raise ValueError("--schedule 1f1b needs at least as many --micro-batches as --stages")
        if self.devices and self.in_processes:
            raise ValueError(
                "--devices is for split and micro: each process of gpipe and 1f1b "
                "has its own, by --device"
            )
        if self.devices is not None and len(self.devices) != self.stages:
            raise ValueError(
                f"{len(self.devices)} --devices for {self.stages} --stages: name one per stage"
            )
        if self.data_parallel > 1 and not self.in_processes:
            raise ValueError("--data-parallel needs --schedule gpipe or 1f1b")

    @property
    def in_processes(self) -> bool:
        """Whether each stage is a process."""
        return self.schedule in ("gpipe", "1f1b")

    @property
    def micro_batch_count(self) -> int:
        """Micro-batches a batch."""
        return self.micro_batches or (1 if self.schedule == "split" else 4)

    @property
    def processes(self) -> int:
        """Ranks in all."""
        return self.stages * self.data_parallel if self.in_processes else 1


@dataclass(frozen=True)
class Config:
    """All options; those of a group mean the same in every recipe."""

    run: RunOptions = field(default_factory=RunOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(
        default_factory=partial(OptimizerOptions, epochs=20, weight_decay=0.0)
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        """Refuse what the pieces cannot do."""
        if self.run.precision in ("bf16", "fp16"):
            raise ValueError(f"{NAME} computes in --precision fp32 or fp64")
        if self.parallel.model == "toy" and self.data != DataOptions():
            raise ValueError("--model toy trains on generated points: its data has no options")


def build(options: ParallelOptions, data: Data) -> nn.Module:
    """The whole model."""
    if options.model == "toy":
        return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    model = ModelOptions(model="resnet50", norm=options.norm)
    return build_model(model, data.channels, len(data.class_names), data.side)


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, parallel, seed = config.optimizer, config.parallel, config.run.seed
    set_up_logs(ranks)

    # seed
    set_determinism(**config.run.determinism)
    seed_everything(seed)  # the same initial weights on every rank
    if parallel.in_processes:
        devices, device = [], choose_device(config.run.device, ranks)
    else:
        devices = choose_devices(parallel.devices, config.run.device, stages=parallel.stages)
        device = devices[-1]
    announce(NAME, config.run, ranks, device)
    if parallel.in_processes and device.type == "cuda" and config.run.backend == "gloo":
        raise InputError(
            "stages on GPUs talk by NCCL, which needs one GPU per stage: leave "
            "--backend gloo out, or give --device cpu"
        )
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        run = Run(NAME, config, config.run, ranks, device, *devices)
        replicas = parallel.data_parallel
        mesh, replica, data_group = None, 0, None
        if parallel.in_processes:  # ranks 0 to stages - 1 are the first pipeline
            with gloo_does_not_disturb(dist.get_backend()):
                mesh = init_device_mesh(
                    device.type, (replicas, parallel.stages), mesh_dim_names=("data", "stage")
                )
            replica, data_group = mesh.get_local_rank("data"), mesh.get_group("data")

        # data
        toy = parallel.model == "toy"
        data = generated_points(seed) if toy else load_data(config.data, seed, ranks)
        batch_size = options.total_batch_size(replicas)
        if batch_size % (replicas * parallel.micro_batch_count):
            raise InputError(
                f"--global-batch-size {batch_size} is not divided by {replicas} "
                f"pipelines x {parallel.micro_batch_count} micro-batches"
            )
        share = Ranks(replica, replica, replicas, replicas)
        batches, loader, val_loader = make_loaders(  # all stages of a pipeline load the same
            data, config.data, batch_size, seed, share, (devices or [device])[0], dtype, run.folder
        )
        run.resolve(num_workers=loader.num_workers)

        # model
        model = build(parallel, data).to(dtype)

        # parallelise
        sample = loader.prepare(data.val[(0, 0)][0]).cpu()
        stages = cut(model, parallel.stages, sample[None])
        pipe: Any
        if mesh is not None:
            from recipes.model_parallel_toy.pipeline import Pipeline

            pipe = Pipeline(stages, parallel.schedule, parallel.micro_batch_count, device, mesh)
        else:
            pipe = Split(stages, devices, parallel.micro_batch_count)
            log.info(f"stages on {', '.join(map(str, devices))}")

        # optimizer
        state = StageState(model)
        optimizer = make_sgd(model.parameters(), options)

        # resume
        parts: dict[str, Stateful] = {"model": state, "optimizer": optimizer}
        loop = Loop(run, parts, options, batches, data, sharded=True)
        if not loop.resume():
            return
        pipe.train()
        if mesh is None:
            warm_up(pipe, sample, batch_size)
        else:
            pipe.warm_up(sample, batch_size // replicas)

        # loop
        for epoch in loop.epochs():
            batches.set_epoch(epoch, loop.state.batch, loop.steps_left)
            for inputs, labels in loader:
                set_lr(optimizer, loop.lr)
                if parallel.in_processes and loop.state.step == loop.last_step - 1:
                    pipe.note_work(parallel.timeline)
                loss = pipe.backward(inputs, labels)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(pipe, val_loader, len(data.val), device, data_group)
            loop.after_epoch(result, state.full_state_dict() if config.run.epoch_weights else {})

        # report
        loop.finish(state.full_state_dict())
        if parallel.in_processes:
            pipe.save_timeline(run.folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments, processes=lambda c: c.parallel.processes)


if __name__ == "__main__":
    end_process(main())
