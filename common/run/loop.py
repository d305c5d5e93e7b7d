"""What happens between two training steps: log, save, stop, resume.

The loop and its step stay in the recipe. The order of events between two steps, on which an exact
resume depends, is here in one place.
"""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from statistics import fmean
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from common import log, restart, run_status
from common.data import batch_wait
from common.data.batch_wait import BatchWait
from common.data.batches import DeviceBatches
from common.data.datasets import Data
from common.data.same_samples import sample_hashes
from common.errors import StopRequested, TrainingError
from common.group.collectives import agreed, gather_numbers
from common.group.stop import StopAgreement
from common.identity import refuse_unlike_rank_0
from common.launch.capacity import usable_cores
from common.launch.report import say
from common.masking import printable
from common.profile import SETTLE, Profile
from common.replicas import fingerprints, unlike_replicas
from common.run.best import BestEpoch, warn_of_unknown_metric
from common.run.check import end_check, folder_of_check
from common.run.folder import Run
from common.run.optimizer_steps import OptimizerSteps
from common.run.plan import Plan
from common.seeds import seed_everything
from common.snapshots import snapshot_files
from common.snapshots import state as snapshot
from common.snapshots.state import Stateful, TrainingState
from common.terminal import progress_bar
from common.throughput import GPU_FIGURES, Throughput, gpu_use, peak_memory_bytes
from common.trace import StepTrace
from common.training.evaluation import Evaluation, explosion
from common.training.losses import refuse_other_losses, warn_of_graph, warn_of_scale
from common.watch.advice import ENOUGH_S, LONG_S, advice, advice_for_gpu, steps_s
from common.watch.clock import KINDS, shares
from common.watch.stragglers import ComputeTime
from common.weights import hold, save_weights, unwrapped


