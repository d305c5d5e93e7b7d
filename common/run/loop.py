"""What happens between two training steps: log, save, stop, resume.

The loop and its step stay in the recipe. The order of events between two steps, on which an exact
resume depends, is here in one place.
"""

import os
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common.data.datasets import Data
from common.data.stream import GlobalBatches
from common.errors import StopRequested
from common.files import save_weights
from common.group.collectives import gather_numbers
from common.group.stop import StopAgreement
from common.launch.report import say
from common.run import snapshot, snapshot_files
from common.run.folder import Run
from common.run.snapshot import Stateful, TrainingState
from common.seeds import seed_everything
from common.terminal import log, progress_bar
from common.throughput import Throughput, peak_memory_bytes
from common.training.evaluate import Evaluation
from common.training.optimizer import OptimizerOptions


class Loop:
    """The state of a run between two steps. Every rank has a Loop and makes the same calls.

    After each step: count it; log it (`--log-every`); stop if any rank was asked to; write a
    snapshot (`--snapshot-every`). After an epoch's last step: write a snapshot, evaluate, log, stop
    if any rank was asked to, begin the next epoch.

    `parts` and `mesh` are those of `TrainingState`.
    """

    def __init__(
        self,
        run: Run,
        parts: Mapping[str, Stateful],
        options: OptimizerOptions,
        batches: GlobalBatches,
        data: Data,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.run, self.options, self.batches, self.data = run, options, batches, data
        loss_sum = torch.zeros((), dtype=torch.float64, device=run.devices[0])
        self.state = TrainingState(parts, loss_sum, mesh)
        total_steps = options.epochs * batches.steps_per_epoch
        self.last_step = min(options.max_steps or total_steps, total_steps)
        self._identity = run.identity(batches.global_batch_size, data.fingerprint)

    def resume(self) -> bool:
        """Load the newest snapshot if there is one, and open the run's files.

        Returns:
            False if this run is already finished.
        """
        run, state, seed = self.run, self.state, self.run.options.seed
        run.refuse_another_run()
        found = snapshot_files.find(run.options.resume, run.snapshots, self._identity)
        if run.finished(self.last_step, can_resume=found is not None):
            return False
        seed_everything(seed, run.ranks.rank)  # from here on each rank draws its own dropout
        if found:
            state.resume(found, seed)
        self._resumed_from = state.step if found else None
        run.begin(state, self.data, self.batches.global_batch_size)
        return True

    def epochs(self) -> range:
        """Begin to listen for stop signals; return the epochs still to do, counted from 0."""
        self._stop, self._speed = StopAgreement(), Throughput(self.run.devices)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored
            signal.signal(signal.SIGINT, self._interrupt)
        self._progress = progress_bar(self.last_step, self.state.step, self.run.ranks)
        first, end = self.state.epoch, -(-self.last_step // self.batches.steps_per_epoch)
        return range(first, max(end, first + 1))  # perhaps only the last evaluation is missing

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the run's last one."""
        return max(0, self.last_step - self.state.step)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        steps_per_epoch, batch_size = self.batches.steps_per_epoch, self.batches.global_batch_size
        return self.options.learning_rate(self.state.step, steps_per_epoch, batch_size)

    def after_step(self, losses: Tensor) -> None:
        """Count a step, log it, and stop or save after it if that is due.

        Args:
            losses: of this rank's samples in the batch's order, or their mean. With one loss per
                sample, the bits of the logged mean do not depend on the number of ranks.

        Raises:
            TrainingError: a loss is not finite, on any rank; raised on every rank.
            StopRequested: a signal came; the state is saved.
        """
        run, state, lr = self.run, self.state, self.lr
        state.loss_sum = state.loss_sum + losses.detach().double()
        state.batch += 1
        state.step += 1
        self._speed.add(self.batches.global_batch_size)
        self._progress.update()
        if state.step % run.options.log_every == 0:
            gathered = gather_numbers(losses.detach())
            snapshot.refuse_non_finite(gathered, state.step, run.snapshots)
            mean_loss = gathered.flatten().mean().item()
            self._progress.set_postfix({"loss": f"{mean_loss:.4f}"}, refresh=False)
            run.metrics(
                state.step,
                state.epoch,
                loss=mean_loss,
                lr=lr,
                samples_per_s=self._speed.samples_per_s,
            )
        if self._stop.after(state.step):
            self._leave()
        every = run.options.snapshot_every
        if every and state.step % every == 0:
            self.save()
            self._speed.resume()

    def save(self) -> None:
        """Write a snapshot of this step, unless there is one; pause the measurement of speed."""
        self._speed.pause()
        self.state.metrics_bytes, self.state.metrics_sha256 = self.run.metrics_so_far()
        self.state.save(self.run.snapshots, self._identity, self.run.options.keep_snapshots)

    def whole_model(self) -> dict[str, Tensor]:
        """The whole model's state_dict on rank 0, from the last snapshot's shards. A collective."""
        return self.state.whole_model(self.run.folder)

    def after_epoch(self, result: Evaluation, state_dict: dict[str, Tensor]) -> None:
        """Log the epoch, then move to the next one, or stop before it.

        Args:
            result: on the validation data.
            state_dict: of the unwrapped model, for `--epoch-weights`.

        Raises:
            TrainingError: the validation loss is not finite.
            StopRequested: a signal came; the state is saved.
        """
        run, state = self.run, self.state
        snapshot.refuse_non_finite(torch.tensor([[result.loss]]), state.step, run.snapshots)
        losses = gather_numbers(state.loss_sum / state.batch)
        self._train_loss, self._result = losses.flatten().mean().item(), result
        run.metrics(
            state.step,
            state.epoch,
            train_loss=self._train_loss,
            val_loss=result.loss,
            val_accuracy=result.accuracy,
        )
        log.info(
            f"epoch {state.epoch + 1}/{self.options.epochs}: train_loss {self._train_loss:.4f}, "
            f"val_loss {result.loss:.4f}, val_accuracy {result.accuracy:.4f}"
        )
        if run.options.epoch_weights and run.ranks.is_main:
            save_weights(state_dict, run.folder / "weights" / f"epoch_{state.epoch:04d}.pt")
        self._speed.resume()
        if self.steps_left:
            if self._stop.after(state.step, at_once=True):
                self._leave()
            state.next_epoch()
        else:
            self._progress.close()

    def finish(self, state_dict: dict[str, Tensor], **more: Any) -> None:
        """Write the model and the summary, to which `more` is added."""
        self.state.wait()
        result = self._result
        summary = {
            "epochs": self.state.epoch + 1,
            "steps": self.state.step,
            "train_loss": self._train_loss,
            "val_accuracy": result.accuracy,
            "val_correct": result.correct,
            "val_total": result.total,
            "samples_per_s": self._speed.samples_per_s,
            "peak_memory_bytes": peak_memory_bytes(self.run.devices),
            "resumed_from": self._resumed_from,
        }
        self.run.finish(state_dict, **(summary | more))
        self._stop.release()  # only now: a signal shortly before the end lets the run finish
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, _number: int, _frame: object) -> NoReturn:
        """Ctrl-C: end at once, and say from where the run can resume."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        saved = self.state.saved_step
        kept = f"the last snapshot is of step {saved}" if saved >= 0 else "there is no snapshot yet"
        if self.run.ranks.is_main:
            say(
                f"\ninterrupted at step {self.state.step}; {kept}: to resume, run the same command "
                f"with --output-dir {self.run.folder}"
            )
        raise KeyboardInterrupt

    def _leave(self) -> NoReturn:
        self.save()
        self.state.wait()
        # Under slurm/job.sh the job is requeued, and says so.
        by_hand = f": to resume, run the same command with --output-dir {self.run.folder}"
        log.info(
            f"stopped after step {self.state.step}"
            f"{'' if 'RECIPES_STOP_MARK' in os.environ else by_hand}"
        )
        raise StopRequested
