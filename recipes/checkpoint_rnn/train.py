"""Activation checkpointing over time: a recurrent network on sequences too long for memory.

Training keeps the results of every time step until the backward pass. `--segments N` cuts the
sequence into N segments and keeps only the state between them; the backward pass recomputes each
segment when it needs it. Memory is smallest if N is near the square root of the length, and the
price is at most one more forward pass. `--segments auto` measures, and takes the fastest number
within `--memory-budget`. Use it when activations do not fit; it does not help when the weights and
the optimizer state are too large.

    make run RECIPE=checkpoint_rnn                                      plain
    make run RECIPE=checkpoint_rnn ARGS="--length 8192 --segments auto --memory-budget 100000000"
    make image-run RECIPE=checkpoint_rnn ARGS="--segments 20"           in the image
    srun -n 1 python -m recipes checkpoint_rnn --segments 20            one Slurm task

The default learns the adding problem at length 400 in about 20 s on 2 CPU cores: mean squared error
below 0.02 (a model that predicts the mean has 1/6).

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); the
adding problem, Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", section 5.4; gate biases by
the length, Tallec & Ollivier 2018 (arXiv 1804.11188), section 2.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from common import cli, log
from common.data.batches import DeviceBatches
from common.data.loaders import make_loader
from common.data.stream import FixedBatches, GlobalBatches
from common.launch.ranks import Ranks
from common.option_rules import may_change, refuse_below
from common.run import Loop, RunOptions, make_plan, start
from common.training import Default, ScheduleOptions, evaluate, set_lr
from recipes.checkpoint_rnn.adding import (
    AddingRNN,
    RecurrentOptions,
    SequenceOptions,
    make_data,
    score,
    train_step,
)
from recipes.checkpoint_rnn.memory import PeakMemory
from recipes.checkpoint_rnn.plan import choose_segments

NAME = "checkpoint_rnn"


@dataclass(frozen=True)
class CheckpointOptions:
    """Which activations are kept for the backward pass."""

    segments: int | Literal["auto"] = 1
    """Segments of the sequence; 1 keeps everything. auto: the fastest within --memory-budget."""
    memory_budget: int | None = may_change(None)
    """For auto: memory for training, above what the process holds before it [bytes]."""


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    run: RunOptions = field(default_factory=partial(RunOptions, precision="fp32"))
    sequence: SequenceOptions = field(default_factory=SequenceOptions)
    network: RecurrentOptions = field(default_factory=RecurrentOptions)
    optimizer: ScheduleOptions = field(
        default_factory=partial(ScheduleOptions, epochs=20, lr=Default(0.02))
    )
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)

    def __post_init__(self) -> None:
        segments, budget = self.checkpoint.segments, self.checkpoint.memory_budget
        least = {**dict.fromkeys(asdict(self.sequence), 1), "length": 4, "input_size": 2}
        refuse_below(self.sequence, **least)
        refuse_below(self.network, hidden_size=1, layers=1)
        refuse_below(self.checkpoint, memory_budget=1)
        if segments != "auto":
            refuse_below(self.checkpoint, segments=1)
        if segments != "auto" and segments > self.sequence.length:
            raise ValueError(
                f"--segments {segments} is more than the {self.sequence.length} time steps"
            )
        if (segments == "auto") != (budget is not None):
            raise ValueError("--segments auto and --memory-budget BYTES belong together")
        if not 0 <= self.network.dropout < 1 or (self.network.dropout and self.network.layers < 2):
            raise ValueError("--dropout needs --layers 2 or more, and must be from 0 to below 1")
        if self.run.precision not in ("fp32", "fp64"):
            raise ValueError(f"{NAME} computes in --precision fp32 or fp64")


def train(config: Config, ranks: Ranks) -> None:
    """Train in this one process; the run's folder is `config.run.output_dir`."""
    options, seed = config.optimizer, config.run.seed

    # seed, device, process group, folder
    with start(NAME, config, ranks) as run:
        device, dtype = run.device, run.dtype

        # data
        data = make_data(config.sequence, seed)
        plan = make_plan(config.optimizer, len(data.train), 1)
        options, batch_size = plan.options, plan.global_batch_size
        batches = GlobalBatches(len(data.train), plan.sizes, seed, 0)
        held_out = FixedBatches(len(data.val), batch_size, 0, 1)
        loader = DeviceBatches(make_loader(data.train, batches), device, dtype)
        loader.on_batch = run.clock.end_load  # what came before it was waiting for data
        val_loader = DeviceBatches(make_loader(data.val, held_out), device, dtype)

        # model
        model = AddingRNN(config.network, config.sequence).to(device, dtype)

        # (nothing to parallelise) which activations to keep
        segments, budget = config.checkpoint.segments, config.checkpoint.memory_budget
        if segments == "auto":
            assert budget is not None  # see Config
            segments = choose_segments(
                config.sequence, config.network, config.run, batch_size, budget, device, run.folder
            )
            run.resolve(segments=segments)

        # optimizer
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, fused=True)

        # resume
        loop = Loop(run, plan, data)
        if not loop.resume(model=model, optimizer=optimizer):
            return
        model.train()

        # loop
        memory = PeakMemory(device)
        for _ in loop.epochs():
            for sequences in loop.steps(loader):
                set_lr(optimizer, loop.lr)
                loss = train_step(model, optimizer, sequences, segments)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(model, val_loader, len(data.val), score=score)
            loop.after_epoch(result, model.state_dict)

        # report
        used = memory.above_start()
        loop.finish(model.state_dict(), segments=segments, training_memory_bytes=used)
        if budget is not None and used > budget:
            log.warning(f"training used {used:,} bytes, more than --memory-budget {budget}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    cli.end_process(main())
