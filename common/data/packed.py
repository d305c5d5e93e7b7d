"""Images packed into a few large tar files, with an index: read in any order, by any process.

`make pack` writes them (tools/pack.py). A folder of a million files costs a cluster's file system
millions of questions; packed, the same images cost a few dozen. Other formats of this kind shuffle
within a buffer only, so their order depends on the number of processes. Here each image is read by
its place in the index, so that the folder and the pack give the same samples, order and bits.

The tar files are as WebDataset names them: 000000123.jpg and 000000123.cls, which holds the number
of the class. The images lie in an order that is drawn once, not class by class. `INDEX` is a file
of `common.data.array_file`; its arrays are

    names, ends   the images' paths, as `Texts`
    labels        int32, classes
    shard         int32, numbers of the tar files
    offset, size  int64 and uint32, where an image lies in its tar file [bytes]
    crc32         uint32, checksum of its bytes
"""

import errno
import fcntl
import os
import resource
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common import log
from common.data.array_file import Texts, read_arrays
from common.data.decode import decoded
from common.data.image_folder import Header, Listing
from common.errors import InputError, TrainingError
from common.group.collectives import agreed, gather, together
from common.launch.ranks import Ranks
from common.reading import bytes_in, refuse_closed
from common.terminal import progress_bar
from common.writing import write_file, writing

INDEX = "index.bin"
HEAD = 4096
"""Bytes at the beginning of a tar file that the index knows by their checksum."""

RESTORE = "copy it again from where it came, or pack the images again"


@dataclass(frozen=True)
class Shard:
    """A tar file, as the index describes it."""

    name: str
    bytes: int
    head_crc32: int

    def fault(self, root: Path) -> str:
        """Why the file in `root` cannot be this one; empty: its size and beginning are right."""
        path = root / self.name
        if not path.is_file():  # opening a pipe would wait for its writer
            return f"{path} is missing"
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.bytes:
                said = f"{path} has {size:,} bytes, and {self.bytes:,} by {INDEX}"
                return f"{said}: it is cut off or of another pack"
            if zlib.crc32(file.read(HEAD)) != self.head_crc32:
                said = f"{path} begins with other bytes than {INDEX} says"
                return f"{said}: it is damaged or of another pack"
        return ""