class Loop:
    """The state of a run between two steps. Every rank has a Loop and makes the same calls.

    After each step: count it; log it (`--log-every`); stop if any rank was asked to; write a
    snapshot (`--snapshot-every`). After an epoch's last step: write a snapshot, evaluate, log, stop
    if any rank was asked to, begin the next epoch.

    `mesh` is that of `TrainingState`. Without one, the ranks compare their models and optimizers
    after the first step, before each snapshot and at the end.
    """

    def __init__(self, run: Run, plan: Plan, data: Data, *, mesh: DeviceMesh | None = None) -> None:
        self.run, self.plan, self.data, self.last_step = run, plan, data, plan.last_step
        run.resolve(lr=float(plan.options.lr))  # a snapshot holds plain numbers
        if data.resize:
            run.resolve(image_size=data.side)
        self.clock, self.compute = run.clock, ComputeTime(run.clock)
        self._spent_s = torch.zeros(run.ranks.world_size, len(KINDS), dtype=torch.float64)
        self._trace = StepTrace(run.ranks.rank)
        self._metrics: dict[str, float] = {}
        short = run.options.log_every > self.last_step  # ten points make a curve
        self.log_every = max(1, self.last_step // 10) if short else run.options.log_every
        self._keys: Any = None
        self._identity = run.identity(plan.global_batch_size, data)
        self._mesh, self._evaluated_step, self._early = mesh, -1, ""
        self._warned = self._advised = self._told_lr = self._told_other = False
        self.awaits = ""
        """An option that has no effect until `micro_batches.of` is called."""
        self._workers = 0
        run.lap("data and model")
        warn_of_unknown_metric(run.options.best_by, len(data.class_names))
        # Torch only warns: a loss of (samples, 1) and (samples,) compares all pairs.
        warnings.filterwarnings("error", message="Using a target size")

    def resume(self, **parts: Stateful) -> bool:
        """Load the newest snapshot if there is one, and open the run's files.

        Args:
            parts: of the training state, as `TrainingState` takes them: model, optimizer ...

        Returns:
            False if this run is already finished.
        """
        run, seed = self.run, self.run.options.seed
        _refuse_other_parts(parts)
        if run.scaler.is_enabled() and not any(isinstance(p, GradScaler) for p in parts.values()):
            log.warning("no snapshot holds the scale of fp16: give loop.resume(scaler=run.scaler)")
        loss_sum = torch.zeros((), dtype=torch.float64, device=run.devices[0])
        sizes = () if self.plan.even else self.plan.sizes
        samples = sample_hashes(self.data)
        state = TrainingState(parts, loss_sum, self._mesh, sizes, samples=samples)
        self.state = state
        run.refuse_another_run()
        where = run.options.resume
        if where == "never" and restart.reached().step:  # the run began, as it should
            where = "auto"
        folder, look = run.before / "snapshots", folder_of_check() is not None
        found = snapshot_files.find(where, folder, self._identity, only_look=look)
        if run.finished(self.last_step, can_resume=found is not None):
            return False
        seed_everything(seed, run.ranks.rank)  # from here on each rank draws its own dropout
        if found:
            per_epoch = self.plan.steps_per_epoch
            state.resume(found, seed, steps_per_epoch=per_epoch, last_step=self.last_step)
            log.info(f"resuming after step {state.step}")
        first = time.time() - float(self.clock.seconds().sum())
        self._history = state.history or {"first": first, "steps_s": 0.0}
        self._resumed_from = state.step if found else None
        self._begun_with = fingerprints(parts["model"].state_dict())
        run.resolve(resume=found["file"] if found else "never")
        run.begin(state, self.data, self.plan.global_batch_size)
        self._best = BestEpoch(run, state)
        if left := self.plan.left_out:
            of = f"{self.plan.samples:,} samples"
            log.info(f"each epoch leaves out {left} of {of}: they fill no batch")
        return True

    def epochs(self, ddp: DistributedDataParallel | None = None) -> Iterator[int]:
        """Begin to listen for stop signals; return the epochs still to do, counted from 0.

        They end early once `--patience` is used up. With `ddp`, a rank is found that takes longer
        than the others between two backward passes.
        """
        self._refuse_unless("state", "loop.resume(model=model, ...)", "loop.epochs")
        if "_resumed_from" not in vars(self):
            raise TrainingError("this run has finished: train() ends where loop.resume() is False")
        if ddp is not None:
            self.compute.follow(ddp)
        run, devices = self.run, self.run.devices
        if folder_of_check():
            end_check(run, self.state, self.data, self.plan, self.steps_left)
        if fingerprints(self.state.parts["model"].state_dict()) != self._begun_with:
            raise TrainingError(
                "the model's weights changed between loop.resume and loop.epochs, which would undo "
                "a resume: load or change them before loop.resume"
            )
        self._best.write()
        self._stop, self._speed = StopAgreement(devices, leave=self._leave), Throughput(devices)
        BatchWait(run.options.timeout_s, self._stop, run.ranks, lambda: self.state.step)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored
            signal.signal(signal.SIGINT, self._interrupt)
        self._progress = progress_bar(self.last_step, self.state.step, main=run.ranks.is_main)
        self._trace.before(self.state.step + 1)
        begun, per_epoch = self.state.step + 1, self.plan.steps_per_epoch
        settle = SETTLE + ((self.state.step + SETTLE) % per_epoch == 0)  # not in an evaluation
        end_of_epoch = -(-(begun + settle) // per_epoch) * per_epoch
        run.scaler.noted = []  # what the first step's backward passes begin from
        self._updates = OptimizerSteps(
            self.state.parts,
            ddp,
            whole=self._mesh is None,
            clip_grad_norm=getattr(self.plan.options, "clip_grad_norm", None) or 0.0,
        )
        left = min(end_of_epoch, self.last_step) + 1 - begun
        self._profile = Profile(run.options.profile, settle, left, self.clock, run.folder)
        first, end = self.state.epoch, -(-self.last_step // self.plan.steps_per_epoch)
        epochs = range(first, max(end, first + 1))  # perhaps only the last evaluation is missing
        return takewhile(lambda _: not self._early, epochs)

    def steps(self, loader: DeviceBatches) -> DeviceBatches:
        """The batches of this epoch's steps that are still to do."""
        self._refuse_unless("_updates", "`for _ in loop.epochs(ddp)`", "loop.steps")
        if not hasattr(getattr(loader, "keys", None), "set_epoch"):
            raise TrainingError(
                "loop.steps needs the training loader of make_loaders, got that of the evaluation "
                "or another one"
            )
        if self._keys is None:
            order = {"seed": getattr(loader.keys, "seed", None)}
            refuse_unlike_rank_0(order, "its samples have another order than rank 0's")
        self._keys, self._workers = loader.keys, getattr(loader.loader, "num_workers", 0)
        self._keys.set_epoch(self.state.epoch, self.state.batch, self.steps_left)
        return loader

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the run's last one."""
        return max(0, self.last_step - self.state.step)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.plan.lr(self.state.step)

    def after_step(self, losses: Tensor) -> None:
        """Count a step, log it, and stop or save after it if that is due.

        Args:
            losses: of this rank's samples (samples,) in the batch's order, or their mean. With
                one loss per sample, the bits of the logged mean do not depend on the number of
                ranks.

        Raises:
            TrainingError: a loss is not finite, on any rank; raised on every rank. Or the losses
                are neither one per sample nor a mean. Or the loop's calls do not fit the plan, or
                the ranks do not train the model.
            StopRequested: a signal came; the state is saved.
        """
        self._refuse_step()
        self._trace.after(self.state.step + 1, self.run.folder / "trace")
        self.clock.end_step()
        self._profile.after_step()
        run, state, lr = self.run, self.state, self.lr
        begun = self._resumed_from or 0
        with agreed() if state.step == begun else nullcontext():  # later: no message in each step
            first = self._updates.after(state.step + 1, begins_epoch=not state.batch)
        refuse_other_losses(losses, self._keys.batch_size_per_rank, even=self.plan.even)
        if state.step == begun:
            warn_of_graph(losses, self._updates.held() if self._mesh is None else None)
            warn_of_scale(run.scaler.noted or [], losses.detach(), self.plan.loss_divisor)
            run.scaler.noted = None
        losses = losses.detach()
        if losses.dim() > 1:  # (samples, 1)
            losses = losses.flatten()
        state.loss_sum = state.loss_sum + losses.double()
        state.batch += 1
        state.step += 1
        if first:
            if self.awaits:
                raise TrainingError(
                    f"{self.awaits} has no effect: take the batch's parts from "
                    "`micro_batches.of(batch)`"
                )
            self._compare_replicas()
            run.lap("first step")
        self._speed.add(self.plan.global_batch_size)
        if run.ranks.is_main and (cost := restart.record(run.folder, state.step, begun)):
            log.info(cost)
        epoch = f"epoch {state.epoch + 1}/{self.plan.options.epochs}"
        self._progress.set_description_str(epoch, refresh=False)
        self._progress.update()
        if state.step % self.log_every == 0:
            of_step, of_epoch, compute_s, spent_s, gpus = self._gather(losses)
            both = torch.cat([of_step, of_epoch], dim=1)
            with self._best_is_written():
                snapshot.refuse_non_finite(both, state.step, run.snapshots)
            loss, mean_loss = (self._of_batch(part).mean().item() for part in (of_step, of_epoch))
            self._progress.set_postfix_str(f"loss {loss:.4f}, mean {mean_loss:.4f}", refresh=False)
            speed, since_s = self._speed.measured(), spent_s - self._spent_s
            self._spent_s, since_s[:, 0] = spent_s, 0  # without the start
            spent = {f"time_{kind}": fmean(own) for kind, own in shares(since_s).items()}
            used = dict(zip(GPU_FIGURES, gpus.nanmean(0).tolist(), strict=True))
            used = {name: value for name, value in used.items() if not math.isnan(value)}
            lr = self._lr_used(lr)
            run.metrics(state.step, state.epoch, loss=loss, lr=lr, **speed, **spent, **used)
            self._show_slow_ranks(compute_s, **speed)
            if speed:
                self._advise_early(spent_s, **speed)
        every = run.options.snapshot_every
        saves = every > 0 and state.step % every == 0
        if self._stop.after(state.step):
            self._leave()
        if saves:
            self.save()
            self._speed.resume()
        self._trace.before(state.step + 1)
        self.clock.begin_step()

    def _lr_used(self, planned: float) -> float:
        """The learning rate of this step's update: the plan's, unless the loop has another one."""
        used = planned if self._updates.lr is None else float(self._updates.lr)
        if not self._told_lr and not math.isclose(used, planned, rel_tol=1e-6):
            self._told_lr = True
            log.info(
                f"the optimizer's learning rate is {used:g}, not the plan's {planned:g} (--lr, "
                "--lr-schedule, --warmup-epochs, --scale-lr), which set_lr(optimizer, loop.lr) sets"
            )
        return used

    def _gather(self, losses: Tensor) -> Sequence[Tensor]:
        """All ranks' losses of this step and of the epoch, times and GPU use, in one message."""
        spent_s = self.clock.seconds()  # waits for a GPU, so that halves() has its last steps
        means = self.state.loss_sum / self.state.batch
        used = gpu_use(self.run.devices)
        parts = [*map(self._padded, (losses, means)), self.compute.halves(), spent_s, used]
        own = [part.double().flatten().cpu() for part in parts]
        return torch.split(gather_numbers(torch.cat(own)), [len(part) for part in own], dim=1)

    def _padded(self, losses: Tensor) -> Tensor:
        """A rank's losses in as many numbers as any rank has."""
        if self.plan.even or not losses.dim():
            return losses
        return F.pad(losses, (0, max(self.plan.sizes) - len(losses)))

    def _of_batch(self, losses: Tensor) -> Tensor:
        """All ranks' losses, padded (world_size, any number), in the batch's order (samples,)."""
        if self.plan.even or losses.shape[1] < max(self.plan.sizes):
            return losses.flatten()
        return torch.cat([own[:n] for own, n in zip(losses, self.plan.sizes, strict=True)])

    def _advice(self, spent_s: Tensor) -> list[str]:
        options, here = getattr(self.run.config, "data", None), self.run.ranks.local_world_size
        workers = self._workers if hasattr(options, "num_workers") else None
        return advice(spent_s, workers, max(1, usable_cores() // here))

    def _advise_early(self, spent_s: Tensor, samples_per_s: float) -> None:
        """Once, in a run that still takes long: say what would make it faster."""
        left_s = self.steps_left * self.plan.global_batch_size / samples_per_s
        if self._advised or left_s < LONG_S or steps_s(spent_s).max() < ENOUGH_S:
            return
        self._advised, said, gpu = True, self._advice(spent_s), self.run.device
        if gpu.type == "cuda":
            both = [torch.cuda.mem_get_info(each) for each in self.run.devices]
            share = max(1 - free / whole for free, whole in both)
            options = getattr(self.run.config, "model", None)
            compiles = getattr(options, "compile", None) if len(both) == 1 else None
            said += advice_for_gpu(compiles=compiles, memory_share=share)
        for line in said:
            log.info(line)

    def _show_slow_ranks(self, compute_s: Tensor, samples_per_s: float = 0.0) -> None:
        step_s = self.plan.global_batch_size / (samples_per_s or 1)
        found = self.compute.compare(self.state.step, compute_s, step_s)
        if found and self.run.ranks.is_main:
            self.run.curves(self.state.step, slow_rank_excess=found.excess)
            if news := self.compute.news(found, self.run.logs):
                log.warning(news)

    def save(self) -> None:
        """Write a snapshot of this step, unless there is one; pause the measurement of speed."""
        self.clock.turn_to("save")
        if self.state.saved_step != self.state.step:
            self._compare_replicas()
        self._speed.pause()
        self.state.metrics_bytes, self.state.metrics_sha256 = self.run.metrics_so_far()
        self.state.history = {**self._history, "steps_s": self._steps_s(self.clock.seconds())}
        keep = self.run.options.snapshots_on_the_way
        with self._best_is_written():
            self.state.save(self.run.snapshots, self._identity, keep)
        self.clock.turn_to("evaluate")  # if an epoch has ended

    @contextmanager
    def _best_is_written(self) -> Iterator[None]:
        """A block after whose failure best.pt is of the best epoch. Calls no collective."""
        try:
            yield
        except TrainingError:
            if self._mesh is None:
                with suppress(TrainingError):
                    self._best.write()
                    self.state.wait_for_own()
            raise

    def _compare_replicas(self) -> None:
        if self._mesh is None and self.run.ranks.world_size > 1:
            buffers = bool(self._identity.get("virtual_ranks"))
            if found := unlike_replicas(self.state.parts, self.state.step, buffers=buffers):
                self.state.wait()
                raise TrainingError(
                    f"{found} (look at the code first: model() in place of ddp(), no_sync, a "
                    "parameter unfrozen or replaced after DDP was made, a learning rate by rank, a "
                    "step that a rank left out; then at the device, memory, driver): run the same "
                    "command to resume, on another device if this happens again; last good "
                    f"snapshot: {snapshot_files.newest_name(self.run.snapshots)}"
                )

    def _refuse_step(self) -> None:
        """Raise TrainingError unless the plan has a step here, of the batch that comes next."""
        state, steps = self.state, "`for batch in loop.steps(loader)` in each epoch"
        if state.step >= self.last_step:
            self._refuse("after_step", f"{steps}, which then ends, or loop.after_epoch")
        if state.batch >= self.plan.steps_per_epoch:
            self._refuse("after_step", "loop.after_epoch after each epoch's last step")
        if self._keys is None or self._keys.epoch != state.epoch:
            self._refuse("after_step", f"{steps}, which chooses the epoch's samples")

    def _refuse_unless(self, attribute: str, before: str, call: str) -> None:
        if attribute not in vars(self):
            raise TrainingError(f"{call} came without {before} before it")

    def _refuse(self, call: str, expected: str) -> NoReturn:
        state, per_epoch = self.state, self.plan.steps_per_epoch
        raise TrainingError(
            f"loop.{call} came after step {state.step} of {self.last_step}, which is step "
            f"{state.batch} of {per_epoch} in epoch {state.epoch + 1}; expected {expected}"
        )

    def after_epoch(self, result: Evaluation, state_dict: Callable[[], dict[str, Tensor]]) -> None:
        """Log the epoch, then move to the next one, or stop before it.

        Args:
            result: on the validation data; its metrics are logged as `val_NAME`.
            state_dict: gives the unwrapped model's, for best.pt and `--epoch-weights`. If it is
                called, it is called on every rank; only rank 0's result counts.

        Raises:
            TrainingError: a metric is not finite, or there is none of that name.
            StopRequested: a signal came; the state is saved.
        """
        run, state = self.run, self.state
        if not isinstance(result, Evaluation) or not callable(state_dict):
            given = f"{type(result).__name__} and {type(state_dict).__name__}"
            self._refuse(
                "after_epoch", f"what evaluate() returned and model.state_dict, not {given}"
            )
        if state.step == self._evaluated_step:
            self._refuse("after_epoch", "one call per epoch")
        if state.batch < self.plan.steps_per_epoch and self.steps_left:
            expected = "loop.after_step for each batch; to end early, leave the epochs after "
            self._refuse("after_epoch", f"{expected}loop.after_epoch, and call loop.finish")
        self._evaluated_step = state.step
        self.clock.turn_to("other")
        means = torch.tensor([[*result.means.values()]])
        broken = ", ".join(f"val_{name}" for name in result.not_finite)
        with self._best_is_written():
            snapshot.refuse_non_finite(means, state.step, run.snapshots, broken)
        losses = self._of_batch(gather_numbers(self._padded(state.loss_sum / state.batch)))
        before, self._result = self._metrics, result
        self._metrics = {"train_loss": losses.mean().item()}
        self._metrics |= {f"val_{name}": mean for name, mean in result.means.items()}
        run.metrics(state.step, state.epoch, **self._metrics)
        found = ", ".join(f"{name} {value:.4f}" for name, value in self._metrics.items())
        epoch = state.epoch + 1
        log.info(f"epoch {epoch}/{self.plan.options.epochs}: {printable(found)}")
        if news := explosion(self._metrics, before, len(self.data.class_names)):
            size, lr = self.plan.global_batch_size, self.plan.options.lr
            cause = f"the learning rate {self.plan.peak_lr:g} is too high for batches of {size}"
            if self._metrics["train_loss"] < before.get("train_loss", 0.0):
                cause = f"BatchNorm's statistics lag (wait, or --norm group), or {cause}"
            log.warning(f"{news}: {cause}: try --lr {lr / 10:g} in another --output-dir")
        by = self._best.improves(self._metrics)
        weights = self._of_model(state_dict()) if by or run.options.epoch_weights else {}
        if by:
            self._best.keep(epoch, by, self._metrics[by], weights)
        if run.options.epoch_weights and run.ranks.is_main:
            save_weights(weights, run.folder / "weights" / f"epoch_{state.epoch:04d}.pt")
        self._speed.resume()
        self._early = self._best.end_epoch(epoch)
        if self.steps_left:
            if self._stop.after(state.step, at_once=True):
                self._leave()
            state.next_epoch()
            self.clock.begin_step()
            self._progress.set_postfix_str("", refresh=False)
        else:
            self._progress.close()

    def _of_model(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights by the model's own names; a warning if a resumed run may not have them."""
        states = {name: part.state_dict() for name, part in self.state.parts.items()}
        weights = unwrapped(weights, states["model"])
        if self._mesh is None and not self._warned and not hold([*states.values()], weights):
            self._warned = True
            log.warning(
                "perhaps no snapshot has these weights, and a resumed run would make others: give "
                "their model to loop.resume(NAME=...)"
            )
        seen, told = self._result.weights, self._told_other or not self.run.ranks.is_main
        if self._mesh is None and seen and not told and not fingerprints(weights) <= seen:
            self._told_other = True
            name = next(k for k, value in weights.items() if not fingerprints({k: value}) <= seen)
            log.warning(
                f"{name} of the weights that are saved is not what the evaluation saw: the metrics "
                "are those of other weights (give both the same model)"
            )
        return weights

    def finish(self, state_dict: dict[str, Tensor], **more: Any) -> None:
        """Write the model and the summary, to which `more` is added; perhaps before the last epoch.

        Raises:
            TrainingError: this epoch is not complete, or the ranks hold other bits.
        """
        if self.state.step != self._evaluated_step:
            self._refuse("finish", "loop.after_epoch before it")
        if self.state.step != (self._resumed_from or 0):
            self._updates.end(self.state.step)
        self._compare_replicas()
        self._best.write()
        self.state.wait()
        self._profile.end()
        epochs = -(-self.state.step // self.plan.steps_per_epoch)
        if self.steps_left:
            early = f"after epoch {epochs} of {self.plan.options.epochs}"
            more["early"] = ": ".join(filter(None, [early, self._early]))
            more["planned_steps"] = self.last_step
            log.info(f"finished early {more['early']}")
            self._progress.close()
        result, spent_s = self._result, gather_numbers(self.clock.seconds())
        for line in self._advice(spent_s):
            log.info(line)
        steps_s = self._steps_s(spent_s[0])
        summary: dict[str, Any] = {
            "epochs": epochs,
            "steps": self.state.step,
            **self._metrics,
            **({"val_correct": result.correct} if result.correct is not None else {}),
            "val_total": result.total,
            **self._speed.measured(),
            "peak_memory_bytes": peak_memory_bytes(self.run.devices),
            "start_s": self.run.start_s,
            "time_s": dict(zip(KINDS, spent_s.T.round(decimals=3).tolist(), strict=True)),
            "goodput": round(steps_s / self._since_first_s(steps_s), 4),
            "resumed_from": self._resumed_from,
        }
        summary |= self._best.summary()
        all_epochs = self.state.step == self.plan.all_steps
        weights = self._of_model(state_dict)
        self.run.finish(weights, all_epochs=all_epochs, **(summary | more))
        batch_wait.end()
        self._stop.release()  # only now: a signal shortly before the end lets the run finish
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _steps_s(self, spent_s: Tensor) -> float:
        """Time of rank 0's steps that count, over all starts that left a snapshot [s]."""
        return float(self._history["steps_s"] + steps_s(spent_s[None]))

    def _since_first_s(self, at_least_s: float) -> float:
        """Time since the first start that left a snapshot [s].

        A clock may have been set back meanwhile: not less than `at_least_s`.
        """
        return max(time.time() - float(self._history["first"]), at_least_s, 1e-9)

    def _interrupt(self, _number: int, _frame: object) -> NoReturn:
        """Ctrl-C: name the newest snapshot on the disk, and end. One being written is completed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.run.ranks.is_main:
            newest = "unknown"
            with suppress(OSError):
                newest = snapshot_files.newest_name(self.run.snapshots)
            say(
                f"\ninterrupted at step {self.state.step}; newest snapshot: {newest}; to resume, "
                f"run the same command with --output-dir {self.run.folder}"
            )
        with suppress(TrainingError):
            run_status.say(run_status.STOPPED)
        raise KeyboardInterrupt

    def _leave(self) -> NoReturn:
        self._best.write()
        self.save()
        self.state.wait()
        self._profile.end()
        # Under slurm/job.sh the job is requeued, and says so.
        by_hand = f": to resume, run the same command with --output-dir {self.run.folder}"
        log.info(
            f"stopped after step {self.state.step}"
            f"{'' if 'RECIPES_STATUS' in os.environ else by_hand}"
        )
        run_status.say(run_status.STOPPED)
        raise StopRequested


def _refuse_other_parts(parts: Mapping[str, Any]) -> None:
    """Raise TrainingError unless each part has a state, and the model is one of them."""
    if "model" not in parts:
        given = ", ".join(parts) or "nothing"
        raise TrainingError(f"loop.resume needs model=, the model that is trained, got {given}")
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TrainingError(
                f"loop.resume({name}=...) needs an object with state_dict() and load_state_dict(), "
                f"such as a model or an optimizer, got {type(part).__name__}"
            )
