"""Around DistributedDataParallel: what travels and when, and the same bits after a resume."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from common.errors import InputError, multiples_near
from common.seeds import rng_state, set_rng_state
from common.training.models import has_trained_batch_norm

log = logging.getLogger("recipes")


@dataclass(frozen=True)
class ParallelOptions:
    """How the copies work together."""

    sync_bn: bool = False
    """BatchNorm over the global batch instead of each rank's slice; GPUs only."""
    virtual_ranks: int = 0
    """Shards of each global batch, a power of two: 1, 2, 4 ... processes up to this number give the
    same bits. 0: one shard per process."""
    accumulate: int = 1
    """Micro-batches into which each rank cuts its batch, to save memory [micro-batches]. Gradients
    travel once per step, with the last micro-batch. BatchNorm sees one micro-batch at a time."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """Format in which gradients travel. bf16: half the bytes, rounded to 8 bits of mantissa; the
    weights stay as they are."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        given = self.virtual_ranks
        if given < 0:
            raise ValueError(f"--virtual-ranks must be at least 0: {given}")
        if given & (given - 1):
            below = 2 ** (given.bit_length() - 1)
            raise ValueError(
                f"--virtual-ranks {given} is not a power of two: {below} or {2 * below} would be"
            )
        if given and self.sync_bn:
            raise ValueError(
                "--sync-bn looks at the global batch, --virtual-ranks at a shard of "
                "it: give one of them"
            )
        if self.sync_bn and self.accumulate > 1:
            raise ValueError(
                "--sync-bn looks at the global batch, --accumulate computes a part of "
                "it at a time: give one of them"
            )
        if self.accumulate < 1:
            raise ValueError(f"--accumulate must be at least 1: {self.accumulate}")
        if given and (self.accumulate > 1 or self.gradient_compression != "none"):
            raise ValueError(
                "--virtual-ranks cuts the batch and adds gradients up in its own way: "
                "leave out --accumulate and --gradient-compression"
            )

    def micro_batch_size(self, batch_size_per_rank: int) -> int:
        """Samples of a rank that are computed at once.

        Raises:
            InputError: `accumulate` does not divide the rank's batch.
        """
        if batch_size_per_rank % self.accumulate:
            raise InputError(
                f"--accumulate {self.accumulate} does not divide a rank's batch of "
                f"{batch_size_per_rank}: {multiples_near(batch_size_per_rank, self.accumulate)} "
                "samples per rank would do"
            )
        return batch_size_per_rank // self.accumulate


def set_comm_hook(ddp: DistributedDataParallel, options: ParallelOptions) -> None:
    """Register what averages a bucket of gradients, where it is not DDP's own all-reduce.

    Virtual ranks register theirs themselves.
    """
    if options.gradient_compression == "bf16":
        ddp.register_comm_hook(None, average_in_bf16)
    elif dist.get_world_size() == 1 and not options.virtual_ranks:
        ddp.register_comm_hook(None, noop_hook)  # nobody to average with


def micro_batches(
    ddp: DistributedDataParallel, images: Tensor, labels: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Equal parts of a rank's batch; DDP lets gradients travel with the last one only.

    Source: PyTorch, DistributedDataParallel.no_sync.
    """
    for number, part in enumerate(zip(images.chunk(count), labels.chunk(count), strict=True), 1):
        with contextlib.nullcontext() if number == count else ddp.no_sync():
            yield part


def average_in_bf16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP: what torch's bf16_compress_hook does, which refuses CPUs."""
    mean = bucket.buffer().div_(dist.get_world_size(group)).to(torch.bfloat16)
    sent = dist.all_reduce(mean, group=group, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """BatchNorm over the global batch, where any of it is trained.

    Raises:
        InputError: on a CPU.
    """
    if not has_trained_batch_norm(model):
        log.info("--sync-bn left out: no BatchNorm layer is trained")
        return model
    if device.type == "cpu":
        raise InputError("--sync-bn needs GPUs: torch's SyncBatchNorm refuses CPUs")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def warm_up(
    model: nn.Module, image: Tensor, batch_size: int, autocast: torch.autocast | None = None
) -> None:
    """Run one backward pass whose result is thrown away, and leave the model as it was.

    A batch that the model cannot train on is found, and DDP's gradient buckets are final: DDP lays
    them out anew after the first backward pass, by the order in which gradients came. A ring
    all-reduce adds the ranks in an order that depends on an element's place in its bucket, so the
    first step after a resume would round otherwise than the same step of a run that was never
    interrupted (seen from three ranks on).

    Args:
        model: in train mode; its gradients are None afterwards.
        image: one sample (channels, height, width).
        batch_size: samples a batch of this rank.
        autocast: the context that training uses.

    Raises:
        InputError: a batch that the model cannot train on (BatchNorm over a single value).
    """
    images = image.expand(batch_size, *image.shape).contiguous()
    autocast = autocast or torch.autocast(image.device.type, enabled=False)
    with left_as_it_was(model):
        try:  # not compiled: the compiler's errors say nothing of a batch
            with torch.no_grad(), autocast, torch.compiler.set_stance("force_eager"):
                model(images)
        except ValueError as error:
            raise InputError(
                f"a batch of {batch_size} samples of {tuple(image.shape)}: {error}"
            ) from error
        with autocast:
            logits = model(images)
        logits.float().sum().backward()
    if isinstance(model, DistributedDataParallel):
        # The next forward pass is the one that lays them out, by what the backward has seen.
        model.reducer._rebuild_buckets()
    if image.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(image.device)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back buffers and random generators after the block, and drop gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random_state = rng_state()
    yield
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    set_rng_state(random_state)
