"""Iterable data sets, which a DataLoader does not shard: each rank and process takes its own part.

Every loading process of every rank has its own copy of the data set. Without sharding, each copy
would give every sample, and the model would see each sample ranks x processes times per epoch.

Source: PyTorch, torch.utils.data, IterableDataset.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from common.data.loaders import Loader, loader_options
from common.data.stream import GlobalBatches, Key, Samples
from common.errors import InputError, multiples_near


class BatchStream(IterableDataset[list[Tensor]]):
    """The batches of a map-style data set as an iterable.

    `batches` is this rank's share already, so only its loading processes must share it. Process w
    of n makes batches w, w + n, ... A DataLoader takes one batch from each process in turn, so the
    batches and their order are those of the map style.
    """

    def __init__(self, samples: Samples, batches: Iterable[list[Key]]) -> None:
        self.samples, self.batches = samples, batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        worker, workers = this_worker()
        for keys in islice(self.batches, worker, None, workers):
            yield self.samples.__getitems__(keys)


class ItemStream(IterableDataset[list[Any]]):
    """This rank's batches of a source without index and length, such as a pipe or a log file.

    Global batch b is items b·B to (b+1)·B of the source, in its order. Rank r takes the r-th of
    world_size equal slices, and process w of n makes batches w, w + n, ... So the batches are the
    same at any number of ranks and processes. The last items, which do not fill a global batch,
    are left out. Therefore every rank has the same number of batches, although nobody knows it in
    advance, and no rank waits for a peer that has no more.

    Every copy reads the whole source, but prepares its own items only. This pays if `prepare` takes
    longer than reading an item. If it does not, give each copy its own files.

    Args:
        read: starts the source; it must give the same items in the same order in each process.
        prepare: makes a sample from an item of this copy.
        global_batch_size: items per step over all ranks [samples].
        rank: this rank.
        world_size: number of ranks.

    Raises:
        InputError: world_size does not divide the batch.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        prepare: Callable[[Any], Any],
        global_batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        if global_batch_size % world_size:
            raise InputError(
                f"--global-batch-size {global_batch_size} cannot be divided by {world_size} "
                f"processes: give {multiples_near(global_batch_size, world_size)}"
            )
        self.read, self.prepare, self.size = read, prepare, global_batch_size
        share = global_batch_size // world_size
        self.own = slice(rank * share, (rank + 1) * share)

    def __iter__(self) -> Iterator[list[Any]]:
        worker, workers = this_worker()
        items = iter(self.read())
        for number in count():
            batch = list(islice(items, self.size))
            if len(batch) < self.size:
                return
            if number % workers == worker:
                yield default_collate([self.prepare(item) for item in batch[self.own]])


def this_worker() -> tuple[int, int]:
    """The number of this loading process, and how many the rank has; (0, 1) in the rank itself."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def make_stream_loader(
    samples: Samples,
    batches: GlobalBatches | list[list[Key]],
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """`common.data.loaders.make_loader`, but over a `BatchStream`."""
    return Loader(
        BatchStream(samples, batches),
        batch_size=None,
        # A loading process has its own copy of `batches`, and `set_epoch` does not reach it. So
        # only processes whose batches stay the same may outlive an epoch.
        persistent_workers=num_workers > 0 and isinstance(batches, list),
        **loader_options(num_workers, pin_memory),
    )


def make_item_loader(
    samples: Samples, batches: list[list[Key]], *, num_workers: int = 0, pin_memory: bool = False
) -> DataLoader[Any]:
    """The same batches of one rank, read as if the data had neither an index nor a length."""
    keys = list(chain(*batches))
    stream = ItemStream(lambda: iter(keys), samples.__getitem__, len(batches[0]), 0, 1)
    return Loader(
        stream,
        batch_size=None,
        persistent_workers=num_workers > 0,
        **loader_options(num_workers, pin_memory),
    )
