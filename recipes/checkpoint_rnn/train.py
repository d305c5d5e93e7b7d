"""Activation checkpointing over time: a recurrent network on sequences too long to remember.

Training keeps what every time step computed until the backward pass. `--segments N` cuts the
sequence into N pieces and keeps only the state between them; the backward pass computes each piece
anew when it comes to it. Memory falls with N until the kept states outweigh a piece (about the root
of the length), for at most one more forward pass. `--segments auto` measures and takes the fastest
number within `--memory-budget`. Use it when activations do not fit; where weights and optimizer
state are what is too large, it does not help.

    make run RECIPE=checkpoint_rnn                                      plain
    make run RECIPE=checkpoint_rnn ARGS="--length 8192 --segments auto --memory-budget 100000000"
    docker run --gpus all IMAGE checkpoint_rnn --segments 20            in the image
    srun -n 1 python -m recipes checkpoint_rnn --segments 20            one Slurm task

The default learns the adding problem at length 400 in about 20 s on 2 CPU cores: mean squared error
below 0.02, where predicting the mean gives 1/6.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); the
adding problem, Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", section 5.4; gate biases by
the length, Tallec & Ollivier 2018 (arXiv 1804.11188), section 2.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

if __package__ in (None, ""):  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from common import cli
from common.data.datasets import Data
from common.data.stream import GlobalBatches, Samples, fixed_batches, make_loader
from common.group.devices import choose_device
from common.group.meet import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.measure import PeakMemory
from common.run.folder import Run
from common.run.logs import announce, log, set_up_logs
from common.run.loop import Loop
from common.run.options import RunOptions
from common.run.snapshot import Stateful
from common.seeds import mix, seed_everything, set_determinism
from common.training.evaluate import Evaluation
from common.training.optimizer import OptimizerOptions, set_lr

NAME = "checkpoint_rnn"
LAUNCHED = "one"  # see common.cli


@dataclass(frozen=True)
class SequenceOptions:
    """The adding problem: the sum of the two marked numbers of a sequence."""

    length: int = 400
    """Length of a sequence [time steps]."""
    input_size: int = 2
    """Numbers a time step: the value, the mark, and noise in the others."""
    train_samples: int = 3200
    """Sequences an epoch [samples]; each epoch draws new ones."""
    val_samples: int = 512
    """Sequences to validate on [samples]."""


@dataclass(frozen=True)
class RecurrentOptions:
    """The network: LSTM layers, and one linear unit on the last state."""

    hidden_size: int = 32
    """Features of each layer's state."""
    layers: int = 1
    """LSTM layers."""
    dropout: float = 0.0
    """Share of features dropped between two layers."""


@dataclass(frozen=True)
class CheckpointOptions:
    """What is kept for the backward pass."""

    segments: int | Literal["auto"] = 1
    """Pieces of the sequence; 1 keeps everything. auto: the fastest within --memory-budget."""
    memory_budget: int | None = None
    """For auto: what training may use above what the process holds before it [bytes]."""


@dataclass(frozen=True)
class SmallBatchOptions(OptimizerOptions):
    """How long, with which batch and which steps."""

    default_batch_size: ClassVar[int] = 64


