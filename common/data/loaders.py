"""From a data set to this rank's batches: the DataLoader, and the processes that load."""

import atexit
import multiprocessing
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from common import log
from common.data import batch_wait
from common.data.batches import DeviceBatches
from common.data.datasets import Data, LoaderOptions
from common.data.stream import FixedBatches, GlobalBatches, Key, Samples, eval_batch_size
from common.data.workers import choose_num_workers, fastest_num_workers
from common.errors import STOP_SIGNALS, InputError


def rank_loaders(
    data: Data,
    options: LoaderOptions,
    sizes: Sequence[int],
    seed: int,
    share: int,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
) -> tuple[DeviceBatches, DeviceBatches]:
    """This rank's training batches and its validation batches.

    The batches come on `device`, floating-point numbers as `dtype`. Calls collectives.

    Args:
        sizes: samples of each share of a training batch.
        share: number of this rank's share.
        folder: the run's; `--num-workers auto` keeps there what it measured.

    Raises:
        InputError: /dev/shm is too small for the loading processes that the user asked for.
    """
    batches = GlobalBatches(len(data.train), sizes, seed, share)
    held_out = FixedBatches(len(data.val), eval_batch_size(len(data.val)), share, len(sizes))
    if not options.pin_memory and device.type == "cpu":
        log.warning("--no-pin-memory has no effect on a CPU")
    load = partial(make_loader, pin_memory=options.pin_memory and device.type == "cuda")
    largest = max([batches.batch_size_per_rank, *map(len, held_out)])
    workers = choose_num_workers(options, data.train, largest, device)
    if options.num_workers == "auto":
        epoch = list(islice(batches, 1000))
        enough = epoch * -(-100 // len(epoch))  # a small data set several times over
        workers = fastest_num_workers(partial(load, data.train, enough), workers, device, folder)
    loader, val_loader = (
        DeviceBatches(load(samples, keys, num_workers=workers), device, dtype, data.mean, data.std)
        for samples, keys in ((data.train, batches), (data.val, held_out))
    )
    return loader, val_loader


def make_loader(
    samples: Samples,
    batches: Iterable[list[Key]],
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A DataLoader over `batches`, lists of keys of `samples`; options as `loader_options`."""
    if num_workers:
        keep_socket_names_short()
    return Loader(
        samples,
        batch_sampler=batches,
        collate_fn=lambda batch: batch,  # Samples has made it
        persistent_workers=num_workers > 0,
        **loader_options(num_workers, pin_memory),
    )


def keep_socket_names_short() -> None:
    """Choose another folder for multiprocessing's sockets where the name of TMPDIR is too long.

    The kernel allows 107 characters, of which multiprocessing needs 32. A loading process whose
    socket cannot be made would never hand over a batch.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if len(own := tempfile.gettempdir()) <= 75 or config.get("tempdir"):
        return
    try:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    except OSError as error:
        raise InputError(
            f"the name of TMPDIR has {len(own)} characters, and loading processes need a folder of "
            f"at most 75 for their sockets ({error}): set another TMPDIR, or give --num-workers 0"
        ) from error
    atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)


class Loader(DataLoader[Any]):
    """A DataLoader whose loading processes never end by a stop signal, and may be many."""

    def check_worker_number_rationality(self) -> None:
        """Say nothing: `choose_num_workers` does, and tune_loader tries such numbers on purpose.

        torch would say it for each DataLoader and each of its iterators, on every rank.
        """

    def _get_iterator(self) -> Any:
        # A signal that comes here waits for `_start_worker` in the new process.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super()._get_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def loader_options(num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """What every Loader needs here: it must not disturb training's random numbers or its end.

    Args:
        num_workers: loading processes; 0 loads in the training process.
        pin_memory: load into page-locked memory, so that copies to a GPU overlap with training.
    """
    return {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        # Without a generator, each epoch would draw a number from the training's generator.
        "generator": torch.Generator(),
        "worker_init_fn": _start_worker,
        # In a spawned rank the default would be to spawn, which takes 2 s more. CUDA has begun in
        # this rank, so a fork of it cannot use CUDA. Loading processes never do: samples are on the
        # CPU, and a thread of the rank pins them.
        "multiprocessing_context": "fork" if num_workers else None,
    }


def _start_worker(_worker: int) -> None:
    # A scheduler signals every process of a job. A loading process that dies of SIGTERM would turn
    # an orderly stop into a crash. It ends when its queue closes or its parent is gone.
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    batch_wait.answer()
    sys.excepthook = _show_all_but_lost_connections


def _show_all_but_lost_connections(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    # A rank that ends while it receives a batch reports its own error.
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
