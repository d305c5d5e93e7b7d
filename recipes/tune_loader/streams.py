"""Iterable data sets, which a DataLoader does not shard: each rank and process takes its own part.

Every loading process of every rank has its own copy of the data set. Without sharding, each copy
would give every sample, and the model would see each sample ranks x processes times per epoch.

Source: PyTorch, torch.utils.data, IterableDataset.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.data.stream import GlobalBatches, Key, Samples, loader_options

T = TypeVar("T")


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


class ItemStream(IterableDataset[T]):
    """A source that has no index, such as a pipe or a file that is read line by line.

    Each of the ranks x processes copies reads the whole source, and keeps every n-th item. This
    pays only if `prepare` takes longer than reading an item. If it does not, give each copy its own
    files.

    Ranks may get different numbers of items. A rank with one more batch than its peers waits for
    them in the all-reduce until it times out. So train only as many steps as every rank has.

    Args:
        read: starts the source; it must give the same items in the same order in each process.
        prepare: makes a sample from an item that this copy keeps.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        prepare: Callable[[Any], T],
        rank: int,
        world_size: int,
    ) -> None:
        self.read, self.prepare, self.rank, self.world_size = read, prepare, rank, world_size

    def __iter__(self) -> Iterator[T]:
        worker, workers = this_worker()
        first, step = self.rank * workers + worker, self.world_size * workers
        return map(self.prepare, islice(self.read(), first, None, step))


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
    """`common.data.stream.make_loader`, but over a `BatchStream`."""
    return DataLoader(
        BatchStream(samples, batches),
        batch_size=None,
        # A loading process has its own copy of `batches`, and `set_epoch` does not reach it. So
        # only processes whose batches stay the same may outlive an epoch.
        persistent_workers=num_workers > 0 and isinstance(batches, list),
        **loader_options(num_workers, pin_memory),
    )
