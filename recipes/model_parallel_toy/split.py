"""Models cut into stages, the options for it, and one process that drives all stages."""

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.flop_counter import FlopCounterMode

from common import log
from common.data.datasets import ArraySamples, Data
from common.errors import InputError
from common.group.collectives import gather_to_rank_0
from common.group.devices import choose_devices, open_contexts
from common.launch.ranks import Ranks
from common.option_rules import may_change, refuse_below
from common.training import ModelOptions, build_model, warm_up

LAYERS = {"toy": 2, "resnet50": 19}
"""Layers with parameters, of which a stage needs at least one."""


@dataclass(frozen=True)
class WholeModelOptions:
    """The model that is cut."""

    model: Literal["toy", "resnet50"] = "toy"
    """toy: 10 inputs, a hidden layer of 10, 5 classes; it trains on generated points."""
    norm: Literal["group", "batch"] = "group"
    """Normalisation of resnet50.
    batch sees one micro-batch at a time, so the number of micro-batches changes the result."""


@dataclass(frozen=True)
class ParallelOptions:
    """Into how many stages the model is cut, and in which order they work."""

    schedule: Literal["auto", "split", "micro", "gpipe", "1f1b"] = "auto"
    """Order of the work. split and micro: one process drives the devices of all stages;
    gpipe and 1f1b: one process per stage. auto: micro if --micro-batches says more than one,
    else split."""
    stages: int = 2
    """Stages of the model, with about the same floating-point operations in each."""
    micro_batches: int | None = None
    """Micro-batches per batch. None: 1 for split, else 4."""
    data_parallel: int = 1
    """Copies of the model, each with its share of the batch.
    split and micro: one process per copy; gpipe and 1f1b: one process per stage of each copy."""
    devices: tuple[str, ...] | None = None
    """One device per stage (split and micro, one copy): `cuda:0 cuda:1` or `cpu cpu`.
    None: the GPUs in turn, or the CPU."""
    timeline: bool = may_change(True)
    """Record the last step in timeline.json and timeline.png (gpipe and 1f1b)."""

    def __post_init__(self) -> None:
        refuse_below(self, stages=1, data_parallel=1, micro_batches=1)
        if self.order == "split" and self.micro_batch_count > 1:
            raise ValueError("--schedule split has no micro-batches: give --schedule micro")
        if self.in_processes and self.stages < 2:
            raise ValueError(f"--schedule {self.schedule} needs --stages 2 or more")
        if self.order == "1f1b" and 1 < self.micro_batch_count < self.stages:
            raise ValueError("--schedule 1f1b needs at least as many --micro-batches as --stages")
        if self.devices and self.in_processes:
            raise ValueError(
                "--devices is for --schedule split and micro; with gpipe and 1f1b, use --device"
            )
        if self.devices is not None and len(self.devices) != self.stages:
            raise ValueError(
                f"{len(self.devices)} --devices for {self.stages} --stages: name one per stage"
            )
        if self.data_parallel > 1 and self.devices:
            raise ValueError(
                "--devices names the devices of one copy: leave it out with --data-parallel, and "
                "the copies on a host share its GPUs in turn"
            )

    @property
    def order(self) -> str:
        """The schedule, never `auto`."""
        if self.schedule != "auto":
            return self.schedule
        return "micro" if (self.micro_batches or 1) > 1 else "split"

    @property
    def in_processes(self) -> bool:
        """Whether each stage is a process."""
        return self.order in ("gpipe", "1f1b")

    @property
    def micro_batch_count(self) -> int:
        """Micro-batches per batch."""
        default = 1 if self.order == "split" else 4
        return default if self.micro_batches is None else self.micro_batches

    @property
    def processes(self) -> int:
        """Number of ranks."""
        return self.data_parallel * (self.stages if self.in_processes else 1)


def build(options: WholeModelOptions, data: Data) -> nn.Module:
    """The whole model for `data`."""
    if options.model == "toy":
        return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    return build_model(ModelOptions(model="resnet50", norm=options.norm), *data.sizes_for_model)