class Pack:
    """An open pack.

    Args:
        root: the folder with the tar files and the index.
        check: read the whole index, and look at each tar file's size and first bytes.

    Raises:
        InputError: there is no index, or it is damaged, or a tar file is missing, cut off, or not
            the one that the index describes.
    """

    def __init__(self, root: Path, *, check: bool) -> None:
        index = root / INDEX
        refuse_closed("--data-path", root, index)
        if not root.is_dir():
            raise InputError(f"--data-path {root} is not a folder")
        if not index.is_file():
            tars = any(path.suffix == ".tar" for path in root.iterdir())
            how = f"DATA={root}" if tars else f"DATA={root} OUT={root}.packed"
            raise InputError(f"--data-path {root} has no {INDEX}: make one with make pack {how}")
        try:
            self.arrays, more = read_arrays(index, check=check)
            self.shards = [Shard(**entry) for entry in more["shards"]]
            self.made: dict[str, Any] = more["made"]
            """How: the options, and the SHA-256 over the rest of the index."""
            header = {name: more[name] for name in Header.__dataclass_fields__}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index} is damaged ({error}): {RESTORE}") from None
        self.root = root
        wanted = len(self.shards) + 256  # files that a process may have open
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < wanted:  # below 0: as many as it likes
            most = wanted if hard < 0 else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        names = Texts(self.arrays["names"], self.arrays["ends"])
        labels, sizes = self.arrays["labels"], self.arrays["size"]
        self.listing = Listing(**header, names=names, labels=labels, sizes=sizes)
        if check:
            for shard in self.shards:
                self.check(shard)
        self._files: dict[int, int] = {}

    def check(self, shard: Shard) -> None:
        """Raise InputError for a tar file that is closed to this user, or has a fault."""
        refuse_closed("--data-path", self.root / shard.name)
        if fault := shard.fault(self.root):
            raise InputError(f"{fault}: {RESTORE}")

    def __len__(self) -> int:
        return len(self.arrays["size"])

    def name(self, index: int) -> str:
        """Tar file, number and path of an image, for a message."""
        shard = self.shards[int(self.arrays["shard"][index])].name
        return f"{self.root / shard}: sample {index} ({self.listing.names[index]})"

    def read(self, index: int) -> bytes:
        """The bytes of an image.

        Raises:
            TrainingError: they cannot be read, or are not those that were packed.
        """
        size = int(self.arrays["size"][index])
        try:
            found = os.pread(self._file(index), size, int(self.arrays["offset"][index]))
        except OSError as error:
            few = error.errno in (errno.EMFILE, errno.ENFILE)
            advice = "raise the limit of open files (ulimit -n)" if few else RESTORE
            raise TrainingError(
                f"{self.name(index)} cannot be read ({error.strerror}): {advice}"
            ) from None
        if len(found) != size or zlib.crc32(found) != self.arrays["crc32"][index]:
            raise TrainingError(
                f"{self.name(index)} is damaged: it is not what was packed; make pack "
                f"OUT={self.root} ARGS=--verify names all damaged samples; {RESTORE}"
            )
        return found

    def will_read(self, indices: Sequence[int]) -> None:
        """Let the disk fetch these images now, in the order in which they lie on it."""
        wanted = np.asarray(indices)
        for index in wanted[self.in_order_of_the_disk(wanted)].tolist():
            place, size = int(self.arrays["offset"][index]), int(self.arrays["size"][index])
            with suppress(OSError):  # `read` says it
                os.posix_fadvise(self._file(index), place, size, os.POSIX_FADV_WILLNEED)

    def in_order_of_the_disk(self, indices: NDArray[Any]) -> NDArray[np.int64]:
        """Places in `indices`, sorted by where their images lie."""
        return np.lexsort((self.arrays["offset"][indices], self.arrays["shard"][indices]))

    def _file(self, index: int) -> int:
        number = int(self.arrays["shard"][index])
        file = self._files.get(number)
        if file is None:
            path = self.root / self.shards[number].name
            file = self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            # Else the kernel reads ahead of each image what nobody wants next.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file


def open_images(root: Path, *, check: bool) -> Pack:
    """Open a pack for `--data packed`.

    Raises:
        InputError: as of `Pack`; or its samples are no images.
    """
    pack = Pack(root, check=check)
    if suffix := pack.made.get("suffix"):
        raise InputError(
            f"--data-path {root} was indexed with --suffix {suffix}: read it in a Dataset of your "
            "own (docs/bring-your-own.md)"
        )
    return pack


def open_on_all_ranks(root: Path, ranks: Ranks) -> Pack:
    """Open a pack; one rank per host checks it. Calls collectives."""
    first = first_of_host(ranks)
    with agreed():
        pack = open_images(root, check=first)
    found = gather(pack.made["sha256"])
    with agreed():
        if found[ranks.rank] != found[0]:
            raise InputError(f"--data-path {root} is another pack than on rank 0")
    return pack


def copied_once_per_host(root: Path, local: Path, ranks: Ranks) -> Path:
    """A copy of the pack in a folder in `local`, made by one rank per host. Calls collectives.

    A copy that is there already and whole is used as it is; a damaged one is repaired, and an
    interrupted one is continued.

    Raises:
        InputError: `root` is no pack, or damaged; `local` has too little room or is closed; the
            copy's folder holds another pack, or links.
    """
    first = first_of_host(ranks)
    with agreed():
        pack = open_images(root, check=False)
    target = local / f"{root.name}-{pack.made['sha256'][:16]}"

    def complete() -> None:
        refuse_foreign(target, pack)
        if not is_whole(target, pack):
            try:
                copy(pack, target, show_progress=ranks.is_main)
            except TrainingError as error:
                raise InputError(f"--data-local {local}: {error}") from None

    together(complete if first else lambda: None)
    together(complete)  # in another container of this host's name, `target` is another folder
    return target