@dataclass(frozen=True)
class Config:
    """All options; those of a group mean the same in every recipe."""

    run: RunOptions = field(default_factory=RunOptions)
    sequence: SequenceOptions = field(default_factory=SequenceOptions)
    network: RecurrentOptions = field(default_factory=RecurrentOptions)
    optimizer: OptimizerOptions = field(
        default_factory=partial(SmallBatchOptions, epochs=20, lr=0.02, momentum=0, weight_decay=0)
    )
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        segments, budget = self.checkpoint.segments, self.checkpoint.memory_budget
        for name, value, minimum in (
            *((name, value, 1) for name, value in asdict(self.sequence).items()),
            ("length", self.sequence.length, 4),
            ("input_size", self.sequence.input_size, 2),
            ("hidden_size", self.network.hidden_size, 1),
            ("layers", self.network.layers, 1),
            ("memory_budget", 1 if budget is None else budget, 1),
            ("segments", 1 if segments == "auto" else segments, 1),
        ):
            if value < minimum:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}: {value}")
        if segments != "auto" and segments > self.sequence.length:
            raise ValueError(
                f"--segments {segments} is more than the {self.sequence.length} time steps"
            )
        if (segments == "auto") != (budget is not None):
            raise ValueError("--segments auto and --memory-budget BYTES belong together")
        if not 0 <= self.network.dropout < 1 or (self.network.dropout and self.network.layers < 2):
            raise ValueError("--dropout is a share, 0 to below 1, between 2 or more --layers")
        if self.optimizer.momentum or self.optimizer.weight_decay:
            raise ValueError(f"{NAME} trains with Adam: no --momentum, no --weight-decay")
        if self.run.precision in ("bf16", "fp16"):
            raise ValueError(f"{NAME} computes in --precision fp32 or fp64")


def draw_sequence(options: SequenceOptions, _source: object) -> Tensor:
    """A sequence (length, input_size): a value in 0..1, a mark, noise; one mark in each half."""
    sequence = torch.rand(options.length, options.input_size)
    half = options.length // 2
    sequence[:, 1] = 0
    sequence[torch.randint(0, half, ()), 1] = 1
    sequence[torch.randint(half, options.length, ()), 1] = 1
    return sequence


def make_data(options: SequenceOptions, seed: int) -> Data:
    """Sequences drawn when they are asked for, each from (seed, epoch, index)."""
    draw = partial(draw_sequence, options)
    train, val = (
        Samples([(None, 0)], [0] * count, draw, key)
        for count, key in ((options.train_samples, seed), (options.val_samples, mix(seed, 1)))
    )
    return Data(train, val, [], options.input_size, 1, f"adding problem {asdict(options)}")


def targets(sequences: Tensor) -> Tensor:
    """The sums (samples,) of the marked values of sequences (samples, length, input_size)."""
    return (sequences[:, :, 0] * sequences[:, :, 1]).sum(1)


