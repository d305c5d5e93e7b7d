"""What the optimizers did between two steps of the loop: how many updates, of which parameters.

Torch's hooks count them. A loop that was changed may skip an update, make two, or train other
parameters than those of the model, and nothing else would notice it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from common import log
from common.errors import TrainingError
from common.replicas import fingerprint

_handles: list[Any] = []
"""Of the hooks for the run that began last in this process."""


class OptimizerSteps:
    """Counts updates from now on, which is before the first step.

    Args:
        parts: of the training state, as `TrainingState` has them.
        ddp: tells whether parameters may stay without a gradient.
        whole: this rank has the whole model, not a part of each tensor or of the layers.
    """

    def __init__(
        self, parts: Mapping[str, Any], ddp: DistributedDataParallel | None, *, whole: bool
    ) -> None:
        self._parts, self._whole = parts, whole
        model = parts.get("model")
        self._named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        self._may_lack_gradients = ddp is not None and ddp.find_unused_parameters
        self._ddp, self._begun = ddp, self._trained()
        self._known = {part for part in parts.values() if isinstance(part, Optimizer)}
        self._counts, self._depth = Counter[Optimizer](), 0
        self._gradients: dict[Tensor, bool] | None = {}
        self._any_gradient, self._scale = False, 0.0
        self._before = self._bits()
        for handle in _handles:
            handle.remove()
        enter, leave = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        _handles[:] = [enter(self._enter), leave(self._leave)]

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:  # else a wrapper's step calls this one
            self._counts[optimizer] += 1
        if self._gradients is None:
            return
        self._known.add(optimizer)
        for parameter in _held([optimizer]):
            gradient = parameter.grad
            self._gradients[parameter] = gradient is not None or parameter in self._gradients
            if gradient is not None and not self._any_gradient:
                self._any_gradient = not self._whole or gradient.is_sparse or bool(gradient.any())

    def _trained(self) -> dict[str, Tensor]:
        model = self._parts.get("model")
        found = model.named_parameters() if isinstance(model, nn.Module) else ()
        return {name: value for name, value in found if value.requires_grad}

    def _bits(self) -> list[int]:
        values = [fingerprint(value) for value in self._begun.values()] if self._whole else []
        return torch.stack(values).tolist() if values else []

    def after(self, step: int, *, begins_epoch: bool) -> bool:
        """Refuse other updates than one; whether this was the first step with an update.

        Raises:
            TrainingError: on this rank.
        """
        counts, self._counts = self._counts, Counter()
        if begins_epoch:
            self._refuse_other_trained(step)
        if not counts:
            if any(isinstance(part, Optimizer) for part in self._parts.values()):
                self._refuse_none(step)
            return False
        self._scale = 0.0
        if 1 not in counts.values():
            kind, count = next((type(k).__name__, n) for k, n in counts.items())
            raise TrainingError(
                f"{kind} made {count} updates before loop.after_step counted step {step}: call "
                "loop.after_step once after each optimizer.step()"
            )
        first, self._gradients = self._gradients, None
        if first is not None:
            self._refuse_untrained(first, step)
        return first is not None

    def _refuse_none(self, step: int) -> None:
        """Only a GradScaler may leave out an update, and it then lowers its scale."""
        for part in self._parts.values():
            if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
                scale, self._scale = self._scale, part.get_scale()
                if not scale or self._scale < scale:
                    return
        raise TrainingError(
            f"no optimizer made an update before loop.after_step counted step {step}: call "
            "optimizer.step() once before each loop.after_step; for an update every N batches, "
            "give --accumulate N"
        )

    def _refuse_other_trained(self, step: int) -> None:
        begun, now = self._begun, self._trained()
        changed = [name for name in {**begun, **now} if (name in begun) != (name in now)]
        if self._whole:  # FSDP puts others in their place
            changed += [name for name in begun.keys() & now.keys() if begun[name] is not now[name]]
        if changed:
            what = (
                "has been replaced"
                if changed[0] in begun.keys() & now.keys()
                else (
                    "requires a gradient now"
                    if changed[0] in now
                    else "requires no gradient any more"
                )
            )
            raise TrainingError(
                f"{_first(changed)} {what}, in step {step}, unlike at the start, which DDP and a "
                "resumed run know. Either train all parameters from the start, those that shall "
                "not change yet with a learning rate of 0 (docs/bring-your-own.md), or begin a "
                "second run with --weights MODEL.PT"
            )

    def _refuse_untrained(self, gradients: Mapping[Tensor, bool], step: int) -> None:
        """After the first update: is what the loop trains what the model has?"""
        held = {*_held(self._known)}
        if outside := [name for name, value in self._begun.items() if value not in held]:
            raise TrainingError(
                f"no optimizer holds {_first(outside)}, which requires a gradient: make the "
                "optimizer of this model's parameters, after the model is complete; what shall not "
                "be trained gets requires_grad_(False) before DDP is made"
            )
        trained = {name: value for name, value in self._begun.items() if value in gradients}
        without = [name for name, value in trained.items() if not gradients[value]]
        if without and len(without) == len(trained):
            raise TrainingError(
                f"no parameter had a gradient when the optimizer made step {step}: call backward() "
                "before optimizer.step(), and zero_grad() after it"
            )
        if without and not self._may_lack_gradients:
            said = (
                f"{_first(without)} had no gradient in step {step}: the loss does not depend on "
                "it. Use it, or call requires_grad_(False) before DDP is made; if it is used in "
                "some steps, DistributedDataParallel(..., find_unused_parameters=True)"
            )
            if self._ddp is not None:
                raise TrainingError(said)
            log.warning(said)
        if trained and not self._any_gradient:
            raise TrainingError(
                f"all gradients were 0 when the optimizer made step {step}: call zero_grad() "
                "after optimizer.step(), not between backward() and it"
            )
        scaled = any(isinstance(part, torch.amp.GradScaler) for part in self._parts.values())
        rates = [group["lr"] for part in self._known for group in part.param_groups]
        if self._before and not scaled and any(rates) and self._before == self._bits():
            raise TrainingError(f"no parameter changed in step {step}, with a learning rate > 0")
        if self._whole:
            self._refuse_unsaved(gradients)

    def _refuse_unsaved(self, gradients: Mapping[Tensor, bool]) -> None:
        """What is trained, and what an optimizer remembers, must be in the snapshots."""
        states = [part.state_dict() for part in self._parts.values()]
        saved = {leaf.data_ptr() for leaf in tree_leaves(states) if isinstance(leaf, Tensor)}
        names: dict[Tensor, str] = {value: name for name, value in self._named.items()}
        for optimizer in self._known:
            kind = type(optimizer).__name__
            for value in _held([optimizer]):
                memory = [v for v in optimizer.state[value].values() if isinstance(v, Tensor)]
                lost = [v for v in (value, *memory) if v.data_ptr() not in saved]
                if gradients.get(value) and value.requires_grad and lost:
                    of = names.get(value, f"a parameter of shape {tuple(value.shape)}")
                    what = of if lost[0] is value else f"{kind}'s state of {of}"
                    raise TrainingError(
                        f"{what} is in no snapshot, and a resumed run would begin it again: give "
                        "all models and optimizers to loop.resume(model=..., optimizer=..., "
                        "NAME=...)"
                    )


def _held(optimizers: Iterable[Optimizer]) -> Iterable[Tensor]:
    return (p for each in optimizers for group in each.param_groups for p in group["params"])


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
