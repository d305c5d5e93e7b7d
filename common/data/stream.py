"""The sample stream: a pure function of (seed, epoch, index), whatever the number of ranks.

Which samples form global batch b of epoch e, and how each is augmented, depends on the seed, e and
the sample's index alone: not on the number of ranks or workers, nor on where a run was resumed.
Exact resume in the middle of an epoch and the same training at any world size follow from that.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from common.errors import STOP_SIGNALS, InputError, multiples_near
from common.seeds import mix

Key = tuple[int, int]
"""(epoch, index of the sample): all that a sample depends on besides the seed."""


class Samples(Dataset[tuple[Tensor, int]]):
    """Map-style samples whose random augmentation is keyed by (seed, epoch, index).

    Args:
        source: `source[index]` gives (image, label).
        indices: the source's indices that belong to this split.
        transform: image to tensor; may draw from torch's CPU generator.
        seed: of the run.
    """

    def __init__(
        self,
        source: Any,
        indices: Sequence[int],
        transform: Callable[[Any], Tensor],
        seed: int,
    ) -> None:
        self.source, self.indices, self.transform, self.seed = source, indices, transform, seed
        self._drawn_for, self._draws = -1, np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        """Image (channels, height, width) and class of the sample `key`."""
        images, labels = self.__getitems__([key])
        return images[0], int(labels[0])

    def __getitems__(self, keys: Sequence[Key]) -> list[Tensor]:
        """Images (samples, channels, height, width) and classes of a batch, of one epoch.

        A DataLoader asks for it where it is there, and would collate what it gets: see
        `make_loader`.
        """
        # The model's dropout draws from the same generator when no worker process loads.
        before, samples = torch.get_rng_state(), []
        try:
            for (_, index), seed in zip(keys, self.seeds_of(keys).tolist(), strict=True):
                image, label = self.source[self.indices[index]]
                torch.default_generator.manual_seed(seed)
                samples.append((self.transform(image), int(label)))
        finally:
            torch.set_rng_state(before)
        batch: list[Tensor] = default_collate(samples)
        return batch

    def seeds_of(self, keys: Sequence[Key]) -> NDArray[np.uint64]:
        """A number for each key of one epoch: those that (seed, epoch) gives, drawn at once."""
        epoch = keys[0][0]
        assert all(key_epoch == epoch for key_epoch, _ in keys)
        if epoch != self._drawn_for:
            generator = np.random.PCG64(mix(self.seed, epoch))
            self._drawn_for, self._draws = epoch, generator.random_raw(len(self.indices))
        drawn: NDArray[np.uint64] = self._draws[[index for _, index in keys]]
        return drawn


class GlobalBatches(Sampler[list[Key]]):
    """This rank's share of each global batch, from any batch of any epoch on.

    Global batch b of an epoch is entries b·B to (b+1)·B of one permutation drawn from (seed,
    epoch); rank r takes the r-th of its world_size equal slices. So the union over ranks is the
    same for every world size, as with torch's DistributedSampler, which cannot start in the middle
    of an epoch. What does not fill a batch at the end is left out of that epoch (drop_last).

    Raises:
        InputError: a batch that world_size does not divide, or larger than the data.
    """

    def __init__(
        self, samples: int, global_batch_size: int, seed: int, rank: int, world_size: int
    ) -> None:
        if global_batch_size % world_size:
            raise InputError(
                f"--global-batch-size {global_batch_size} is not divided by the {world_size} "
                f"processes: {multiples_near(global_batch_size, world_size)} would be"
            )
        if global_batch_size > samples:
            raise InputError(
                f"--global-batch-size {global_batch_size} is more than the {samples} samples of "
                f"the training data: give --global-batch-size {samples} or less"
            )
        self.samples, self.global_batch_size, self.seed = samples, global_batch_size, seed
        self.rank, self.batch_size_per_rank = rank, global_batch_size // world_size
        self.steps_per_epoch = samples // global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_batch: int = 0, steps: int | None = None) -> None:
        """Choose what the next iteration gives: batches of `epoch`, from `first_batch` on.

        Args:
            epoch: counted from 0.
            first_batch: of the epoch; what comes before was done before a resume.
            steps: how many batches at most. None: to the end of the epoch.
        """
        left = self.steps_per_epoch - first_batch
        self.epoch, self.first_batch = epoch, first_batch
        self.last_batch = first_batch + (left if steps is None else min(left, steps))

    def __len__(self) -> int:
        return self.last_batch - self.first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        """Lists of `batch_size_per_rank` keys."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.samples, generator=generator).tolist()
        for batch in range(self.first_batch, self.last_batch):
            start = batch * self.global_batch_size + self.rank * self.batch_size_per_rank
            yield [(self.epoch, index) for index in order[start : start + self.batch_size_per_rank]]


class BatchStream(IterableDataset[list[Tensor]]):
    """The same batches as an iterable, sharded by hand by rank and by worker process.

    Each worker would otherwise repeat the whole stream. Worker w of n makes batches w, w + n, ...;
    a DataLoader takes from its workers in turn, so the order is the map-style one.
    """

    def __init__(self, samples: Samples, batches: GlobalBatches) -> None:
        self.samples, self.batches = samples, batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for keys in islice(self.batches, first, None, step):
            yield self.samples.__getitems__(keys)


def eval_batch_size(samples: int) -> int:
    """Samples per evaluation batch: 32 for small data sets, so that many ranks get equal shares.

    It depends on the size of the data set and never on the number of ranks: the batch in which a
    sample is computed may decide the last bits of its result.
    """
    return min(256, max(32, samples // 64))


def fixed_batches(samples: int, batch_size: int, rank: int, world_size: int) -> list[list[Key]]:
    """Batches for evaluation: every sample once, none twice, whole batches dealt out to ranks.

    A batch holds the same samples whatever the world size, so that each sample's result has the
    same bits; only who computes it changes.
    """
    starts = range(rank * batch_size, samples, world_size * batch_size)
    return [[(0, i) for i in range(s, min(s + batch_size, samples))] for s in starts]


def make_loader(
    samples: Samples,
    batches: GlobalBatches | list[list[Key]],
    *,
    style: str = "map",
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A DataLoader over `batches` that leaves the run's own random generators alone.

    Args:
        samples: what the keys of `batches` look up.
        batches: lists of keys, `GlobalBatches` or fixed.
        style: "map", or "stream" for the same batches through `BatchStream`.
        num_workers: loading processes; 0 loads in the training process.
        pin_memory: load into page-locked memory, for copies to a GPU that overlap.
    """
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "generator": torch.Generator(),  # else each epoch draws from the training's generator
        "worker_init_fn": _leave_endings_to_training,
        # A rank that was itself spawned would else spawn its workers too: 2 s more, each epoch
        # for a stream. They touch no GPU, so that forking is safe.
        "multiprocessing_context": "fork" if num_workers else None,
    }
    if style == "stream" and isinstance(batches, GlobalBatches):
        # A stream's workers hold their own copy of the position, so each epoch starts them anew.
        return DataLoader(BatchStream(samples, batches), batch_size=None, **options)
    return DataLoader(
        samples,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        persistent_workers=num_workers > 0,
        **options,
    )


def _as_it_is(batch: list[Tensor]) -> list[Tensor]:
    return batch


def _leave_endings_to_training(_worker: int) -> None:
    # A scheduler signals a job's every process: a worker that died of SIGTERM would turn an
    # orderly stop into a crash. Workers end when their queue closes or their parent is gone.
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # A rank that ends while a batch is handed over says so itself.
    sys.excepthook = _say_all_but_a_lost_rank


def _say_all_but_a_lost_rank(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