class AddingRNN(nn.Module):
    """LSTM layers over time, in segments of which only the state between them is kept."""

    def __init__(self, options: RecurrentOptions, sequence: SequenceOptions) -> None:
        super().__init__()
        hidden, self.dropout = options.hidden_size, options.dropout
        sizes = [sequence.input_size] + [hidden] * (options.layers - 1)
        layers = [nn.LSTM(size, hidden, batch_first=True) for size in sizes]
        self.head = nn.Linear(hidden, 1)
        nn.init.ones_(self.head.bias)  # the mean of the target
        for layer in layers:  # memories that last from a step to the whole sequence
            forget = torch.empty(hidden).uniform_(1, sequence.length - 1).log()
            own = dict(layer.named_parameters())
            nn.init.zeros_(own["bias_hh_l0"])
            own["bias_ih_l0"].data = torch.cat([-forget, forget, torch.zeros(2 * hidden)])
        self.layers = nn.ModuleList(layers)

    def segment(self, inputs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The state after some time steps: h and c (1, samples, hidden) of each layer in turn.

        The outputs of the last layer are dropped: keeping them would cost what recomputing saves.
        """
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if number and self.dropout and self.training:
                inputs = self.drop(inputs)
            inputs, (h, c) = layer(inputs, state[2 * number : 2 * number + 2])
            after += [h, c]
        return tuple(after)

    def drop(self, inputs: Tensor) -> Tensor:
        """Dropout drawn by time step: on a CPU the same numbers whatever the segments."""
        samples, length, size = inputs.shape
        draws = torch.rand(length, samples, size, device=inputs.device).transpose(0, 1)
        return inputs * (draws >= self.dropout) / (1 - self.dropout)

    def forward(self, inputs: Tensor, segments: int) -> Tensor:
        """Predictions (samples,) for inputs (samples, length, input_size)."""
        *pieces, last = inputs.tensor_split(segments, dim=1)
        zero = inputs.new_zeros(1, len(inputs), self.head.in_features)
        state: tuple[Tensor, ...] = (zero,) * (2 * len(self.layers))
        for piece in pieces:
            if torch.is_grad_enabled():
                # Dropout is drawn anew in the backward pass, from the generator's state of now.
                state = checkpoint(
                    self.segment,
                    piece,
                    *state,
                    use_reentrant=False,
                    preserve_rng_state=self.dropout > 0,
                )
            else:
                state = self.segment(piece, *state)
        # The backward pass begins with the last segment: it is kept, not computed twice.
        state = self.segment(last, *state)
        predictions: Tensor = self.head(state[-2][0])
        return predictions[:, 0]


@torch.no_grad()
def evaluate(
    model: AddingRNN, loader: DataLoader[Tensor], device: torch.device, dtype: torch.dtype
) -> Evaluation:
    """Mean squared error, and how many are off by less than 0.04 (the source's criterion)."""
    model.eval()
    error, correct, total = 0.0, 0, 0
    for sequences, _ in loader:
        sequences = sequences.to(device, dtype)
        off = (model(sequences, math.ceil(sequences.shape[1] / 64)) - targets(sequences)).abs()
        error += float(off.double().square().sum())
        correct, total = correct + int((off < 0.04).sum()), total + len(off)
    model.train()
    return Evaluation(error / total, correct, total)


def train_step(
    model: AddingRNN, optimizer: torch.optim.Optimizer, sequences: Tensor, segments: int
) -> Tensor:
    """One step of Adam with clipped gradients; returns the mean squared error."""
    loss = mse_loss(model(sequences, segments), targets(sequences))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def train(config: Config, ranks: Ranks) -> None:
    """Train in this one process; the run's folder is `config.run.output_dir`."""
    options, seed = config.optimizer, config.run.seed
    set_up_logs(ranks)

    # seed
    set_determinism(**config.run.determinism)
    seed_everything(seed)
    device = choose_device(config.run.device, ranks)
    announce(NAME, config.run, ranks, device)
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        run = Run(NAME, config, config.run, ranks, device)

        # data
        data = make_data(config.sequence, seed)
        batch_size = options.total_batch_size(1)
        batches = GlobalBatches(len(data.train), batch_size, seed, 0, 1)
        loader = make_loader(data.train, batches)
        val_loader = make_loader(data.val, fixed_batches(len(data.val), batch_size, 0, 1))

        # model
        model = AddingRNN(config.network, config.sequence).to(device, dtype)

        # (nothing to parallelise) which activations to keep
        segments = config.checkpoint.segments
        if segments == "auto":
            from recipes.checkpoint_rnn.plan import choose_segments

            segments = choose_segments(config, device, run.folder)
            run.resolve(segments=segments)

        # optimizer
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

        # resume
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
        loop = Loop(run, parts, options, batches, data)
        if not loop.resume():
            return
        model.train()

        # loop
        memory = PeakMemory(device)
        for epoch in loop.epochs():
            batches.set_epoch(epoch, loop.state.batch, loop.steps_left)
            for sequences, _ in loader:
                set_lr(optimizer, loop.lr)
                loss = train_step(model, optimizer, sequences.to(device, dtype), segments)
                loop.after_step(loss)
            loop.save()  # before the evaluation, which may take long
            result = evaluate(model, val_loader, device, dtype)
            loop.after_epoch(result, model.state_dict())

        # report
        loop.finish(
            model.state_dict(),
            val_loss=result.loss,
            segments=segments,
            training_memory_bytes=memory.above_start(),
        )
        budget = config.checkpoint.memory_budget
        if budget is not None and memory.above_start() > budget:
            log.warning(f"training used {memory.above_start():,} bytes, above the budget")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return cli.run(NAME, Config, train, arguments, processes=lambda config: 1)


if __name__ == "__main__":
    end_process(main())
