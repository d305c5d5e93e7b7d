"""DistributedDataParallel, a process a device, started by a launcher.

Every rank holds a copy of the model and takes its slice of each global batch; gradients are
averaged while the backward pass runs, so all copies take the same step. Use it whenever the model
fits on one device, on one host or several; where it does not fit, split the model instead.

    make run RECIPE=ddp_launch                                 one machine, GPUs or CPUs
    torchrun --nproc-per-node 2 -m recipes.ddp_launch.train    the same, started by torchrun
    srun python -m recipes ddp_launch                          a Slurm task a device

The default takes about 10 s on 2 CPU cores and reaches a validation accuracy of 0.98.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import snapshot
from common.data import DataOptions, load_data, make_loaders
from common.ddp import settle_buckets, synchronize_batch_norm
from common.errors import StopRequested
from common.evaluate import evaluate
from common.group import choose_device, gather_number, process_group
from common.manifest import describe_run
from common.measure import Throughput, peak_memory_bytes
from common.models import ModelOptions, prepare_model, set_train_mode
from common.optim import OptimizerOptions
from common.ranks import Ranks
from common.record import Run, RunOptions, announce, log, progress_bar, set_up_logs
from common.seeds import mixed_precision, seed_everything, set_determinism
from common.stop import StopAgreement
from recipes import cli

NAME = "ddp_launch"
LAUNCHED = "ranks"  # see recipes.cli


@dataclass(frozen=True)
class ParallelOptions:
    """How the copies work together."""

    sync_bn: bool = False
    """BatchNorm over the global batch instead of each rank's slice; GPUs only."""


@dataclass(frozen=True)
class Config:
    """All options; those of a group mean the same in every recipe."""

    run: RunOptions = field(default_factory=RunOptions)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


def train(config: Config, ranks: Ranks) -> None:
    """Train as one rank of the run, whose folder is `config.run.output_dir`."""
    options, seed = config.optimizer, config.run.seed
    set_up_logs(ranks)

    # seed
    set_determinism(deterministic=config.run.deterministic, cpu_threads=config.run.cpu_threads)
    seed_everything(seed)  # the same initial weights on every rank
    device = choose_device(config.run.device, ranks)
    announce(NAME, config.run, ranks, device)
    dtype, autocast, scaler = mixed_precision(config.run.precision, device)
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        run = Run(NAME, config, config.run, ranks, device)

        # data
        data = load_data(config.data, seed, ranks)
        batch_size = options.total_batch_size(ranks.world_size)
        batches, loader, val_loader = make_loaders(
            data, config.data, batch_size, seed, ranks, device
        )

        # model
        model = prepare_model(config.model, data.channels, len(data.class_names))
        model.to(device, dtype)

        # parallelise
        if config.parallel.sync_bn:
            model = synchronize_batch_norm(model, device)
        # Sends rank 0's weights to all ranks, and averages gradients while backward() runs.
        ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # saves one copy of the gradients
        )

        # optimizer
        optimizer = torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
        )

        # resume
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        state = snapshot.TrainingState(model, optimizer, scaler, loss_sum)
        identity = run.identity(batch_size, data.fingerprint)
        found = snapshot.find(config.run.resume, run.snapshots, identity)
        seed_everything(seed, ranks.rank)  # from here on each rank draws its own dropout
        if found:
            state.resume(found, seed)
        total_steps = options.epochs * batches.steps_per_epoch
        last_step = min(options.max_steps or total_steps, total_steps)
        if found and run.finished(last_step):
            return
        manifest = describe_run(device, seed, data.fingerprint)
        run.begin(manifest, state, data.class_names, batch_size)
        set_train_mode(model)
        # A resumed run must add gradients up in the same order as one that was never stopped.
        image, _ = data.train[(0, 0)]
        settle_buckets(ddp, image.to(device, dtype), batches.batch_size_per_rank, autocast)

        # loop
        resumed_from = state.step if found else None
        stop, speed = StopAgreement(), Throughput(device)
        progress = progress_bar(last_step, state.step, ranks)

        def save() -> None:
            with speed.paused():
                state.metrics_bytes = run.metrics_bytes
                state.save(run.snapshots, identity, config.run.keep_snapshots)

        def leave() -> None:
            save()
            log.info(f"stopped after step {state.step}: to go on, run the same command "
                     f"with --output-dir {run.folder}")  # fmt: skip
            raise StopRequested

        while True:
            batches.set_epoch(state.epoch, first_batch=state.batch)
            # Nothing is left of an epoch whose snapshot was written before its evaluation.
            for images, labels in loader if state.step < last_step else ():
                lr = options.learning_rate(state.step, batches.steps_per_epoch, batch_size)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                with autocast:
                    logits = ddp(images.to(device, dtype, non_blocking=True))
                    loss = nn.functional.cross_entropy(logits, labels.to(device, non_blocking=True))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                state.loss_sum += loss.detach()
                state.batch += 1
                state.step += 1
                speed.samples += batch_size
                progress.update()
                if state.step % config.run.log_every == 0:
                    losses = gather_number(loss.item())
                    snapshot.refuse_non_finite(losses, state.step, run.snapshots)
                    mean_loss = sum(losses) / ranks.world_size
                    progress.set_postfix({"loss": f"{mean_loss:.4f}"}, refresh=False)
                    run.metrics(state.step, state.epoch, loss=mean_loss, lr=lr,
                                samples_per_s=speed.samples_per_s)  # fmt: skip
                if stop.after(state.step):
                    leave()
                if config.run.snapshot_every and state.step % config.run.snapshot_every == 0:
                    save()
                if state.step == last_step:
                    break
            save()
            with speed.paused():  # the model inside: ddp's forward would wait for its peers
                result = evaluate(model, val_loader, len(data.val), device, dtype)
            snapshot.refuse_non_finite([result.loss], state.step, run.snapshots)
            train_loss = sum(gather_number(state.loss_sum.item() / state.batch)) / ranks.world_size
            run.metrics(state.step, state.epoch, train_loss=train_loss, val_loss=result.loss,
                        val_accuracy=result.accuracy)  # fmt: skip
            log.info(
                f"epoch {state.epoch + 1}/{options.epochs}: train_loss {train_loss:.4f}, "
                f"val_loss {result.loss:.4f}, val_accuracy {result.accuracy:.4f}"
            )
            if config.run.epoch_weights:
                run.save_epoch_weights(model.state_dict(), state.epoch)
            if state.step >= last_step:
                break
            if stop.after(state.step, at_once=True):
                leave()
            state.next_epoch()
        progress.close()

        # report
        run.finish(
            model.state_dict(),
            epochs=state.epoch + 1,
            steps=state.step,
            train_loss=train_loss,
            val_accuracy=result.accuracy,
            val_correct=result.correct,
            val_total=result.total,
            samples_per_s=speed.samples_per_s,
            peak_memory_bytes=peak_memory_bytes(device),
            resumed_from=resumed_from,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
