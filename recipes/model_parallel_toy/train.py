"""Model parallelism: the layers of one model on several devices, then pipelined.

`split` puts the first layers on one device and the rest on the next: a model that is too large for
one device fits, but only one device works at a time. `micro` cuts the batch into micro-batches, so
that GPUs overlap. `gpipe` and `1f1b` run one process per stage (torch.distributed.pipelining; GPUs
or CPUs, one host or several). `--data-parallel N` runs N copies of the model, whose gradients DDP
averages. Use it when a model does not fit on one device. If it fits, ddp_launch is simpler and
faster.

    make run RECIPE=model_parallel_toy                                           split, one process
    make run RECIPE=model_parallel_toy ARGS="--schedule micro --data-parallel 2" 2 processes
    make run RECIPE=model_parallel_toy ARGS="--schedule 1f1b --data-parallel 2"  4 processes
    make image-run RECIPE=model_parallel_toy ARGS="--schedule gpipe"             in the image
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
from typing import Any

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


import torch

from common import cli
from common.data.datasets import DataOptions, load_data
from common.group.devices import choose_device
from common.launch.ranks import Ranks
from common.run import Loop, RunOptions, make_loaders, make_plan, start
from common.training import OptimizerOptions, evaluate, make_optimizer, set_lr
from recipes.model_parallel_toy.split import (
    LAYERS,
    ParallelOptions,
    Split,
    StageState,
    WholeModelOptions,
    build,
    clip_gradients,
    cut,
    devices_of_copy,
    generated_points,
)

NAME = "model_parallel_toy"


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: RunOptions = field(default_factory=partial(RunOptions, precision="fp32"))
    data: DataOptions = field(default_factory=DataOptions)
    model: WholeModelOptions = field(default_factory=WholeModelOptions)
    optimizer: OptimizerOptions = field(
        default_factory=partial(OptimizerOptions, epochs=20, weight_decay=0.0)
    )
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        if self.run.precision not in ("fp32", "fp64"):
            raise ValueError(f"{NAME} computes in --precision fp32 or fp64")
        if self.model.model == "toy" and self.data != DataOptions():
            raise ValueError("--model toy trains on generated points: leave out the data options")
        if self.parallel.stages > (layers := LAYERS[self.model.model]):
            raise ValueError(
                f"--stages {self.parallel.stages} is more than the {layers} layers of --model "
                f"{self.model.model}"
            )


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, parallel, seed = config.optimizer, config.parallel, config.run.seed

    # seed, devices, process group, folder
    devices: list[torch.device] = []  # of the stages in this process

    def choose() -> list[torch.device]:
        if parallel.in_processes:
            return [choose_device(config.run.device, ranks)]
        devices.extend(devices_of_copy(parallel, config.run.device, ranks))
        return [devices[-1], *devices]  # the loss is on the last

    one_device = parallel.in_processes or parallel.stages < 2
    with start(NAME, config, ranks, choose, one_device=one_device) as run:
        device = run.device
        replicas = parallel.data_parallel
        mesh, replica, data_group, stage_group = None, ranks.rank, None, None
        if parallel.in_processes:
            from recipes.model_parallel_toy.pipeline import Pipeline, make_mesh

            mesh = make_mesh(device, replicas, parallel.stages)
            replica = mesh.get_local_rank("data")
            data_group, stage_group = mesh.get_group("data"), mesh.get_group("stage")

        # data
        toy = config.model.model == "toy"
        data = generated_points(seed) if toy else load_data(config.data, seed, ranks)
        plan = make_plan(
            options,
            len(data.train),
            replicas,
            micro_batches=parallel.micro_batch_count,
            cut_by="--micro-batches",
        )
        first = (devices or [device])[0]
        loader, val_loader = make_loaders(  # all stages load the same
            run, config.data, data, plan, share=replica, device=first
        )
        run.resolve(schedule=parallel.order, micro_batches=parallel.micro_batch_count)

        # model
        model = build(config.model, data).to(run.dtype)

        # parallelise
        sample = loader.prepare(data.val[(0, 0)][0]).cpu()
        stages = cut(model, parallel.stages, sample[None])
        pipe: Any
        if mesh is not None:
            pipe = Pipeline(stages, parallel.order, parallel.micro_batch_count, device, mesh)
        else:
            pipe = Split(stages, devices, parallel.micro_batch_count, replicas)

        # optimizer
        state = StageState(model)
        optimizer = make_optimizer(model.parameters(), options)

        # resume
        loop = Loop(run, plan, data, mesh=mesh)
        if not loop.resume(model=state, optimizer=optimizer):
            return
        pipe.train()
        pipe.warm_up(sample, plan.sizes[replica])

        # loop
        for _ in loop.epochs():
            for inputs, labels in loop.steps(loader):
                set_lr(optimizer, loop.lr)
                if parallel.in_processes and loop.state.step == loop.last_step - 1:
                    pipe.note_work(parallel.timeline)
                loss = pipe.backward(inputs, labels)
                if options.clip_grad_norm:
                    clip_gradients(model, options.clip_grad_norm, stage_group)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(pipe, val_loader, len(data.val), data_group)
            loop.after_epoch(result, state.full_state_dict)

        # report
        loop.finish(state.full_state_dict())
        if parallel.in_processes:
            pipe.save_timeline(run.folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments, processes=lambda c: c.parallel.processes)


if __name__ == "__main__":
    cli.end_process(main())
