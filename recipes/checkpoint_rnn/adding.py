"""The adding problem, a recurrent network that can recompute segments of time, and its step.

Sources: Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", section 5.4; PyTorch,
torch.utils.checkpoint.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from common.data.datasets import Data
from common.data.stream import Samples
from common.seeds import mix


@dataclass(frozen=True)
class SequenceOptions:
    """The adding problem: the sum of the two marked numbers of a sequence."""

    length: int = 400
    """Length of a sequence [time steps]."""
    input_size: int = 2
    """Numbers per time step: the value, the mark, and noise in the rest."""
    train_samples: int = 3200
    """Sequences per epoch [samples]; each epoch draws new ones."""
    val_samples: int = 512
    """Sequences for validation [samples]."""


@dataclass(frozen=True)
class RecurrentOptions:
    """The network: LSTM layers, and one linear unit on the last state."""

    hidden_size: int = 32
    """Features of each layer's state."""
    layers: int = 1
    """LSTM layers."""
    dropout: float = 0.0
    """Share of features dropped between two layers."""


class Sequences:
    """Sequences that are drawn when they are loaded."""

    def __init__(self, options: SequenceOptions) -> None:
        self.options = options

    def __getitem__(self, _index: int) -> Tensor:
        """(length, input_size): a value in 0..1, a mark, noise; one mark in each half."""
        length, half = self.options.length, self.options.length // 2
        sequence = torch.rand(length, self.options.input_size)
        sequence[:, 1] = 0
        sequence[torch.randint(0, half, ()), 1] = 1
        sequence[torch.randint(half, length, ()), 1] = 1
        return sequence


def make_data(options: SequenceOptions, seed: int) -> Data:
    """Sequences, each drawn from (seed, epoch, index)."""
    source = Sequences(options)
    train = Samples(source, range(options.train_samples), seed)
    val = Samples(source, range(options.val_samples), mix(seed, 1))
    return Data(train, val, f"adding problem {asdict(options)}")


def targets(sequences: Tensor) -> Tensor:
    """The sums (samples,) of the marked values of sequences (samples, length, input_size)."""
    return (sequences[:, :, 0] * sequences[:, :, 1]).sum(1)


class AddingRNN(nn.Module):
    """LSTM layers over time; between two segments, only the state is kept."""

    def __init__(self, options: RecurrentOptions, sequence: SequenceOptions) -> None:
        super().__init__()
        hidden, self.dropout = options.hidden_size, options.dropout
        sizes = [sequence.input_size] + [hidden] * (options.layers - 1)
        layers = [nn.LSTM(size, hidden, batch_first=True) for size in sizes]
        self.head = nn.Linear(hidden, 1)
        nn.init.ones_(self.head.bias)  # the mean of the target
        for layer in layers:  # memories that last between one step and the whole sequence
            forget = torch.empty(hidden).uniform_(1, sequence.length - 1).log()
            own = dict(layer.named_parameters())
            nn.init.zeros_(own["bias_hh_l0"])
            own["bias_ih_l0"].data = torch.cat([-forget, forget, torch.zeros(2 * hidden)])
        self.layers = nn.ModuleList(layers)

    def segment(self, inputs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The state after some time steps: h and c (1, samples, hidden) of each layer in turn.

        It drops the outputs of the last layer: to keep them would cost what recomputing saves.
        """
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if number and self.dropout and self.training:
                inputs = self.drop(inputs)
            inputs, (h, c) = layer(inputs, state[2 * number : 2 * number + 2])
            after += [h, c]
        return tuple(after)

    def drop(self, inputs: Tensor) -> Tensor:
        """Dropout drawn by time step: on a CPU, the segments do not change the numbers."""
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
                # The backward pass draws dropout again, from the generator's present state.
                state = checkpoint(
                    self.segment,
                    piece,
                    *state,
                    use_reentrant=False,
                    preserve_rng_state=self.dropout > 0,
                )
            else:
                state = self.segment(piece, *state)
        # The backward pass begins with the last segment, so it is kept and not recomputed.
        state = self.segment(last, *state)
        predictions: Tensor = self.head(state[-2][0])
        return predictions[:, 0]


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


def score(model: nn.Module, sequences: Tensor) -> dict[str, Tensor]:
    """Squared error, and whether the error is below 0.04 (the source's criterion)."""
    off = (model(sequences, math.ceil(sequences.shape[1] / 64)) - targets(sequences)).abs()
    return {"loss": off.double().square(), "accuracy": off < 0.04}