def first_of_host(ranks: Ranks) -> bool:
    """Whether this rank is the first one of its host. Calls a collective."""
    hosts = gather(socket.gethostname())
    return hosts.index(hosts[ranks.rank]) == ranks.rank


def copy(pack: Pack, target: Path, *, show_progress: bool) -> None:
    """Copy the files of a pack that are missing or damaged in `target`, the index at last."""
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        lock = (target / ".lock").open("w")
    with lock:
        wait_for_lock(lock, target)
        if is_whole(target, pack):
            return
        (target / INDEX).unlink(missing_ok=True)
        left = [shard for shard in pack.shards if shard.fault(target)]
        needed, free = sum(shard.bytes for shard in left), shutil.disk_usage(target).free
        if needed > free:
            raise InputError(
                f"--data-local {target.parent} has {free / 1e9:.1f} GB left, and {pack.root} "
                f"needs {needed / 1e9:.1f} GB: make room, or leave it out"
            )
        bar = progress_bar(
            len(left), main=show_progress, unit="tar file", desc="copying", keep=False
        )
        with bar:
            for shard in left:
                pack.check(shard)
                copy_file(pack.root / shard.name, target / shard.name)
                bar.update()
        copy_file(pack.root / INDEX, target / INDEX)


def wait_for_lock(lock: IO[str], target: Path, patience_s: float = 600.0) -> None:
    """Own the copy in `target`; wait while another job copies it, as long as its files grow.

    Raises:
        InputError: they have not grown for `patience_s`.
    """

    def taken() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    if taken():
        return
    log.info(
        f"another job copies {target}, or keeps its .lock: waiting as long as the copy grows, at "
        f"most {patience_s:.0f} s more"
    )
    size, since_s = bytes_in(target), time.monotonic()
    while not taken():
        before, size = size, bytes_in(target)
        if size != before:
            since_s = time.monotonic()
        elif time.monotonic() - since_s > patience_s:
            raise InputError(
                f"--data-local: another job keeps {target / '.lock'}, and its copy has not grown "
                f"for {patience_s:.0f} s: find the process by `lsof` or /proc/locks, and end it"
            )
        time.sleep(0.5)


def is_whole(target: Path, pack: Pack) -> bool:
    """Whether all files of a pack are in another folder."""
    try:
        return bool(Pack(target, check=True).made["sha256"] == pack.made["sha256"])
    except InputError:
        return False


def refuse_foreign(target: Path, pack: Pack) -> None:
    """Raise InputError if copying `pack` into `target` would write elsewhere, or over another."""
    names = [".lock", INDEX, *(shard.name for shard in pack.shards)]
    written = [target / name for name in names]
    for path in (target, *{path.parent for path in written}, *written):
        if path.is_symlink():
            raise InputError(
                f"--data-local: {path} is a link to {path.readlink()}: remove it, or give another "
                "folder"
            )
    for path in written:
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"--data-local: {path} is no file: remove it, or give another folder")
    try:
        found = Pack(target, check=False).made["sha256"]
    except InputError:  # it is damaged, or not there
        return
    if found != pack.made["sha256"]:
        raise InputError(
            f"--data-local: {target} holds another pack: remove it, or give another folder"
        )


def copy_file(source: Path, target: Path) -> None:
    """Copy a file completely or not at all."""
    target.parent.mkdir(exist_ok=True)
    with source.open("rb") as file:
        write_file(target, partial(shutil.copyfileobj, file, length=2**22))


@dataclass
class PackedImages:
    """The images of a pack: decoded to RGB, uint8 (3, height, width), and transformed."""

    pack: Pack
    transform: Callable[[Tensor], Tensor]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        content = self.pack.read(index)
        try:
            image = decoded(content, self.pack.listing.names[index])
        except Exception as error:  # Pillow's decoders raise many types
            raise TrainingError(
                f"{self.pack.name(index)} cannot be decoded ({error}), which was possible when it "
                "was packed: do both machines have the same versions of Pillow and TorchCodec?"
            ) from None
        return self.transform(image), int(self.pack.listing.labels[index])

    def will_read(self, indices: Sequence[int]) -> None:
        """See `Pack.will_read`."""
        self.pack.will_read(indices)
