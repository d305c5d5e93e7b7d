"""Around DistributedDataParallel: how gradients are sent, and the same bits after a resume."""

import contextlib
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from common import log
from common.errors import InputError, TrainingError
from common.option_rules import refuse_below
from common.seeds import rng_state, set_rng_state
from common.training.models import has_trained_batch_norm, set_train_mode


@dataclass(frozen=True)
class ParallelOptions:
    """How the ranks share a step."""

    sync_bn: bool = False
    """BatchNorm over the global batch instead of each rank's slice; GPUs only."""
    virtual_ranks: int = 0
    """Shards of each global batch, a power of two. 0: one shard per process.
    Any number of processes, up to this number, gives the same bits."""
    accumulate: int = 1
    """Micro-batches per rank and step, to save memory [micro-batches].
    Gradients are sent once per step. BatchNorm sees one micro-batch at a time."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """Format in which gradients are sent; the weights keep their precision.
    bf16: half the bytes, rounded to 8 bits of mantissa."""

    def __post_init__(self) -> None:
        shards = self.virtual_ranks
        refuse_below(self, virtual_ranks=0, accumulate=1)
        if shards & (shards - 1):
            below = 2 ** (shards.bit_length() - 1)
            raise ValueError(
                f"--virtual-ranks {shards} is not a power of two: {below} or {2 * below} would be"
            )
        if self.sync_bn and self.accumulate > 1:
            raise ValueError(
                "--sync-bn needs the whole global batch at once, but --accumulate computes it "
                "in parts: give only one of them"
            )
        other_ways = (self.sync_bn, self.accumulate > 1, self.gradient_compression != "none")
        if shards and any(other_ways):
            raise ValueError(
                "--virtual-ranks cuts the batch and adds gradients in its own way: "
                "leave out --accumulate, --gradient-compression and --sync-bn"
            )


def chunks(batch: Any, count: int) -> list[Any]:
    """A batch in equal parts.

    Args:
        batch: tensors, and lists of other things with one entry per sample, such as their names
            (or a list of such lists); alone or in lists, tuples and dicts.
        count: parts.

    Raises:
        TrainingError: the batch holds something else.
    """
    parts, structure = tree_flatten(batch, is_leaf=_is_list_of_other_things)
    samples = {len(part) for part in parts if isinstance(part, Tensor) and part.dim()}

    def has_samples(part: Any) -> bool:
        return isinstance(part, list | tuple) and len(part) in samples

    cut: list[Sequence[Any]] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dim():
            cut.append(part.chunk(count))
            continue
        of_parts = isinstance(part, list | tuple) and all(map(has_samples, part))
        if has_samples(part) == of_parts:  # neither, or one cannot tell which of the two
            raise TrainingError(
                f"a batch holds {reprlib.repr(part)}, which --accumulate and --virtual-ranks "
                "cannot cut: let the collate function give a tensor or a list with one entry per "
                "sample, or leave it out"
            )
        size = len(part[0] if of_parts else part) // count
        places = [slice(size * n, size * (n + 1)) for n in range(count)]
        cut.append([[one[at] for one in part] if of_parts else part[at] for at in places])
    return [tree_unflatten(part, structure) for part in zip(*cut, strict=True)]


def _is_list_of_other_things(part: Any) -> bool:
    if not isinstance(part, list | tuple) or not part:
        return False
    return not any(isinstance(value, Tensor) for value in tree_leaves(part))


def micro_batches(ddp: DistributedDataParallel, batch: Any, count: int) -> Iterator[Any]:
    """Equal parts of a rank's batch; DDP sends gradients with the last part only.

    Source: PyTorch, DistributedDataParallel.no_sync.
    """
    for number, part in enumerate(chunks(batch, count) if count > 1 else [batch], 1):
        with contextlib.nullcontext() if number == count else ddp.no_sync():
            yield part


def average_in_bf16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients; torch's own bf16_compress_hook refuses CPUs."""
    mean = bucket.buffer().div_(dist.get_world_size(group)).to(torch.bfloat16)
    sent = dist.all_reduce(mean, group=group, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with BatchNorm over the global batch.

    Raises:
        InputError: on a CPU.
    """
    if not has_trained_batch_norm(model):
        log.info("--sync-bn has no effect: no BatchNorm layer is trained")
        return model
    if device.type == "cpu":
        raise InputError("--sync-bn needs GPUs: torch's SyncBatchNorm refuses CPUs")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def warm_up(
    model: nn.Module, sample: Any, batch_size: int, autocast: torch.autocast | None = None
) -> None:
    """Put a model into train mode, run one backward pass and discard its result.

    It finds a batch that the model cannot train on, and it makes DDP's buckets final. DDP
    rearranges its buckets after the first backward pass, and a ring all-reduce rounds by a
    gradient's place in its bucket. Without this, from three ranks on, the first step after a resume
    would have other bits than the same step of an uninterrupted run.

    Args:
        model: its gradients are None afterwards.
        sample: what the model takes, for one sample: tensors, alone or in lists, tuples and dicts.
        batch_size: samples that this rank computes at once.
        autocast: the context that training uses.

    Raises:
        InputError: the model cannot train on such a batch (BatchNorm over a single value), or its
            state_dict does not consist of tensors, so that its weights could not be saved, or
            nothing in it is trained.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"the model's state_dict holds {name.removeprefix('module.')}, which is no tensor "
                f"({type(value).__name__}): keep it in a buffer, not in get_extra_state"
            )
    inputs = tree_map_only(Tensor, lambda x: x.expand(batch_size, *x.shape).contiguous(), sample)
    context = autocast or contextlib.nullcontext()
    set_train_mode(model)
    with left_as_it_was(model):
        try:  # without the compiler, whose errors do not mention the batch
            with torch.no_grad(), context, torch.compiler.set_stance("force_eager"):
                model(inputs)
        except ValueError as error:
            shapes = [tuple(x.shape) for x in tree_leaves(sample) if isinstance(x, Tensor)]
            found = ", ".join(map(str, shapes))
            fix = "; give each process two samples or more (--global-batch-size), or --norm group"
            fix = fix if "more than 1 value per channel" in str(error) else ""
            raise InputError(f"a batch of {batch_size} samples of {found}: {error}{fix}") from error
        with context:
            outputs = tree_leaves(model(inputs))
        if not (trained := [x for x in outputs if x.requires_grad]):
            raise InputError(
                "no output of the model has a gradient: train at least one parameter that it "
                "depends on; give torch's checkpoint(...) use_reentrant=False"
            )
        sum(x.float().sum() for x in trained).backward()
    if isinstance(model, DistributedDataParallel):
        model.reducer._rebuild_buckets()  # else the next forward pass would do it
    for device in {x.device for x in outputs if x.device.type == "cuda"}:
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random generators after the block, and drop gradients."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random_state = rng_state()
    yield
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            setattr(module, name, buffer.copy_(before))  # forward may have put another in its place
    set_rng_state(random_state)
