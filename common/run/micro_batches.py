"""The parts of a rank's batch in each step of DDP: what the options of `ParallelOptions` do."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from common import log
from common.errors import TrainingError
from common.run.loop import Loop
from common.training.ddp import ParallelOptions, average_in_bf16, micro_batches, warm_up
from common.training.virtual_ranks import seed_shards, use_virtual_ranks


class MicroBatches:
    """The micro-batches of each step: one, or `--accumulate`; or the shards of virtual ranks.

    With the default options, DDP on several ranks is left as it is.
    """

    def __init__(self, ddp: DistributedDataParallel, options: ParallelOptions, loop: Loop) -> None:
        """Change how `ddp`, before its first forward pass, sums up gradients. Calls collectives."""
        self.ddp, self.options, self.loop = ddp, options, loop
        self._is_warm = self._looked = False
        self.size = loop.plan.micro_batch_size
        if options.virtual_ranks or options.accumulate > 1:
            shards = f"--virtual-ranks {options.virtual_ranks}"
            loop.awaits = shards if options.virtual_ranks else f"--accumulate {options.accumulate}"
        norms = (m for m in ddp.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
        if all(id(buffer) in statistics for buffer in ddp.buffers()):
            # Training does not read them, and `evaluate` sends rank 0's, which are saved.
            ddp.broadcast_buffers = False
        if loop.run.autocast._enabled:
            ddp.register_forward_pre_hook(self._refuse_without_autocast)
        if options.virtual_ranks:
            use_virtual_ranks(ddp, options.virtual_ranks, loop.run.options.timeout_s)
        elif options.gradient_compression == "bf16":
            ddp.register_comm_hook(None, average_in_bf16)
        elif loop.run.ranks.world_size == 1:  # which has nothing to average
            ddp.register_comm_hook(None, noop_hook)

    def _refuse_without_autocast(self, ddp: nn.Module, _: Any) -> None:
        run = self.loop.run
        trains = ddp.training and torch.is_grad_enabled()
        if trains and not torch.is_autocast_enabled(run.device.type):
            raise TrainingError(
                f"--precision {run.options.precision} has no effect: call the model in `with "
                "run.autocast:`"
            )

    def warm_up(self, sample: Any) -> None:
        """Train mode, and DDP's buckets made final: why, `common.training.ddp.warm_up` says."""
        self._is_warm = True
        warm_up(self.ddp, sample, self.size, self.loop.run.autocast)

    def of(self, batch: Any) -> Iterator[Any]:
        """The parts of this rank's batch; DDP sends gradients with the last part only."""
        self.loop.awaits = ""
        if not self._is_warm:
            self._is_warm = True
            log.warning(
                "micro_batches.warm_up(sample) did not come before the first step: on several "
                "ranks a resumed run may give other bits"
            )
        if self.options.virtual_ranks:
            seed_shards(self.ddp, self.loop.run.options.seed, self.loop.state.step)
        for number, part in enumerate(micro_batches(self.ddp, batch, self.options.accumulate)):
            if number == 1 and not self._looked:
                self._look_for_lost_gradients()
            yield part

    def _look_for_lost_gradients(self) -> None:
        """Raise TrainingError in the next backward pass if the one before it no longer counts."""
        self._looked = True
        begun = (v for v in self.ddp.parameters() if v.grad is not None and v.grad.any())
        parameter = next(begun, None)
        if parameter is None or hasattr(self.ddp.module, "_orig_mod"):  # it would compile again
            return

        def look(_: Tensor) -> None:
            hook.remove()
            if parameter.grad is None or not parameter.grad.any():
                raise TrainingError(
                    "the gradients of the step's first micro-batch were gone when the second one's "
                    "backward pass began: call optimizer.zero_grad() once per step, not for each "
                    "micro-batch"
                )

        hook = parameter.register_hook(look)
