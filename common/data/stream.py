"""The sample stream: which samples form which batch, and how each sample is augmented.

Global batch b of epoch e depends on the seed, e and b only, and a sample's augmentation on the
seed, e and the sample's index only. Neither depends on the number of ranks or loading processes, or
on where a run was resumed. So a run can resume in the middle of an epoch, and trains on the same
samples at any world size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, default_collate

from common.data.broken import make_batch, read_sample, refuse_other_labels
from common.errors import InputError
from common.seeds import lent_generators, mix, seed_cpu

Key = tuple[int, int]
"""(epoch, index of the sample): with the seed, all that a sample depends on."""


class Samples(Dataset[Any]):
    """Samples of a map-style data set; their random augmentation is keyed by (seed, epoch, index).

    Args:
        source: `source[index]` gives a sample, and may draw from Python's, NumPy's and torch's
            generators. If it has a method `will_read`, that hears the indices of a batch before.
        indices: the source's indices that belong to this split.
        seed: keys the augmentation.
        collate: makes a batch of a list of samples.

    Raises:
        InputError: the indices are no whole numbers; True and False would be samples 1 and 0.
    """

    def __init__(
        self,
        source: Any,
        indices: Sequence[int] | NDArray[Any],
        seed: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        given = np.asarray(() if isinstance(indices, range) else indices)
        if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
            raise InputError(
                f"the indices of Samples are {given.dtype} of shape {given.shape}: give a list of "
                "whole numbers; for a mask, np.flatnonzero(mask)"
            )
        self.source, self.indices, self.seed, self.collate = source, indices, seed, collate
        self.classes = 0
        """Number of classes, if the labels of a batch (inputs, labels) are classes; else 0."""
        self._drawn_for, self._draws = -1, np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> Any:
        """A batch of one sample, without the dimension of the batch."""
        return tree_map_only(Tensor, lambda tensor: tensor[0], self.__getitems__([key]))

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """A batch of samples of one epoch. A DataLoader calls this method if a data set has it.

        Raises:
            TrainingError: a sample cannot be read, or fits no batch; it is named.
        """
        samples = []
        indices = [int(self.indices[index]) for _, index in keys]
        if will_read := getattr(self.source, "will_read", None):
            will_read(indices)
        # If no process loads, the model's dropout draws from the same generators.
        with lent_generators():
            for index, seed in zip(indices, self.seeds_of(keys).tolist(), strict=True):
                seed_cpu(seed)
                samples.append(read_sample(self.source, index))
        batch = make_batch(self.collate, samples, indices, self.source)
        refuse_other_labels(batch, self.classes, indices, self.source)
        return batch

    def seeds_of(self, keys: Sequence[Key]) -> NDArray[np.uint64]:
        """A seed for each key of one epoch; the seeds of a whole epoch are drawn at once."""
        epoch = keys[0][0]
        assert all(key_epoch == epoch for key_epoch, _ in keys)
        if epoch != self._drawn_for:
            generator = np.random.PCG64(mix(self.seed, epoch))
            self._drawn_for, self._draws = epoch, generator.random_raw(len(self.indices))
        drawn: NDArray[np.uint64] = self._draws[[index for _, index in keys]]
        return drawn


def shards_of(rank: int, world_size: int, shards: int) -> range:
    """The shards of each batch that a rank computes: as many as any other rank, or one more.

    Rank 0, which also logs and saves, never has the one more.
    """
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def whole_share(world_size: int, shards: int) -> int:
    """The largest power of two of shards that every rank has."""
    return int(2 ** ((shards // world_size).bit_length() - 1))


class GlobalBatches:
    """This rank's share of each global batch: lists of keys, from any batch of any epoch on.

    Global batch b of an epoch is entries b·B to (b+1)·B of one permutation drawn from (seed,
    epoch); rank r takes the r-th of its slices, whose sizes are given. The last samples, which do
    not fill a batch, are left out of that epoch. torch's DistributedSampler makes the same promise,
    but it cannot start in the middle of an epoch.

    Args:
        samples: of the training data.
        sizes: of each rank's share; their sum is B.
        seed: of the order.
        share: number of this rank's share.
    """

    def __init__(self, samples: int, sizes: Sequence[int], seed: int, share: int) -> None:
        self.samples, self.global_batch_size, self.seed = samples, sum(sizes), seed
        self.batch_size_per_rank = sizes[share]
        self._begin = sum(sizes[:share])
        self.steps_per_epoch = samples // self.global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_batch: int = 0, steps: int | None = None) -> None:
        """Choose what the next iteration gives.

        Args:
            epoch: counted from 0.
            first_batch: first batch of the epoch, counted from 0; a resumed run skips the others.
            steps: at most so many batches. None: to the end of the epoch.
        """
        self.epoch, self.first_batch, self.last_batch = epoch, first_batch, self.steps_per_epoch
        if steps is not None:
            self.last_batch = min(self.last_batch, first_batch + steps)

    def __len__(self) -> int:
        return self.last_batch - self.first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        """Lists of `batch_size_per_rank` keys."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        # The same order as in int64; Python's own numbers would take 40 bytes each.
        small = torch.int32 if self.samples < 2**31 else torch.int64
        order = torch.randperm(self.samples, generator=generator, dtype=small)
        for batch in range(self.first_batch, self.last_batch):
            start = batch * self.global_batch_size + self._begin
            mine = order[start : start + self.batch_size_per_rank]
            yield [(self.epoch, index) for index in mine.tolist()]


def eval_batch_size(samples: int) -> int:
    """Samples per evaluation batch: 32 for small data sets, so that many ranks get equal shares.

    The number of ranks must not matter: the batch size may change the last bits of a result.
    """
    return min(256, max(32, samples // 64))


class FixedBatches:
    """This rank's batches for evaluation: over all ranks, every sample once.

    Whole batches are dealt out to the ranks. A batch holds the same samples at any world size, so
    each sample's result has the same bits. As a list they would take 100 bytes per sample.
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.starts = range(rank * batch_size, samples, world_size * batch_size)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in self.starts:
            yield [(0, i) for i in range(start, min(start + self.batch_size, self.samples))]
