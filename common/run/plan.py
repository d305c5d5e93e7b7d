"""What a run will do, decided once: batch sizes, steps, and the learning rate of each step.

This is the only place that computes or refuses a size. It needs no process group and no device.
"""

import math
from dataclasses import dataclass, replace

from common import log
from common.data.stream import shards_of, whole_share
from common.errors import InputError, multiples_near
from common.training.optimizer import Default, ScheduleOptions

STEPS_PER_EPOCH = 10
"""The default batch is small enough for so many steps per epoch; a run with fewer warns."""


@dataclass(frozen=True)
class Plan:
    """Sizes, steps and rates of one run; the same on every rank."""

    options: ScheduleOptions
    """As given, with the learning rate fitted to the data."""
    samples: int
    """Samples of the training data."""
    sizes: tuple[int, ...]
    """Samples of each rank's share of a global batch."""
    micro_batch_size: int
    """Samples that a rank computes at once, where the ranks have equal shares."""
    loss_divisor: int
    """A rank divides the sum of its samples' losses by this number before backward().
    With equal shares it is the samples per rank, so that the mean over ranks is the batch's mean.
    With unequal shares it is the samples of as many shards as every rank has, rounded down to a
    power of two: that factor rounds nothing, and `common.training.virtual_ranks` takes it back."""

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return sum(self.sizes)

    @property
    def even(self) -> bool:
        """Whether all ranks have equal shares."""
        return len({*self.sizes}) == 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per pass over the data."""
        return self.samples // self.global_batch_size

    @property
    def left_out(self) -> int:
        """Samples that fill no batch: others in each epoch."""
        return self.samples % self.global_batch_size

    @property
    def all_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.options.epochs * self.steps_per_epoch

    @property
    def last_step(self) -> int:
        """The run's last optimizer step, counted from 1."""
        return min(self.options.max_steps or self.all_steps, self.all_steps)

    @property
    def peak_lr(self) -> float:
        """The highest learning rate, by linear scaling if the options ask for it."""
        base = self.options.scale_lr
        return self.options.lr * (self.global_batch_size / base if base else 1)

    def lr(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0.

        Sources: linear scaling with warm-up, Goyal et al. 2017 (arXiv 1706.02677), section 2;
        cosine, Loshchilov & Hutter 2016 (arXiv 1608.03983), equation 5.
        """
        options, peak, per_epoch = self.options, self.peak_lr, self.steps_per_epoch
        warmup = round(options.warmup_epochs * per_epoch)
        if step < warmup:
            return peak * (step + 1) / warmup
        if options.lr_schedule == "constant":
            return peak
        done, rest = step - warmup, max(1, self.all_steps - 1 - warmup)
        if options.lr_schedule == "cosine-by-epoch":  # the last epoch does not reach the final rate
            done, rest = step // per_epoch * per_epoch - warmup, rest + 1
        cosine = (1 + math.cos(math.pi * min(1.0, max(0, done) / rest))) / 2
        return peak * (options.lrf + (1 - options.lrf) * cosine)


def batch_size_of(options: ScheduleOptions, samples: float = math.inf, parts: int = 1) -> int:
    """The global batch size: as given, or near the default in as many equal parts.

    Args:
        options: with a batch size for each rank, `parts` counts the ranks.
        samples: of the data set; the default is halved until an epoch has ten steps.
        parts: equal parts.
    """
    given = (options.batch_size_per_rank or 0) * parts or options.global_batch_size
    return given or max(1, round(_usual(options, samples) / parts)) * parts


def _usual(options: ScheduleOptions, samples: float) -> int:
    """The default batch size for the data; below 8 only if there are fewer samples than that."""
    size = options.default_batch_size
    while size > samples > 0 or (size >= 16 and samples // size < STEPS_PER_EPOCH):
        size //= 2
    return size


def make_plan(
    options: ScheduleOptions,
    samples: int,
    ranks: int,
    *,
    virtual_ranks: int = 0,
    micro_batches: int = 1,
    cut_by: str = "--accumulate",
    devices: int = 1,
    uneven: bool = False,
) -> Plan:
    """Decide what a run will do, and say where batch size and learning rate come from.

    An epoch leaves out the samples that fill no batch, others in each epoch. With ten steps or
    more they are less than a tenth of the data. A smaller last batch would leave out none, but its
    samples would weigh more, and most numbers of ranks would not divide it.

    Args:
        options: batch size, length and learning rate, as given.
        samples: of the training data.
        ranks: that share each batch.
        virtual_ranks: shards of each batch, dealt out to the ranks; 0: none.
        micro_batches: equal parts into which each rank cuts its share.
        cut_by: the option that gives `micro_batches`.
        devices: of each rank, which share its batch.
        uneven: the devices' parts may differ by one sample.

    Raises:
        InputError: no such batch is possible; or it is 5,000 or more, and its learning rate is
            scaled without warm-up.
    """
    workers, shards = ranks * devices, virtual_ranks or ranks
    parts = virtual_ranks or workers * micro_batches
    if shards < ranks:
        raise InputError(
            f"--virtual-ranks {shards} is less than {ranks} processes: start {shards} or fewer"
        )
    if shards % ranks and options.batch_size_per_rank:
        raise InputError(
            f"--virtual-ranks {shards} gives {ranks} processes unequal shares: give "
            "--global-batch-size, not --batch-size-per-rank"
        )
    per_rank = (options.batch_size_per_rank or 0) * workers
    size = per_rank or batch_size_of(options, samples, parts)
    refuse_size(
        size,
        samples,
        workers=workers,
        who="devices" if devices > 1 else "processes",
        virtual_ranks=virtual_ranks,
        micro_batches=micro_batches,
        cut_by=cut_by,
        uneven=uneven,
    )
    if options.scale_lr and not options.warmup_epochs and size >= 5000:
        raise InputError(f"--scale-lr for a global batch of {size} needs --warmup-epochs")
    source, fitted, rate = "--global-batch-size", options, f"--lr {options.lr:g}"
    if isinstance(options.lr, Default):
        rate = f"default {options.lr:g}"
    if options.batch_size_per_rank:
        source = f"--batch-size-per-rank {options.batch_size_per_rank} x {workers}"
    elif not options.global_batch_size:
        usual, default = _usual(options, samples), options.default_batch_size
        source = f"default {default}"
        if usual < default:
            source += f", halved to {usual} for more steps per epoch"
            if isinstance(options.lr, Default) and not options.scale_lr:
                fitted = replace(options, lr=options.lr * usual / default)
                rate += f" x {usual} / {default}"
        if size != usual:
            source += f", the nearest multiple of {parts}"
    if options.scale_lr:
        rate += f" x {size} / {options.scale_lr}"
    plan = Plan(
        fitted,
        samples,
        tuple(size // shards * len(shards_of(rank, ranks, shards)) for rank in range(ranks)),
        size // ranks // micro_batches,
        size // shards * whole_share(ranks, shards),
    )
    log.info(
        f"batch size {size} ({source}), steps per epoch: {plan.steps_per_epoch}, "
        f"learning rate {plan.peak_lr:g} ({rate})"
    )
    _warn(plan, parts)
    return plan


def refuse_size(
    size: int,
    samples: int,
    *,
    workers: int = 1,
    who: str = "processes",
    virtual_ranks: int = 0,
    micro_batches: int = 1,
    cut_by: str = "",
    uneven: bool = False,
) -> None:
    """Raise InputError if the data have no such batch, or it cannot be cut as `make_plan` says.

    Each advice is a size that would be taken.
    """
    who = f"{workers} {who}"
    parts = virtual_ranks or workers * micro_batches
    most = samples - samples % (1 if uneven else parts)
    too_few = f"{samples} samples of training data are too few for"
    if samples < parts:
        if virtual_ranks:
            raise InputError(f"{too_few} --virtual-ranks {virtual_ranks}: give a smaller number")
        if micro_batches > 1 and samples >= workers:
            raise InputError(
                f"{too_few} {cut_by} {micro_batches} on {who}, which needs {parts}: give "
                f"{cut_by} {samples // workers} or less"
            )
        raise InputError(f"{too_few} {who}: each needs one sample per step: start fewer processes")
    if size > samples:
        raise InputError(
            f"--global-batch-size {size} is more than the {samples} samples of the training data: "
            f"give --global-batch-size {most} or less"
        )
    would_do = multiples_near(size, parts, most)
    if virtual_ranks:
        if size % virtual_ranks:
            raise InputError(
                f"--virtual-ranks {virtual_ranks} does not divide the global batch of {size}: "
                f"{would_do} samples would do"
            )
    elif uneven:
        if size < workers:
            raise InputError(f"--global-batch-size {size} is less than {who}: give {workers}")
    elif size % workers:
        raise InputError(f"--global-batch-size {size} cannot be divided by {who}: give {would_do}")
    elif size % parts:
        raise InputError(
            f"{cut_by} {micro_batches} does not divide a rank's batch of {size // workers}: give "
            f"--global-batch-size {would_do}"
        )


def _warn(plan: Plan, parts: int) -> None:
    options, size, steps = plan.options, plan.global_batch_size, plan.steps_per_epoch
    if options.scale_lr and not options.warmup_epochs:
        log.warning(
            f"--scale-lr without --warmup-epochs: training begins with --lr {plan.peak_lr:g}"
        )
    if steps < STEPS_PER_EPOCH:
        usual = _usual(options, plan.samples)
        smaller = max(1, min(usual, plan.samples // STEPS_PER_EPOCH) // parts) * parts
        would = f"with --global-batch-size {smaller} there would be {plan.samples // smaller}"
        small = f"the data set has {plan.samples} samples only"
        log.warning(f"few steps per epoch: {would if smaller < size else small}")
    if options.warmup_epochs >= options.epochs:
        log.warning(
            f"--warmup-epochs {options.warmup_epochs:g} of --epochs {options.epochs}: the learning "
            "rate rises until the end"
        )
