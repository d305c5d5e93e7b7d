"""What the optimizers did between two steps of the loop: how many updates, of which parameters."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from common import log
from common.errors import TrainingError
from common.replicas import fingerprint
from common.weights import memory_of

_hooks: list[Any] = []
"""Of the run that began last in this process."""


class OptimizerSteps:
    """Counts updates from before the first step on.

    Args:
        parts: of the training state.
        ddp: the wrapped model, if there is one.
        whole: this rank has the whole model, not a part of its tensors or layers.
        clip_grad_norm: the option; in the first step the gradients of one optimizer at least must
            have no larger norm. 0: not given.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        ddp: DistributedDataParallel | None,
        *,
        whole: bool,
        clip_grad_norm: float = 0.0,
    ) -> None:
        self._parts, self._whole, self._ddp = parts, whole, ddp
        self._clip_grad_norm = clip_grad_norm
        self._may_lack = ddp is not None and ddp.find_unused_parameters
        self._known = dict.fromkeys(part for part in parts.values() if isinstance(part, Optimizer))
        scalers = (part for part in parts.values() if isinstance(part, GradScaler))
        self._scaler = next((part for part in scalers if part.is_enabled()), None)
        self._begun = self._trained()
        self._before, self._scale = self._bits(), 0.0
        self._unsaved = self._unsaved_buffers()
        self._counts, self._depth = Counter[Optimizer](), 0
        self._gradients: dict[Tensor, bool] | None = {}  # of the first update
        self._all_zero, self._told_mode = True, False
        self._empty = True  # no parameter had a gradient in this step
        self._late: list[Optimizer] = []  # which made no update in the first step
        self._own_rates = {each for each in self._known if len(_rates(each)) > 1}
        self._old_gradients, self._norm = False, math.inf
        self._main = next(iter(self._known), None)
        self.lr: float | None = None
        """Learning rate of this step's update by the first optimizer that a snapshot holds."""
        for hook in _hooks:
            hook.remove()
        before, behind = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        _hooks[:] = [before(self._enter), behind(self._leave)]

    def _enter(self, *_: Any) -> None:
        if not self._depth and not self._counts:
            self.lr = None
        self._depth += 1

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:  # else an optimizer that wraps this one steps
            self._counts[optimizer] += 1
        if optimizer is self._main:
            self.lr = optimizer.param_groups[0]["lr"]
        if self._gradients is None:
            if self._whole and optimizer not in self._known:
                self._late.append(optimizer)
            self._empty &= all(value.grad is None for value in _held([optimizer]))
            return
        self._known[optimizer] = None
        for value in _held([optimizer]):
            gradient = value.grad
            self._gradients[value] = gradient is not None or self._gradients.get(value, False)
            if gradient is not None and self._all_zero:
                self._all_zero = self._whole and not gradient.is_sparse and not gradient.any()
        if self._clip_grad_norm and self._whole:
            norm = get_total_norm([v.grad for v in _held([optimizer]) if v.grad is not None])
            self._norm = min(self._norm, float(norm))

    def held(self) -> set[Tensor]:
        """All parameters of the optimizers that a snapshot holds, or that made an update."""
        return {*_held(self._known)}

    def _trained(self) -> dict[str, Tensor]:
        model = self._parts["model"]
        found = model.named_parameters() if isinstance(model, nn.Module) else ()
        return {name: value for name, value in found if value.requires_grad}

    def _bits(self) -> list[int]:
        return [int(fingerprint(value)) for value in self._begun.values() if self._whole]

    def _unsaved_buffers(self) -> dict[str, int]:
        """A hash of each buffer, or other tensor of a module, that no state_dict holds."""
        model = self._parts["model"]
        if not self._whole or not isinstance(model, nn.Module):
            return {}
        saved = memory_of(model.state_dict())
        found = dict(model.named_buffers())
        for prefix, module in model.named_modules():
            own = {k: v for k, v in vars(module).items() if type(v) is Tensor and v.grad_fn is None}
            found |= {f"{prefix}.{name}".lstrip("."): value for name, value in own.items()}
        plain = {k: v for k, v in found.items() if v.layout == torch.strided and not v.is_meta}
        lost = {name: value for name, value in plain.items() if value.data_ptr() not in saved}
        return {name: int(fingerprint(value)) for name, value in lost.items()}

    def end(self, step: int) -> None:
        """After the last step: raise TrainingError if an update followed it.

        Warn of parameters that never changed, where this rank has the whole model.
        """
        if self._counts:
            raise TrainingError(
                f"an optimizer made an update after loop.after_step counted the last step, {step}"
            )
        self._refuse_other_trained(step)
        self._warn_of_eval_mode(step)
        pairs = zip(self._begun, self._before, self._bits(), strict=False)
        same = [name for name, before, now in pairs if before == now]
        if same:
            whole = len(same) == len(self._begun)
            log.warning(
                f"{'no parameter has' if whole else f'{_first(same)} has not'} changed since the "
                "start: a learning rate of 0, gradients that are always 0, or that overflowed in "
                "each step (fp16; try bf16)"
            )

    def after(self, step: int, *, begins_epoch: bool) -> bool:
        """Raise TrainingError on this rank unless one update was made; whether it was the first."""
        counts, self._counts = self._counts, Counter()
        empty, self._empty = self._empty, True
        if not counts:
            self.lr = None
        if begins_epoch:
            self._refuse_other_trained(step)
            self._warn_of_eval_mode(step)
        if 1 not in counts.values() and (self._known or counts):
            scale, self._scale = self._scale, self._scaler.get_scale() if self._scaler else 1.0
            if not counts and self._scaler and (not scale or self._scale < scale):
                return False  # the gradients had overflowed
            made = ", ".join(f"{type(k).__name__} made {n}" for k, n in counts.items())
            raise TrainingError(
                f"{made or 'no optimizer made an'} update{'s' * bool(made)} before loop.after_step "
                f"counted step {step}: call optimizer.step() once before each loop.after_step; for "
                "an update every N batches, give --accumulate N"
            )
        gradients, self._gradients, self._scale = self._gradients, None, 0.0
        if counts and gradients is not None:
            self._warn_of_two_holders(counts)
            if wrong := self._wrong(gradients):
                raise TrainingError(f"{wrong} (step {step})")
            # Another optimizer's backward pass may add to gradients that this one clears later; and
            # a hook would compile a compiled model again.
            if self._ddp and len(counts) == 1 and not hasattr(self._ddp.module, "_orig_mod"):
                self._look_for_old_gradients(gradients)
        elif counts and self._ddp and empty:
            raise TrainingError(
                f"no parameter had a gradient in step {step}: call backward() before "
                "optimizer.step(), and zero_grad() after it"
            )
        elif self._late:
            self._known |= dict.fromkeys(self._late)
            if wrong := self._not_saved(dict.fromkeys(_held(self._late), True), self._late):
                raise TrainingError(f"{wrong} (step {step})")
            self._late = []
        elif self._old_gradients:
            raise TrainingError(
                f"the gradients of step {step - 1} were still there when the backward pass of step "
                f"{step} began: call optimizer.zero_grad() in each step; for an update every N "
                "batches, give --accumulate N"
            )
        return gradients is not None

    def _warn_of_two_holders(self, optimizers: Iterable[Optimizer]) -> None:
        holders = Counter(_held(optimizers))
        if twice := [name for name, value in self._begun.items() if holders[value] > 1]:
            log.warning(
                f"two optimizers change {_first(twice)}: let one of them hold it, unless this is "
                "meant"
            )

    def _look_for_old_gradients(self, gradients: Mapping[Tensor, bool]) -> None:
        """At the first and the last parameter, when the next backward pass reaches them."""
        own = {*self._begun.values()}
        found = [value for value, had in gradients.items() if had and value in own]

        def watch(parameter: Tensor) -> None:
            def look(_: Tensor) -> None:
                hook.remove()
                old = parameter.grad
                self._old_gradients |= old is not None and not old.is_sparse and bool(old.any())

            hook = parameter.register_hook(look)

        for parameter in {*found[:1], *found[-1:]}:
            watch(parameter)

    def _refuse_other_trained(self, step: int) -> None:
        begun, now = self._begun, self._trained()
        for what, names in (
            ("requires no gradient any more", begun.keys() - now.keys()),
            ("requires a gradient now", now.keys() - begun.keys()),
            # FSDP puts other tensors in their place.
            ("was replaced", {k for k in begun if self._whole and begun[k] is not now.get(k)}),
        ):
            if names:
                raise TrainingError(
                    f"{_first([name for name in {**begun, **now} if name in names])} {what}, in "
                    f"step {step}, unlike at the start, which DDP and a resumed run know. Either "
                    "train all parameters from the start, those that shall not change yet with a "
                    "learning rate of 0 (docs/bring-your-own.md), or begin a second run with "
                    "--weights MODEL.PT"
                )

    def _warn_of_eval_mode(self, step: int) -> None:
        model = self._parts["model"]
        if isinstance(model, nn.Module) and not model.training and not self._told_mode:
            kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
            parts = ((k, part) for k, part in model.named_modules() if isinstance(part, kinds))
            for name in (k for k, part in parts if getattr(part, "p", 1) > 0):  # of a dropout
                self._told_mode = True
                log.warning(
                    f"the model is in eval mode in step {step}, where {name} acts as in an "
                    "evaluation: call model.train(), unless this is meant"
                )
                return

    def _wrong(self, gradients: Mapping[Tensor, bool]) -> str:
        """After the first update: is what was trained what the model has, and is it saved?"""
        held = self.held()
        if outside := [name for name, value in self._begun.items() if value not in held]:
            return (
                f"no optimizer holds {_first(outside)}, which requires a gradient: make the "
                "optimizer of the complete model's parameters; what shall not be trained gets "
                "requires_grad_(False) before DDP is made"
            )
        trained = {name: value for name, value in self._begun.items() if value in gradients}
        without = [name for name, value in trained.items() if not gradients[value]]
        rates = [group["lr"] for part in self._known for group in part.param_groups]
        clip, scale = self._clip_grad_norm, self._scaler.get_scale() if self._scaler else 1.0
        if clip and scale > 100 and math.isclose(self._norm * scale, clip, rel_tol=0.02):
            return (
                "--clip-grad-norm clipped scaled gradients: call scaler.unscale_(optimizer) first"
            )
        if 1.05 * clip < self._norm < math.inf:
            return (
                f"--clip-grad-norm {clip:g} has no effect: call torch.nn.utils.clip_grad_norm_ "
                "with all of the model's parameters before optimizer.step()"
            )
        if trained and self._all_zero:
            return (
                "no parameter had a gradient other than 0: call backward() before "
                "optimizer.step(), and zero_grad() after it"
            )
        if without and not self._may_lack:
            said = (
                f"{_first(without)} had no gradient: use it for the loss, or call "
                "requires_grad_(False) before DDP is made; if it is used in some steps, "
                "DistributedDataParallel(..., find_unused_parameters=True)"
            )
            if self._ddp:
                return said
            log.warning(said)
        if self._before and any(rates) and not self._scaler and self._before == self._bits():
            return "no parameter changed, though the learning rate was above 0"
        saved = [each.optimizer for each in self._parts.values() if isinstance(each, LRScheduler)]
        for optimizer in self._known:  # torch marks the step of an optimizer with a schedule
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and optimizer not in saved:
                log.warning(
                    "a learning rate schedule is in no snapshot, so a resumed run begins it anew: "
                    "give it to loop.resume(schedule=...)"
                )
        if any(len(_rates(each)) == 1 for each in self._own_rates):
            log.warning(
                "the learning rates of an optimizer's groups were replaced by one rate: after "
                "set_lr(optimizer, loop.lr), which sets them all, multiply each group's own"
            )
        now = self._unsaved_buffers()
        if changed := [name for name, bits in self._unsaved.items() if now.get(name, bits) != bits]:
            log.warning(
                f"{_first(changed)} changes in training and is in no snapshot: unless forward() "
                "computes it anew, a resumed run needs register_buffer(NAME, TENSOR), without "
                "persistent=False"
            )
        return self._not_saved(gradients, self._known) if self._whole else ""

    def _not_saved(self, gradients: Mapping[Tensor, bool], optimizers: Iterable[Optimizer]) -> str:
        saved = memory_of([part.state_dict() for part in self._parts.values()])
        names = {value: name for name, value in self._begun.items()}
        for optimizer in optimizers:
            for value in _held([optimizer]):
                of = names.get(value) or f"a parameter of shape {tuple(value.shape)}"
                memory = optimizer.state.get(value, {}).items()
                for name, own in [(of, value), *((f"{of} ({key})", own) for key, own in memory)]:
                    lost = isinstance(own, Tensor) and own.data_ptr() not in saved
                    if lost and gradients.get(value) and value.requires_grad:
                        return (
                            f"{name}, which {type(optimizer).__name__} changes, is in no snapshot: "
                            "give each model and optimizer to loop.resume(NAME=...)"
                        )
        return ""


def _held(optimizers: Iterable[Optimizer]) -> Iterable[Tensor]:
    return (p for each in optimizers for group in each.param_groups for p in group["params"])


def _rates(optimizer: Optimizer) -> set[float]:
    return {float(group["lr"]) for group in optimizer.param_groups}


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