def generated_points(seed: int) -> Data:
    """2,000 normally distributed points (10,); the class is the largest of 5 projections."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2000, 10, generator=generator)
    source = [points, (points @ torch.randn(10, 5, generator=generator)).argmax(1)]
    train, val = (ArraySamples(source, part, seed) for part in (range(1600), range(1600, 2000)))
    return Data(train, val, train.digest(), [str(n) for n in range(5)], 10, 1)


def cut(model: Any, stages: int, sample: Tensor) -> list[nn.Sequential]:
    """The model's own layers as `stages` modules in a row, each with about the same work.

    Args:
        model: an nn.Sequential, or a ResNet from torchvision.
        stages: number of modules.
        sample: one input (1, ...).

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
    model.eval()  # in train mode, BatchNorm would learn from the sample
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


def devices_of_copy(options: ParallelOptions, device: str, ranks: Ranks) -> list[torch.device]:
    """The device of each stage of this process's copy: the copies on a host share its GPUs.

    Each copy has as many GPUs as the others, because DDP exchanges gradients device by device.
    """
    found = choose_devices(options.devices, device)
    if options.devices:
        return found
    copies, stages = ranks.local_world_size, options.stages
    first, count = ranks.local_rank * len(found) // copies, max(1, len(found) // copies)
    return [found[first + stage * count // stages] for stage in range(stages)]


class Chain(nn.Module):
    """All stages in this process, each on its device; the batch goes through by micro-batches."""

    def __init__(
        self, stages: list[nn.Sequential], devices: list[torch.device], micro_batches: int
    ):
        super().__init__()
        self.stages = nn.ModuleList(s.to(d) for s, d in zip(stages, devices, strict=True))
        self.devices, self.micro_batches = devices, micro_batches
        log.info(f"stages on {', '.join(map(str, devices))}")

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs, on the last device. This only starts work on GPUs, so their work overlaps."""
        outputs = []
        for micro_batch in inputs.chunk(self.micro_batches if self.training else 1):
            for stage, device in zip(self.stages, self.devices, strict=True):
                micro_batch = stage(micro_batch.to(device, non_blocking=True))
            outputs.append(micro_batch)
        return torch.cat(outputs)


class Split(nn.Module):
    """A `Chain`, and with several copies the average of their gradients."""

    def __init__(
        self,
        stages: list[nn.Sequential],
        devices: list[torch.device],
        micro_batches: int,
        copies: int = 1,
    ):
        super().__init__()
        self.chain = Chain(stages, devices, micro_batches)
        self.parallel: nn.Module = self.chain
        open_contexts(*devices)
        if copies > 1:  # a module on several devices is wrapped without device_ids
            self.parallel = DistributedDataParallel(self.chain)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of this copy alone: DDP's forward would wait for the other copies."""
        outputs: Tensor = self.chain(inputs)
        return outputs

    def backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute all gradients, averaged over the copies; returns this copy's loss."""
        logits = self.parallel(inputs)
        loss = cross_entropy(logits, labels.to(logits.device))
        loss.backward()
        return loss

    def warm_up(self, sample: Tensor, batch_size: int) -> None:
        """Find a batch that the model cannot train on (see `common.training.ddp.warm_up`)."""
        warm_up(self.parallel, sample, batch_size)


def clip_gradients(model: nn.Module, largest: float, stages: dist.ProcessGroup | None) -> None:
    """Scale gradients down so that the whole model's norm is at most `largest`.

    `stages` are the ranks that hold the stages of one model; None: this rank holds all of them.
    """
    own = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in own if p.grad is not None])
    if stages is not None:
        square = norm.double().square()
        dist.all_reduce(square, group=stages)
        norm = square.rsqrt().reciprocal()  # sqrt is not the same on every CPU
    clip_grads_with_norm_(own, largest, norm)


class StageState:
    """The state of this process's stages; the rest of the model is on `meta`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """This process's entries, by their names in the whole model."""
        return {k: v for k, v in self.model.state_dict().items() if not v.is_meta}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load this process's entries."""
        self.model.load_state_dict(state_dict, strict=False)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every entry on rank 0, on the CPU, in the whole model's order. Calls a collective."""
        merged: dict[str, Tensor] = {}
        for shard in gather_to_rank_0({k: v.cpu() for k, v in self.state_dict().items()}):
            merged |= shard
        return {k: merged[k] for k in self.model.state_dict() if k in merged}
