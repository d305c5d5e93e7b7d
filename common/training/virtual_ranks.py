"""Virtual ranks: the same bits on any number of processes.

The global batch is cut into V shards. Each process computes as many as the others, or one more, one
after another. Every shard has its own random numbers and BatchNorm statistics, so its gradient has
the same bits on any process. All gradients are added along one binary tree over the shards:

    shards         0   1   2   3          Each process adds its own shards. Then rank r exchanges
                    \\ /     \\ /          sums with rank r ^ 1, with rank r ^ 2 and so on. Both
                    0+1     2+3           ranks get the same bits: in floating point,
                      \\     /            a + b = b + a.
                      sum of all

V is a power of two, so dividing by V is exact. If world_size does not divide V, the two ranks that
have the first shards of two neighbouring subtrees exchange their sums, and in the end rank 0, which
then has the whole sum, sends it to all.

Source: Li et al. 2022, "EasyScale" (arXiv 2208.14228), for schedulers; recursive doubling: Thakur
et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from common import log
from common.data.stream import shards_of, whole_share
from common.errors import InputError, TrainingError
from common.group.process_group import making_groups
from common.seeds import seed_torch
from common.training.ddp import chunks


def use_virtual_ranks(ddp: DistributedDataParallel, virtual_ranks: int, timeout_s: float) -> None:
    """Make `ddp` compute shards and add them along the tree. Call `seed_shards` before each step.

    The output is still that of this rank's slice; the loss is the sum over its samples, divided by
    `Plan.loss_divisor` (where all shares are equal, that is the mean). Gradients and
    buffers have the same bits on 1, 2, 3 ... `virtual_ranks` processes.

    Args:
        ddp: before its first forward pass.
        virtual_ranks: V, the number of shards.
        timeout_s: how long a rank waits for another rank.

    Raises:
        InputError: `ddp` expects steps without some of its parameters, whose sums would get lost.
    """
    if ddp.find_unused_parameters:
        raise InputError(
            "--virtual-ranks needs a gradient of every parameter in every step: leave it out, or "
            "leave out find_unused_parameters=True"
        )
    world_size = dist.get_world_size()
    if virtual_ranks % world_size:
        most = -(-virtual_ranks // world_size)
        idle = 1 - virtual_ranks / (world_size * most)
        log.info(
            f"--virtual-ranks {virtual_ranks} on {world_size} processes: {most - 1} or {most} "
            f"shards each; while gradients are computed, {idle:.0%} of the processes' time is idle"
        )
    if not torch.are_deterministic_algorithms_enabled():
        log.warning("--virtual-ranks gives the same bits on GPUs only with --deterministic")
    kind = UnevenTree if virtual_ranks % world_size else Tree
    tree = kind(virtual_ranks, timedelta(seconds=timeout_s))
    ddp.module = _Shards(ddp.module, tree)
    ddp.broadcast_buffers = False  # the tree gives every rank the same buffers
    ddp.register_comm_hook(tree, Tree.average_bucket)


def seed_shards(ddp: DistributedDataParallel, seed: int, step: int) -> None:
    """Let each shard draw its random numbers (dropout) of this step from (seed, step, shard)."""
    ddp.module.seeds = (seed, step)


def subtrees(leaves: range) -> list[range]:
    """The largest whole subtrees that make up neighbouring leaves, in their order."""
    found, start = [], leaves.start
    while start < leaves.stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= leaves.stop:
            size *= 2
        found.append(range(start, start + size))
        start += size
    return found


def add(terms: Sequence[Tensor], leaves: range) -> list[Tensor]:
    """The sum of each whole subtree of neighbouring leaves: pairs of neighbours, level by level.

    Args:
        terms: one of each leaf.
        leaves: their numbers.
    """
    found = []
    for tree in subtrees(leaves):
        level = terms[tree.start - leaves.start : tree.stop - leaves.start]
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        found.append(level[0])
    return found


class Tree:
    """The sum over V shards: first over this rank's shards, then with one partner per level."""

    def __init__(self, shards: int, timeout: timedelta) -> None:
        self.shards, self.rank, self.world_size = shards, dist.get_rank(), dist.get_world_size()
        self.mine = self.shards_of(self.rank)
        self.later: dict[Tensor, list[Tensor]] = {}  # sums of a gradient that are not its first
        self._under_way: list[Iterator[None]] = []
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        with making_groups("the groups of --virtual-ranks"):
            self._messages = self._connect(timeout)

    def shards_of(self, rank: int) -> range:
        """The numbers of a rank's shards."""
        return shards_of(rank, self.world_size, self.shards)

    def _connect(self, timeout: timedelta) -> int:
        """Make the groups of partners; returns how many messages an average takes."""
        self._partners: list[dist.ProcessGroup] = []
        distance = 1
        while distance < self.world_size:
            pairs = [[r, r + distance] for r in range(self.world_size) if not r & distance]
            mine, _ = dist.new_subgroups_by_enumeration(pairs, timeout=timeout)
            assert isinstance(mine, dist.ProcessGroup)
            self._partners.append(mine)
            distance *= 2
        return len(self._partners)

    def average(self, own: Sequence[Tensor]) -> Iterator[None]:
        """Replace the first of this rank's sums (`add`) by the mean over all shards.

        Pauses while each message travels.
        """
        for pair in self._partners:
            work = dist.all_reduce(own[0], group=pair, async_op=True)
            yield
            work.wait()
        own[0].div_(self.shards)

    def start(self, average: Iterator[None]) -> None:
        """Start an average, and send the next message of each one that is still under way.

        The messages then travel during the backward pass, in the same order on every rank.
        """
        self._under_way.append(average)
        for started in self._under_way[-max(1, self._messages) :]:
            next(started, None)

    def average_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's hook: the backward pass calls it when a bucket of gradients is full."""
        own = [bucket.buffer(), *self._later_buffers(bucket)]
        with nullcontext() if bucket.is_last() else self.waiting():
            self.start(self.average(own))
        if bucket.is_last():
            for average in self._under_way:
                for _ in average:
                    pass
            self._under_way.clear()
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())  # DDP reads it after the last bucket
        return future

    def _later_buffers(self, bucket: dist.GradBucket) -> list[Tensor]:
        """A buffer like the bucket's for each sum of this rank but the first."""
        buffer = bucket.buffer()
        buffers = [torch.empty_like(buffer) for _ in subtrees(self.mine)[1:]]
        if buffers:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                place = gradient.storage_offset() - buffer.storage_offset()
                layout = gradient.size(), _strides(parameter, gradient), place
                for like, value in zip(buffers, self.later.pop(parameter), strict=True):
                    like.as_strided(*layout).copy_(value)
        return buffers


