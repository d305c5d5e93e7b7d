"""Virtual ranks: the same bits on any number of processes.

The global batch is cut into V shards, whatever the number of processes, and each process holds
V / world_size of them. A shard is computed by itself, with random numbers and BatchNorm statistics
of its own, so that its gradient has the same bits wherever it is computed; and all gradients are
added along one fixed binary tree over the V shards:

    shards         0   1   2   3          a process adds up the shards that it holds;
                    \\ /     \\ /          between processes rank r adds what it has to what rank
                    0+1     2+3           r ^ 1 has, then r ^ 2 and so on: both sides add the same
                      \\     /            two numbers, and a + b = b + a in floating point
                      sum of all

V and world_size are powers of two: then the tree is the same, and dividing by V is exact.

Source: Li et al. 2022, "EasyScale" (arXiv 2208.14228), which schedulers use; recursive doubling:
Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from common.errors import InputError, multiples_near
from common.group.rendezvous import gloo_does_not_disturb, keep_until_exit
from common.seeds import seed_torch

log = logging.getLogger("recipes")


def use_virtual_ranks(
    ddp: DistributedDataParallel,
    virtual_ranks: int,
    global_batch_size: int,
    step: Callable[[], int],
    *,
    seed: int,
    timeout_s: float,
) -> None:
    """Let `ddp` compute and add up shards, instead of each rank's slice of the batch as a whole.

    Its output is still the logits of this rank's slice, and the loss their mean. Gradients and
    buffers are those of the V shards, the same to the bit on 1, 2, 4 ... V ranks.

    Args:
        ddp: before its first forward pass.
        virtual_ranks: V, the number of shards.
        global_batch_size: samples over all ranks.
        step: gives the number of the optimizer step at hand: (seed, step, shard) keys what a
            shard draws, dropout for one.
        seed: of the run.
        timeout_s: how long a rank waits for another.

    Raises:
        InputError: a V that world_size does not divide, or that does not divide the batch.
    """
    world_size = dist.get_world_size()
    if virtual_ranks % world_size:
        below = min(virtual_ranks, 2 ** (world_size.bit_length() - 1))
        processes = " or ".join(str(n) for n in (below, 2 * below) if n <= virtual_ranks)
        raise InputError(
            f"--virtual-ranks {virtual_ranks} cannot be shared out to {world_size} processes: "
            f"start {processes}"
        )
    if global_batch_size % virtual_ranks:
        sizes = multiples_near(global_batch_size, virtual_ranks)
        raise InputError(
            f"--virtual-ranks {virtual_ranks} does not divide the global batch of "
            f"{global_batch_size}: {sizes} samples would do"
        )
    if not torch.are_deterministic_algorithms_enabled():
        log.warning("--virtual-ranks needs --deterministic on a GPU: its kernels decide bits too")
    tree = Tree(virtual_ranks, timedelta(seconds=timeout_s))
    ddp.module = _Shards(ddp.module, tree, seed, step)
    ddp.broadcast_buffers = False  # every rank comes to the same ones
    ddp.register_comm_hook(tree, Tree.average_bucket)


class Tree:
    """The sum over V shards, of which this rank adds up its own and then meets its partners."""

    def __init__(self, shards: int, timeout: timedelta) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.shards, self.shards_per_rank = shards, shards // world_size
        self.first_shard = rank * self.shards_per_rank
        self._partners: list[dist.ProcessGroup] = []
        self._under_way: list[Iterator[None]] = []
        distance = 1
        while distance < world_size:
            pairs = [[r, r + distance] for r in range(world_size) if not r & distance]
            with gloo_does_not_disturb(dist.get_backend()):
                mine, _ = dist.new_subgroups_by_enumeration(pairs, timeout=timeout)
            assert isinstance(mine, dist.ProcessGroup)
            self._partners.append(mine)
            keep_until_exit(mine)
            distance *= 2

    def add_own(self, terms: Sequence[Tensor]) -> Tensor:
        """This rank's part of the tree: neighbours are added, then neighbours' sums."""
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        return terms[0]

    def average(self, own: Tensor) -> Iterator[None]:
        """Replace `own` by the mean over all shards; stops after each message that it sends."""
        work = None
        for pair in self._partners:
            if work:
                work.wait()
            work = dist.all_reduce(own, group=pair, async_op=True)
            yield
        if work:
            work.wait()
        own /= self.shards

    def start(self, rounds: Iterator[None]) -> None:
        """Send the first message of `rounds`, and the next one of each that is under way.

        So that they travel while the backward pass goes on; every rank sends in the same order.
        """
        self._under_way.append(rounds)
        for started in self._under_way[-len(self._partners) :] if self._partners else ():
            next(started, None)

    def average_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's hook, called by the backward pass whenever a bucket of gradients is full."""
        self.start(self.average(bucket.buffer()))
        if bucket.is_last():
            for rounds in self._under_way:
                for _ in rounds:
                    pass
            self._under_way.clear()
        # DDP looks at it after the last bucket.
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future


