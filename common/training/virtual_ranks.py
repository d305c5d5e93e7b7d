"""Virtual ranks: the same bits on any number of processes.

The global batch is cut into V shards, and each process computes V / world_size of them, one after
another. Every shard has its own random numbers and BatchNorm statistics, so its gradient has the
same bits on any process. All gradients are added along one binary tree over the shards:

    shards         0   1   2   3          Each process adds its own shards. Then rank r exchanges
                    \\ /     \\ /          sums with rank r ^ 1, with rank r ^ 2 and so on. Both
                    0+1     2+3           ranks get the same bits: in floating point,
                      \\     /            a + b = b + a.
                      sum of all

V and world_size are powers of two, so the tree is the same on any number of processes, and dividing
by V is exact.

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
from common.errors import InputError, multiples_near
from common.group.process_group import gloo_does_not_disturb
from common.replicas import fingerprint
from common.seeds import rng_state, seed_torch, set_rng_state
from common.training.ddp import chunks


def use_virtual_ranks(
    ddp: DistributedDataParallel,
    virtual_ranks: int,
    global_batch_size: int,
    timeout_s: float,
    audit_every: int = 0,
) -> None:
    """Make `ddp` compute shards and add them along the tree. Call `seed_shards` before each step.

    The output is still that of this rank's slice, and the loss is its mean. Gradients and
    buffers have the same bits on 1, 2, 4 ... `virtual_ranks` processes.

    Args:
        ddp: before its first forward pass.
        virtual_ranks: V, the number of shards.
        global_batch_size: samples over all ranks.
        timeout_s: how long a rank waits for another rank.
        audit_every: steps between two steps that `replicas.audit` can look at, or 0.

    Raises:
        InputError: world_size does not divide V, or V does not divide the batch.
    """
    world_size = dist.get_world_size()
    if virtual_ranks % world_size:
        below = min(virtual_ranks, 2 ** (world_size.bit_length() - 1))
        processes = " or ".join(str(n) for n in (below, 2 * below) if n <= virtual_ranks)
        raise InputError(
            f"--virtual-ranks {virtual_ranks} cannot be divided by {world_size} processes: "
            f"start {processes}"
        )
    if global_batch_size % virtual_ranks:
        sizes = multiples_near(global_batch_size, virtual_ranks)
        raise InputError(
            f"--virtual-ranks {virtual_ranks} does not divide the global batch of "
            f"{global_batch_size}: {sizes} samples would do"
        )
    if not torch.are_deterministic_algorithms_enabled():
        log.warning("--virtual-ranks gives the same bits on GPUs only with --deterministic")
    tree = Tree(virtual_ranks, timedelta(seconds=timeout_s))
    ddp.module = _Shards(ddp.module, tree, audit_every)
    ddp.broadcast_buffers = False  # the tree gives every rank the same buffers
    ddp.register_comm_hook(tree, Tree.average_bucket)


def seed_shards(ddp: DistributedDataParallel, seed: int, step: int) -> None:
    """Let each shard draw its random numbers (dropout) of this step from (seed, step, shard)."""
    ddp.module.seeds = (seed, step)


class Tree:
    """The sum over V shards: first over this rank's shards, then with one partner per level."""

    def __init__(self, shards: int, timeout: timedelta) -> None:
        world_size = dist.get_world_size()
        self.shards, self.shards_per_rank = shards, shards // world_size
        self._partners: list[dist.ProcessGroup] = []
        self._under_way: list[Iterator[None]] = []
        self.sent: dict[Tensor, Tensor] | None = None  # fingerprints of gradients, in an audit
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        distance = 1
        while distance < world_size:
            pairs = [[r, r + distance] for r in range(world_size) if not r & distance]
            with gloo_does_not_disturb(dist.get_backend()):
                mine, _ = dist.new_subgroups_by_enumeration(pairs, timeout=timeout)
            assert isinstance(mine, dist.ProcessGroup)
            self._partners.append(mine)
            distance *= 2

    def add_own(self, terms: Sequence[Tensor]) -> Tensor:
        """Add this rank's terms in pairs of neighbours, level by level."""
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        return terms[0]

    def average(self, own: Tensor) -> Iterator[None]:
        """Replace `own` by the mean over all shards; pauses while each message travels."""
        for pair in self._partners:
            work = dist.all_reduce(own, group=pair, async_op=True)
            yield
            work.wait()
        own /= self.shards

    def start(self, average: Iterator[None]) -> None:
        """Start an average, and send the next message of each one that is still under way.

        The messages then travel during the backward pass, in the same order on every rank.
        """
        self._under_way.append(average)
        for started in self._under_way[-max(1, len(self._partners)) :]:
            next(started, None)

    def average_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's hook: the backward pass calls it when a bucket of gradients is full."""
        if self.sent is not None:
            gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self.sent |= {parameter: fingerprint(gradient) for parameter, gradient in gradients}
        with nullcontext() if bucket.is_last() else self.waiting():
            self.start(self.average(bucket.buffer()))
        if bucket.is_last():
            for average in self._under_way:
                for _ in average:
                    pass
            self._under_way.clear()
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())  # DDP reads it after the last bucket
        return future


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

    def __init__(self, model: nn.Module, tree: Tree, audit_every: int) -> None:
        super().__init__()
        self.model, self.tree, self.audit_every = model, tree, audit_every
        self.seen: dict[str, Any] = {}
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.first_name = _first_names(model)
        # The first shard uses the parameters themselves.
        self._parameters_by_shard = [{}, *self._aliases(tree.shards_per_rank - 1)]
        if tree.shards_per_rank > 1:
            for name, parameter in self.trained.items():
                parameter.register_hook(partial(self._add_other_shards, name))

    def _aliases(self, shards: int) -> list[dict[str, Tensor]]:
        """Tensors on the parameters' memory, so that autograd keeps the shards' gradients apart."""
        trained = self.trained.items()
        return [{name: p.detach().requires_grad_() for name, p in trained} for _ in range(shards)]

    def forward(self, inputs: Any) -> Tensor:
        """The model's outputs (samples, ...) for this rank's inputs."""
        buffers = dict(self.model.named_buffers())
        seen: dict[str, Any] = {}
        if self.audit_every > 0 and (self.seeds[1] + 1) % self.audit_every == 0:
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            seen = {"inputs": inputs, "buffers": before, "sent": {}}
        self.seen, self.tree.sent = seen, seen.get("sent")
        out, by_shard = self._run(inputs, dist.get_rank(), self._parameters_by_shard, buffers)
        self.tree.start(self._average_buffers(by_shard))
        # The loss is the mean over the rank's samples, a shard's gradient that of the shard's mean.
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * self.tree.shards_per_rank)
            if seen:
                out.register_hook(partial(seen.__setitem__, "output_gradient"))
        return out

    def gradients_again(
        self, rank: int, inputs: Any, gradient: Tensor, autocast: torch.autocast
    ) -> list[Tensor]:
        """What `rank` sends in this step, from its inputs and the gradient of its outputs.

        Nothing that training uses changes. `autocast` is the context that training uses.
        """
        random_state = rng_state()
        by_shard = self._aliases(self.tree.shards_per_rank)
        with autocast:
            out, _ = self._run(inputs, rank, by_shard, self.seen["buffers"])
        parameters = [parameter for own in by_shard for parameter in own.values()]
        terms = torch.autograd.grad(out, parameters, gradient)
        set_rng_state(random_state)
        count = len(self.trained)
        return [self.tree.add_own(terms[number::count]) for number in range(count)]

    def _run(
        self,
        inputs: Any,
        rank: int,
        parameters_by_shard: Sequence[dict[str, Tensor]],
        buffers: dict[str, Tensor],
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The outputs of one rank's shards, and each shard's buffers after it."""
        outputs, by_shard = [], []
        parts = chunks(inputs, self.tree.shards_per_rank)
        device = next(self.model.parameters()).device
        for number, (part, parameters) in enumerate(zip(parts, parameters_by_shard, strict=True)):
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            shard = rank * self.tree.shards_per_rank + number
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
            assert other is not None, f"{name} has no gradient in one of the shards"
            gradients.append(other)
            parameters[name].grad = None
        return self.tree.add_own(gradients)

    def _average_buffers(self, by_shard: list[dict[str, Tensor]]) -> Iterator[None]:
        """Set the model's buffers to the mean over all shards; integers are equal in all shards."""
        first = by_shard[0]
        names = [name for name, buffer in first.items() if buffer.is_floating_point()]
        if names:
            flat = [torch.cat([own[n].reshape(-1) for n in names]) for own in by_shard]
            mean = self.tree.add_own(flat)
            yield from self.tree.average(mean)
            values = mean.split([first[name].numel() for name in names])
            first |= {n: v.view_as(first[n]) for n, v in zip(names, values, strict=True)}
        # The shards' own tensors must not change: autograd still needs them.
        for name, buffer in self.model.named_buffers():
            buffer.copy_(first[name])