class UnevenTree(Tree):
    """The same sum where world_size does not divide V; of two ranks, the left one keeps it."""

    def _connect(self, timeout: timedelta) -> int:
        owners = [rank for rank in range(self.world_size) for _ in self.shards_of(rank)]
        self._levels, half = list[list[tuple[int, int, int, int]]](), 1
        while half < self.shards:
            starts = range(0, self.shards, 2 * half)
            self._levels.append([(s, s + half, owners[s], owners[s + half]) for s in starts])
            half *= 2
        pairs = {(left, right) for level in self._levels for _, _, left, right in level}
        self._groups: dict[tuple[int, int], Any] = {
            pair: dist.new_group([*pair], timeout=timeout)
            for pair in sorted(pairs)
            if len({*pair}) > 1
        }
        return sum(map(self._has_message, self._levels)) + 1

    def _has_message(self, level: list[tuple[int, int, int, int]]) -> bool:
        return any(left != right for _, _, left, right in level)

    def average(self, own: Sequence[Tensor]) -> Iterator[None]:
        """As `Tree.average`; every rank pauses as often, so that messages keep their order."""
        sums = dict(zip((tree.start for tree in subtrees(self.mine)), own, strict=True))
        for level in self._levels:
            sent = []
            for first, second, left, right in level:
                if left == right and second in sums:
                    sums[first] += sums.pop(second)
                elif left != right and self.rank in (left, right):
                    mine = sums[first] if self.rank == left else sums.pop(second)
                    group = self._groups[left, right]
                    sent.append(dist.all_reduce(mine, group=group, async_op=True))
            if self._has_message(level):
                yield
            for work in sent:
                work.wait()
        whole: Any = dist.broadcast(own[0], 0, async_op=True)
        yield
        whole.wait()
        own[0].div_(self.shards)


