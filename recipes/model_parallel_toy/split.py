"""Models cut into stages, and one process that drives the stages on several devices."""

from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from common.data.datasets import Arrays, ArraySamples, Data
from common.errors import InputError
from common.group.collectives import gather_to_rank_0
from common.run.logs import log


def generated_points(seed: int) -> Data:
    """2,000 normal points (10,); their class is the largest of 5 random projections."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2000, 10, generator=generator)
    source = Arrays(points, (points @ torch.randn(10, 5, generator=generator)).argmax(1))
    train, val = (ArraySamples(source, part, seed) for part in (range(1600), range(1600, 2000)))
    return Data(train, val, [str(n) for n in range(5)], 10, 1, source.digest())


def cut(model: Any, stages: int, sample: Tensor) -> list[nn.Sequential]:
    """The model's own layers as `stages` modules in a row, each with about the same work.

    Args:
        model: an nn.Sequential, or one of torchvision's ResNets.
        stages: pieces.
        sample: one input, with its dimension of samples.

    Raises:
        InputError: more stages than layers with parameters.
    """
    chain = (
        list(model)
        if isinstance(model, nn.Sequential)
        else [
            model.conv1,
            model.bn1,
            model.relu,
            model.maxpool,
            *model.layer1,
            *model.layer2,
            *model.layer3,
            *model.layer4,
            model.avgpool,
            nn.Flatten(),
            model.fc,
        ]
    )
    starts = [place for place, layer in enumerate(chain) if list(layer.parameters())]
    if stages > len(starts):
        raise InputError(f"--stages {stages} is more than the {len(starts)} layers of this model")
    flops = []
    model.eval()  # BatchNorm would learn from the sample
    with torch.no_grad():
        for layer in chain:
            with FlopCounterMode(display=False) as counter:
                sample = layer(sample)
            flops.append(counter.get_total_flops())
    model.train()
    cuts = [(0, *inner, len(chain)) for inner in combinations(starts[1:], stages - 1)]
    best = min(cuts, key=lambda edges: max(sum(flops[a:b]) for a, b in pairwise(edges)))
    shares = ", ".join(f"{sum(flops[a:b]) / sum(flops):.0%}" for a, b in pairwise(best))
    log.info(f"{stages} stages with {shares} of the floating-point operations")
    return [nn.Sequential(*chain[a:b]) for a, b in pairwise(best)]


class Split(nn.Module):
    """All stages in this process, each on its device; the batch goes through by micro-batches."""

    def __init__(
        self, stages: list[nn.Sequential], devices: list[torch.device], micro_batches: int
    ):
        super().__init__()
        self.stages = nn.ModuleList(s.to(d) for s, d in zip(stages, devices, strict=True))
        self.devices, self.micro_batches = devices, micro_batches

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs, on the last device. A GPU is only given its work here, and so they overlap."""
        outputs = []
        for micro_batch in inputs.chunk(self.micro_batches if self.training else 1):
            for stage, device in zip(self.stages, self.devices, strict=True):
                micro_batch = stage(micro_batch.to(device, non_blocking=True))
            outputs.append(micro_batch)
        return torch.cat(outputs)

    def backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute all gradients; returns the loss."""
        logits = self(inputs)
        loss = cross_entropy(logits, labels.to(logits.device))
        loss.backward()
        return loss


class StageState:
    """The part of a whole model's state that this process holds; the rest is on `meta`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Own entries, by their names in the whole."""
        return {k: v for k, v in self.model.state_dict().items() if not v.is_meta}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take over own entries."""
        self.model.load_state_dict(state_dict, strict=False)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every entry on rank 0, on the CPU, in the whole model's order. Calls a collective."""
        merged: dict[str, Tensor] = {}
        for shard in gather_to_rank_0({k: v.cpu() for k, v in self.state_dict().items()}):
            merged |= shard
        return {k: merged[k] for k in self.model.state_dict() if k in merged}
