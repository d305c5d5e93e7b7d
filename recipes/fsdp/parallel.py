"""The transformer over a mesh of ranks: sharded (FSDP2), in copies, and by tensor parallelism.

Sources: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277); Rajbhandari et al. 2019, "ZeRO" (arXiv
1910.02054); Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from common.errors import InputError
from common.group import process_group
from common.option_rules import may_change, refuse_below
from common.seeds import mix
from common.snapshots.shards import holds_first, local_part
from common.writing import RESUME, writing
from recipes.fsdp.model import Transformer

TENSOR_PARALLEL = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value", "up"), 0),
    **dict.fromkeys(("attention.out", "down"), 1),
}
"""The matrices of a block that are divided, and the dimension: outputs, then inputs."""


@dataclass(frozen=True)
class ParallelOptions:
    """How the ranks share the model: --shard x --replicas x --tensor-parallel ranks."""

    shard: int = may_change(0)
    """Ranks over which parameters, gradients and optimizer state are sharded [ranks].
    0: all ranks that --replicas and --tensor-parallel leave."""
    replicas: int = may_change(1)
    """Copies of the sharded model (hybrid sharding), for example one per host."""
    tensor_parallel: int = may_change(1)
    """Ranks over which each matrix of a block is divided [ranks]; they share their samples."""
    reshard_after_forward: bool = may_change(True)
    """Free a block's gathered parameters until its backward pass (ZeRO-3).
    --no-reshard-after-forward keeps them: fewer bytes are sent, more memory is used (ZeRO-2)."""
    recompute: bool = may_change(False)
    """Keep only the input of each block, and compute the block again in the backward pass."""
    dry_run: bool = may_change(False)
    """Only say how many bytes each rank would hold, here and on 8, 64 and 512 ranks."""

    def __post_init__(self) -> None:
        refuse_below(self, shard=0, replicas=1, tensor_parallel=1)

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """Ranks along each dimension of the mesh: replicas, shard, tensor.

        Raises:
            InputError: their product is not `world_size`.
        """
        others = self.replicas * self.tensor_parallel
        shard = self.shard or max(1, world_size // others)
        if others * shard != world_size:
            fitting = f"--shard {world_size // others} would do with --nproc {world_size}"
            product = f"{self.replicas} replicas x {shard} shards x {self.tensor_parallel} tensor"
            raise InputError(
                f"{product} parallel ranks are {others * shard} ranks, but this run has "
                f"{world_size}: {fitting if world_size % others == 0 else ''}"
                f"{' or ' if world_size % others == 0 else ''}start --nproc {others * shard}"
            )
        return self.replicas, shard, self.tensor_parallel


def make_mesh(device: torch.device, sizes: tuple[int, int, int]) -> DeviceMesh:
    """All ranks as `replica` x `shard` x `tensor`: tensor parallelism among neighbours."""
    return process_group.make_mesh(device, sizes, ("replica", "shard", "tensor"))


def parallelise(
    model: Transformer, mesh: DeviceMesh, options: ParallelOptions, *, bf16: bool = False
) -> None:
    """Divide the parameters of a model that is still on `meta`; the model stays the same object.

    Args:
        model: its heads are a multiple of the ranks of tensor parallelism.
        mesh: see `make_mesh`.
        options: see `ParallelOptions`.
        bf16: compute in bf16; master weights and reductions keep the parameters' own dtype.
    """
    tensor = mesh["tensor"]
    for block in model.blocks:
        if tensor.size() > 1:  # columns, then rows: one all-reduce after each pair of matrices
            styles: tuple[ParallelStyle, ...] = ColwiseParallel(), RowwiseParallel()
            plan = {name: styles[dim] for name, dim in TENSOR_PARALLEL.items()}
            parallelize_module(block, tensor, plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    data = mesh["replica", "shard"] if mesh["replica"].size() > 1 else mesh["shard"]
    for block in model.blocks:  # one group of parameters per block, gathered while it computes
        fully_shard(
            block, mesh=data, mp_policy=policy, reshard_after_forward=options.reshard_after_forward
        )
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)


def data_ranks(mesh: DeviceMesh) -> tuple[int, int]:
    """The number of this rank's share of a batch, and of shares: tensor ranks have the same one."""
    replicas, shards = mesh["replica"], mesh["shard"]
    return (
        replicas.get_local_rank() * shards.size() + shards.get_local_rank(),
        replicas.size() * shards.size(),
    )


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill the parameters that this rank holds; each row is drawn from its own seed.

    So the bits do not depend on how the parameters are sharded, and no rank draws a whole model.
    Standard deviations as in GPT-2: smaller for the last layers of a block's two parts.
    """
    for name, parameter in model.named_parameters():
        local, starts = local_part(parameter)
        if parameter.ndim == 1:  # of a norm
            local.fill_(1)
            continue
        depth = 2 * len(model.blocks) if name.endswith(("out.weight", "down.weight")) else 1
        columns = slice(starts[1], starts[1] + local.shape[1])
        for row, values in enumerate(local, starts[0]):
            generator = torch.Generator().manual_seed(mix(seed, zlib.crc32(name.encode()), row))
            drawn = torch.randn(parameter.shape[1], generator=generator) * 0.02 / depth**0.5
            values.copy_(drawn[columns])


def make_adamw(model: Transformer, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices, but no norms; its state exists before the first step.

    So a snapshot finds the state to load into. Each group has one mesh, which fused kernels need,
    and the groups are the same for every mesh, so that their order is.
    """
    groups: dict[str, list[nn.Parameter]] = {"blocks": [], "ends": [], "norms": []}
    for name, parameter in model.named_parameters():
        place = "blocks" if name.startswith("blocks.") else "ends"
        groups["norms" if parameter.ndim == 1 else place].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "weight_decay": 0.0 if name == "norms" else weight_decay}
            for name, group in groups.items()
        ],
        lr=lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    for parameter in model.parameters():
        zeros = (torch.zeros_like(parameter) for _ in range(2))
        moments = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
        step = torch.zeros((), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


@torch.no_grad()
def clip_by_global_norm(model: nn.Module, most: float, mesh: DeviceMesh) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `most`.

    Returns:
        The norm before, float64, the same on every rank.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counted = [local_part(g)[0] for g in gradients if holds_first(g, mesh)]  # each number once
    norm = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for part in counted:
        norm += part.norm().double().square()
    dist.all_reduce(norm)
    norm = norm.rsqrt().reciprocal()  # sqrt is not the same on every CPU
    for gradient in gradients:
        local_part(gradient)[0].mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def whole_model(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The plain model's state_dict on rank 0, an empty one elsewhere. A collective per tensor.

    One tensor at a time is gathered. On rank 0 it is in a file that vanishes with it, so that the
    whole model need not fit into memory.

    Args:
        model: its parameters are sharded.
        folder: on rank 0, for the files.
    """
    entries: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value
        if isinstance(value, DTensor):  # at once, torch 2.15 warns that this is several gathers
            if dist.get_backend() == "gloo":  # torch 2.11 crashes in gloo's gather on a GPU
                value = value.cpu()
            for level in range(value.device_mesh.ndim):
                placements = [Replicate()] * (level + 1) + list(value.placements[level + 1 :])
                value = value.redistribute(placements=placements)
            whole = value.to_local()
        if dist.get_rank() == 0:
            file, size = folder / "whole.tmp", whole.numel()
            with writing(file, then=RESUME):
                try:
                    with file.open("wb") as room:  # else a full disk would end this by SIGBUS
                        os.posix_fallocate(room.fileno(), 0, whole.nbytes)
                    kept = torch.from_file(str(file), shared=True, size=size, dtype=whole.dtype)
                finally:
                    file.unlink(missing_ok=True)
            entries[name] = kept.view(whole.shape).copy_(whole)
    return entries


@dataclass
class InStep:
    """The batches of an evaluation, then empty forward passes, until there were `steps`.

    A rank that has no more samples must still take part when the other ranks gather parameters.
    """

    batches: Iterable[tuple[Tensor, Tensor]]
    steps: int
    model: nn.Module

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for batch in self.batches:
            yield batch
            done += 1
        for _ in range(done, self.steps):
            device = next(self.model.parameters()).device
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=device))
