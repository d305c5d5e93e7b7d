"""How many bytes each rank will hold, counted on tensors without memory and without other ranks.

Source: Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 5 and figure 1.
"""

import ctypes
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode  # on `meta`, attention keeps other results
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from common.run.plan import batch_size_of
from common.seeds import choose_precision
from common.snapshots.shards import local_part
from common.terminal import mebibytes
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.parallel import TENSOR_PARALLEL, ParallelOptions
from recipes.fsdp.text import VOCABULARY

Bytes = dict[str, int]
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")
"""What `count` counts, beside `peak`: most bytes at once, less than the sum of all kinds, because
gradients come while activations go."""


def count(
    sizes: tuple[int, int, int],
    options: ParallelOptions,
    model: TransformerOptions,
    samples: int,
    context: int,
    dtype: torch.dtype,
    compute: torch.dtype,
) -> Bytes:
    """Bytes of the rank that holds most, by kind, and their `peak`.

    `gathered` is what FSDP2 holds whole for a while, as in torch 2.15: the parameters and gradients
    of the model's ends and of the block in its backward pass, the parameters of the next block, and
    the gradients of the block before while they are sent. Of the gradients of activations, only the
    largest are counted. The allocator's gaps and the buffers of NCCL or gloo are not.

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
    own, whole = held * dtype.itemsize, blocks[0] * compute.itemsize
    kept, again = (x.nbytes, one) if options.recompute else (one, 0)
    activations = model.layers * kept + again + rest
    unfreed = 0 if options.reshard_after_forward else model.layers * whole
    loss = rest + 2 * samples * context * VOCABULARY * dtype.itemsize  # gradients of the logits
    gathered, peak = 0, max(4 * own, 3 * own + unfreed + model.layers * kept + loss)
    again += 4 * x.nbytes // tensor  # gradient of a block's widest activation
    for done in range(model.layers):  # blocks whose backward pass is over
        left = model.layers - done
        there = 1 + (left > 1 and shards > 1) if options.reshard_after_forward else left
        now = 2 * ends * compute.itemsize + (there + 1) * whole
        now += blocks[0] * dtype.itemsize if done else 0  # held until it is sent
        gradients = own * done // model.layers
        peak = max(peak, 3 * own + gradients + now + left * kept + again)
        gathered = max(gathered, now)
    found = (own, own, 2 * own, gathered, activations, peak)
    return dict(zip((*KINDS, "peak"), found, strict=True))


def table(config: Any, world_size: int, device: torch.device) -> str:
    """Bytes per rank on the mesh of a `train.Config`, and sharded over 8, 64 and 512 ranks.

    Raises:
        InputError: the mesh does not fit `world_size`.
    """
    options: ParallelOptions = config.parallel
    precision = choose_precision(config.run.precision, device)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    bf16 = precision == "bf16"
    sizes, context = options.sizes(world_size), config.text.context
    shares = sizes[0] * sizes[1]
    samples = -(-batch_size_of(config.optimizer, parts=shares) // shares)
    copies = options.replicas * options.tensor_parallel
    larger = [n for n in (8, 64, 512) if n != world_size and n % copies == 0]
    lines = [
        f"bytes of a rank, counted; {samples} samples of {context} tokens per step and rank",
        f"{'replicas x shards x tensor':<28}" + "".join(f"{k:>14}" for k in (*KINDS, "peak")),
    ]
    for mesh in (sizes, *(replace(options, shard=0).sizes(n) for n in larger)):
        compute = torch.bfloat16 if bf16 else dtype
        found = count(mesh, options, config.model, samples, context, dtype, compute)
        name = f"{' x '.join(map(str, mesh))} = {math.prod(mesh)} ranks"
        lines.append(f"{name:<28}" + "".join(f"{mebibytes(n):>14}" for n in found.values()))
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


class HeapGrowth(TorchDispatchMode):
    """By how many bytes the heap of this process grows, as seen after each operation on tensors.

    torch's profiler is no measure of it: it misses what gloo's threads free (torch 2.15).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        gc.collect()  # FSDP2's objects form cycles
        self.begin, self.bytes = heap_bytes(), 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, then look."""
        result = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, heap_bytes() - self.begin)
        return result


class _Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2() returns: the fifth number is hblkhd, the eighth uordblks."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def heap_bytes() -> int:
    """Bytes that this process has allocated: hblkhd and uordblks of glibc's mallinfo2."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    sizes = mallinfo2().sizes
    return int(sizes[4] + sizes[7])
