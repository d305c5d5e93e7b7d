"""How many bytes each rank will hold, counted on tensors without memory and without other ranks.

Source: Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 5 and figure 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode  # on `meta`, attention keeps other results
from torch.nn.functional import cross_entropy

from common.files import mebibytes
from common.snapshots.shards import local_part
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.parallel import TENSOR_PARALLEL, ParallelOptions
from recipes.fsdp.text import VOCABULARY

Bytes = dict[str, int]
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")


def count(
    sizes: tuple[int, int, int],
    options: ParallelOptions,
    model: TransformerOptions,
    samples: int,
    context: int,
    dtype: torch.dtype,
    compute: torch.dtype,
) -> Bytes:
    """Bytes of the rank that holds most, by kind.

    `gathered` is what FSDP gathers for a while: the ends of the model, the block that computes, the
    next one, and the whole gradients of a block before they are sent. The allocator's gaps, the
    buffers of NCCL or gloo, and temporary results inside an operation are not counted.

    Args:
        sizes: replicas, shards and ranks of tensor parallelism.
        options: see `ParallelOptions`.
        model: sizes of the model.
        samples: per step and rank.
        context: length of a sample [tokens].
        dtype: of weights, gradients and optimizer state.
        compute: dtype in which a block computes.
    """
    _, shards, tensor = sizes
    before = torch.get_default_dtype()
    torch.set_default_dtype(compute)
    try:
        with FakeTensorMode():
            local = Transformer(model, VOCABULARY)
            for block in local.blocks:
                for name, dim in TENSOR_PARALLEL.items():
                    layer: Any = block.get_submodule(name)
                    shape = list(layer.weight.shape)
                    shape[dim] //= tensor
                    layer.weight = nn.Parameter(torch.empty(shape))
            held = sum(-(-len(p) // shards) * (p.numel() // len(p)) for p in local.parameters())
            blocks = [sum(p.numel() for p in block.parameters()) for block in local.blocks]
            ends = sum(p.numel() for p in local.parameters()) - sum(blocks)
            tokens = torch.zeros(samples, context, dtype=torch.int64)
            x = torch.zeros(samples, context, model.width, requires_grad=True)
            first = local.blocks[0]
            one, _ = saved(first, lambda: first(x))
            local.blocks = nn.ModuleList()
            rest, _ = saved(
                local, lambda: cross_entropy(local(tokens).transpose(1, 2).to(dtype), tokens)
            )
    finally:
        torch.set_default_dtype(before)
    parameters = held * dtype.itemsize
    whole = min(2, len(blocks)) if options.reshard_after_forward else len(blocks)
    gathered = (ends + (whole + 1) * blocks[0]) * compute.itemsize
    activations = model.layers * (x.nbytes if options.recompute else one) + rest
    activations += one if options.recompute else 0
    gathered = gathered if shards > 1 else 0
    return dict(
        zip(KINDS, (parameters, parameters, 2 * parameters, gathered, activations), strict=True)
    )


def table(config: Any, world_size: int, device: torch.device) -> str:
    """Bytes per rank on the mesh of a `train.Config`, and sharded over 8, 64 and 512 ranks.

    Raises:
        InputError: the mesh does not fit `world_size`.
    """
    options: ParallelOptions = config.parallel
    precision = config.run.precision
    dtype = torch.float64 if precision == "fp64" else torch.float32
    bf16 = precision == "bf16" or (precision, device.type) == ("auto", "cuda")
    sizes, context = options.sizes(world_size), config.text.context
    shares = sizes[0] * sizes[1]
    samples = -(-config.optimizer.total_batch_size(shares) // shares)
    copies = options.replicas * options.tensor_parallel
    larger = [n for n in (8, 64, 512) if n != world_size and n % copies == 0]
    lines = [
        f"bytes of a rank, counted; {samples} samples of {context} tokens per step and rank",
        f"{'replicas x shards x tensor':<28}" + "".join(f"{k:>14}" for k in (*KINDS, "total")),
    ]
    for mesh in (sizes, *(replace(options, shard=0).sizes(n) for n in larger)):
        compute = torch.bfloat16 if bf16 else dtype
        found = count(mesh, options, config.model, samples, context, dtype, compute)
        cells = [*found.values(), sum(found.values())]
        name = f"{' x '.join(map(str, mesh))} = {math.prod(mesh)} ranks"
        lines.append(f"{name:<28}" + "".join(f"{mebibytes(cell):>14}" for cell in cells))
    return "\n".join(lines)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Bytes of this rank's own parts of the weights, the gradients and the optimizer's moments."""
    weights = list(model.parameters())
    tensors: dict[str, list[Tensor]] = {
        "parameters": [*weights],
        "gradients": [p.grad for p in weights if p.grad is not None],
        "optimizer": [m for p in weights for m in optimizer.state[p].values() if m.ndim],
    }
    return {kind: sum(local_part(t)[0].nbytes for t in of) for kind, of in tensors.items()}


def saved(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that autograd keeps for the backward pass, without the parameters; and the result."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        # FSDP2 puts the gathered parameters of a block into the model while the block computes.
        own = {local_part(p)[0].untyped_storage()._cdata for p in model.parameters()}
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return sum(kept.values()), result