def _strides(parameter: Tensor, gradient: Tensor) -> tuple[int, ...]:
    """How a gradient lies in DDP's bucket: as its parameter (channels_last), if that is dense."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return parameter.stride() if dense else gradient.stride()


def _first_names(model: nn.Module) -> dict[str, str]:
    """Each place of a tensor in a model, by name, to the first name of that tensor.

    Tied weights have several places. A module that stands in a model twice is one place: torch
    2.15's functional_call would put its tensors in twice, and never take the first ones out again.
    """
    first: dict[int, str] = {}
    found = {}
    for prefix, module in model.named_modules():  # each module once
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{prefix}.{name}".removeprefix(".")
            found[full] = first.setdefault(id(tensor), full)
    return found


class _Shards(nn.Module):
    """Takes the model's place inside DDP, and runs this rank's shards one after another."""

    seeds = (0, 0)

    def __init__(self, model: nn.Module, tree: Tree) -> None:
        super().__init__()
        self.model, self.tree = model, tree
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.first_name = _first_names(model)
        # The first shard uses the parameters themselves; the others, tensors on the parameters'
        # memory, so that autograd keeps the shards' gradients apart.
        self._parameters_by_shard: list[dict[str, Tensor]] = [{}]
        for _ in tree.mine[1:]:
            own = {name: p.detach().requires_grad_() for name, p in self.trained.items()}
            self._parameters_by_shard.append(own)
        if len(tree.mine) > 1:
            for name, parameter in self.trained.items():
                parameter.register_hook(partial(self._add_other_shards, name))

    def forward(self, inputs: Any) -> Tensor:
        """The model's outputs (samples, ...) for this rank's inputs."""
        out, by_shard = self._run(inputs)
        self.tree.start(self._average_buffers(by_shard))
        # The loss is a sum divided by `loss_divisor`, a shard's gradient that of the shard's mean.
        if out.requires_grad:
            factor = whole_share(self.tree.world_size, self.tree.shards)
            out.register_hook(lambda gradient: gradient * factor)
        return out

    def _run(self, inputs: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The outputs of this rank's shards, and each shard's buffers after it."""
        outputs, by_shard = [], []
        shards, buffers = self.tree.mine, dict(self.model.named_buffers())
        parts = chunks(inputs, len(shards))
        device = next(self.model.parameters()).device
        for shard, part, parameters in zip(shards, parts, self._parameters_by_shard, strict=True):
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            seed_torch(device, *self.seeds, shard, self.tree.shards)
            # Kernels may add in another order at a less aligned address. A copy is aligned as in a
            # process with one shard.
            part = tree_map_only(Tensor, torch.clone, part) if len(parts) > 1 else part
            named = {**parameters, **own}
            values = {
                name: named[first] for name, first in self.first_name.items() if first in named
            }
            # functional_call puts in what forward assigns
            outputs.append(functional_call(self.model, values, (part,), tie_weights=False))
            by_shard.append({name: values[name].detach() for name in own})
        out = torch.cat(outputs)
        if out.dtype != torch.float64:
            out = out.float()  # the factor of the hook could overflow or underflow in 16 bits
        return out, by_shard

    def _add_other_shards(self, name: str, gradient: Tensor) -> Tensor:
        """Hook of the first shard, whose backward pass is the last: autograd goes backwards."""
        gradients = [gradient]
        for parameters in self._parameters_by_shard[1:]:
            other = parameters[name].grad
            if other is None:
                raise TrainingError(
                    f"{name} has a gradient in some shards only: with --virtual-ranks each "
                    "sample's loss needs every parameter that is trained"
                )
            gradients.append(other)
            parameters[name].grad = None
        first, *later = add(gradients, self.tree.mine)
        if later:
            self.tree.later[self.trained[name]] = later
        return first

    def _average_buffers(self, by_shard: list[dict[str, Tensor]]) -> Iterator[None]:
        """Set the model's buffers to the mean over all shards; integers are equal in all shards."""
        first = by_shard[0]
        names = [name for name, buffer in first.items() if buffer.is_floating_point()]
        if names:
            flat = [torch.cat([own[n].reshape(-1) for n in names]) for own in by_shard]
            sums = add(flat, self.tree.mine)
            yield from self.tree.average(sums)
            values = sums[0].split([first[name].numel() for name in names])
            first |= {n: v.view_as(first[n]) for n, v in zip(names, values, strict=True)}
        # The shards' own tensors must not change: autograd still needs them.
        for name, buffer in self.model.named_buffers():
            buffer.copy_(first[name])