class _Shards(nn.Module):
    """What DDP runs in the model's place: this rank's shards, one after another."""

    def __init__(self, model: nn.Module, tree: Tree, seed: int, step: Callable[[], int]) -> None:
        super().__init__()
        self.model, self._tree, self._seed, self._step = model, tree, seed, step
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # The first shard uses the parameters themselves. Each other one has tensors of its own on
        # the same memory, whose gradients autograd keeps apart.
        self._parameters_by_shard: list[dict[str, Tensor]] = [{}] + [
            {name: p.detach().requires_grad_() for name, p in trained.items()}
            for _ in range(tree.shards_per_rank - 1)
        ]
        if tree.shards_per_rank > 1:
            for name, parameter in trained.items():
                parameter.register_hook(partial(self._add_other_shards, name))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (samples, classes) of this rank's images (samples, channels, height, width)."""
        logits, buffers = [], []
        parts = images.chunk(self._tree.shards_per_rank)
        for number, (part, parameters) in enumerate(
            zip(parts, self._parameters_by_shard, strict=True)
        ):
            own = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            shard = self._tree.first_shard + number
            seed_torch(images.device, self._seed, self._step(), shard, self._tree.shards)
            # A copy begins at an address that a process of one shard would have: kernels may add
            # up in another order where the address is less even.
            part = part.clone() if len(parts) > 1 else part
            logits.append(functional_call(self.model, {**parameters, **own}, (part,)))
            buffers.append(own)
        self._tree.start(self._average_buffers(buffers))
        out = torch.cat(logits)
        if out.dtype != torch.float64:
            out = out.float()  # a factor could over- or underflow in less
        # The loss is the mean over the rank's samples; a shard's gradient is that of its own mean.
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * len(parts))
        return out

    def _add_other_shards(self, name: str, gradient: Tensor) -> Tensor:
        # Called in the first shard's backward pass, which runs after all others: autograd takes
        # what was computed last first.
        gradients = [gradient]
        for parameters in self._parameters_by_shard[1:]:
            other = parameters[name].grad
            assert other is not None, f"{name} has no gradient in one of the shards"
            gradients.append(other)
            parameters[name].grad = None
        return self._tree.add_own(gradients)

    def _average_buffers(self, by_shard: list[dict[str, Tensor]]) -> Iterator[None]:
        names = [name for name, buffer in by_shard[0].items() if buffer.is_floating_point()]
        if names:
            flat = [torch.cat([own[n].reshape(-1) for n in names]) for own in by_shard]
            mean = self._tree.add_own(flat)
            yield from self._tree.average(mean)
            sizes = [by_shard[0][name].numel() for name in names]
            for name, values in zip(names, mean.split(sizes), strict=True):
                by_shard[0][name] = values.view_as(by_shard[0][name])
        # Into the model's own ones: autograd still needs those of the shards as they were.
        for name, buffer in self.model.named_buffers():
            buffer.copy_(by_shard[0][name])
