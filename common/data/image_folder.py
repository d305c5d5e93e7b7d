"""A folder of images, one sub-folder per class: listed, split by class, checked, read."""

import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common import log
from common.data.array_file import Texts, read_arrays, write_arrays
from common.data.decode import SUFFIXES, decoded, faults_of, is_image, refuse_faults
from common.errors import InputError, TrainingError
from common.group.collectives import agreed, gather, together
from common.identity import CONTENTS
from common.launch.ranks import Ranks
from common.masking import printable
from common.reading import files_below, refuse_closed
from common.seeds import mix
from common.terminal import progress_bar

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}


@dataclass(frozen=True)
class Header:
    """What is said once of a list of images."""

    class_names: list[str]
    train_count: int
    """Images in train/, which come first; the others are in val/. 0: there are no such folders."""
    fingerprint: str
    """SHA-256 over every image's relative path and size."""


@dataclass(frozen=True)
class Listing(Header):
    """Which images there are, and of which class: in flat arrays, because there may be millions."""

    names: Texts
    """Paths relative to the folder."""
    labels: NDArray[np.int32]
    """(images,), places in `class_names`."""
    sizes: NDArray[np.int64]
    """(images,), of the files [bytes]."""

    @property
    def header(self) -> dict[str, Any]:
        """The fields of `Header`."""
        return {name: getattr(self, name) for name in Header.__dataclass_fields__}

    def split(self, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Indices to train and to validate on: as the folder splits them, or else by `seed`.

        By seed: 80/20 within each class; a class of fewer than five images trains with all.

        Raises:
            InputError: none could be kept to validate on.
        """
        if self.train_count:
            train, val = np.split(np.arange(len(self.labels)), [self.train_count])
            return train, val
        counts = np.bincount(self.labels, minlength=len(self.class_names))
        members = np.split(np.argsort(self.labels, kind="stable"), np.cumsum(counts)[:-1])
        trained, held_out = [], []
        for label, own in enumerate(members):
            order = np.random.Generator(np.random.PCG64(mix(seed, label))).permutation(own)
            cut = len(order) // 5
            held_out.append(np.sort(order[:cut]))
            trained.append(np.sort(order[cut:]))
        if counts.max() < 5:
            raise InputError(
                "every class has fewer than five images, so none can be kept for validation: "
                "add images, or give train/ and val/ folders"
            )
        pairs = zip(self.class_names, counts, strict=True)
        if few := [name for name, count in pairs if count < 5]:
            found = f"{len(few)} classes have fewer than five images, so none to validate on"
            log.warning(f"{found}: {listed(few[:10])}")
        small = np.int32 if len(self.labels) < 2**31 else np.int64
        return np.concatenate(trained, dtype=small), np.concatenate(held_out, dtype=small)


class Files(Sequence[tuple[Path, int]]):
    """(path, class) of the images in a folder."""

    def __init__(self, root: Path, names: Texts, labels: NDArray[np.int32]) -> None:
        self.root, self.names, self.labels = root, names, labels

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[Path, int]: ...
    @overload
    def __getitem__(self, index: slice) -> "Files": ...
    def __getitem__(self, index: int | slice) -> "tuple[Path, int] | Files":
        """One, or some of them."""
        if isinstance(index, slice):
            return Files(self.root, self.names[index], self.labels[index])
        name = self.names[index]
        if not name.isascii():  # as this locale writes it
            name = os.fsdecode(name.encode("utf-8", "surrogateescape"))
        return self.root / name, int(self.labels[index])


def list_images(root: Path, *, show_progress: bool = False) -> tuple[Listing, str]:
    """List the images of `root`, which has one sub-folder per class, or train/ and val/ with them.

    Asks the file system once per file, of many at a time.

    Returns:
        The images, and the SHA-256 of this copy of them. It also depends on the folder's place and
        on the time at which each file changed. The time of its inode (ctime) shows that a file was
        replaced, even by `cp -p`.

    Raises:
        InputError: no folder, no classes, or an empty class.
    """
    folders = [root / "train", root / "val"]
    refuse_closed("--data-path", root, *folders)
    if not root.is_dir():
        raise InputError(f"--data-path {root} is not a folder")
    if not all(folder.is_dir() for folder in folders):
        folders = [root]
    elif beside := [n for n in class_names(root) if n not in ("train", "val") and _holds(root / n)]:
        log.info(f"images left out, beside train and val: those in {listed(beside)}")
    names = class_names(folders[0])
    if not names:
        raise InputError(f"--data-path {folders[0]} has no sub-folders: make one per class")
    splits = [name for name in names if name.lower() in _SPLITS]
    if len(splits) == len(names) or any(class_names(folders[0] / name) for name in splits):
        raise InputError(
            f"--data-path {folders[0]} holds {', '.join(names)}, which are no classes: name the "
            "folders train and val, with one sub-folder per class in each"
        )
    if len(names) == 1:
        raise InputError(f"--data-path {folders[0]} has one class only ({names[0]}), not two")
    if unknown := set(class_names(folders[-1])) - set(names):
        raise InputError(
            f"{folders[-1]} has classes that train has not: {', '.join(sorted(unknown))}"
        )
    missing = set(names) - set(class_names(folders[-1]))
    if len(missing) == len(names):
        raise InputError(f"{folders[-1]} has none of the classes in train: add images")
    if missing:
        log.warning(f"{folders[-1]} has no images of {listed(missing)}: they do not validate")
    refuse_images_twice(folders, names)
    return _list_classes(root, folders, names, show_progress=show_progress)


def refuse_images_twice(folders: Sequence[Path], names: Sequence[str]) -> None:
    """Raise InputError if links give images two classes, or validate on what is trained on."""
    places = [folder / name for folder in folders for name in names]
    if not any(path.is_symlink() for path in [*folders, *places]):
        return
    real: dict[Path, Path] = {}
    for place in places:
        if (other := real.setdefault(place.resolve(), place)) is not place:
            raise InputError(f"{place} and {other} lead to the same images: remove one of them")
    for path, place in real.items():
        if above := [real[parent] for parent in path.parents if parent in real]:
            raise InputError(f"{place} lies in {above[0]}, by links: its images would count twice")


def class_names(folder: Path) -> list[str]:
    """Names of the sub-folders, sorted. InputError: one is a link that leads nowhere."""
    entries = [path for path in folder.iterdir() if _is_data(path.name)]
    for path in entries:
        if path.is_symlink() and not path.suffix and not path.exists():
            raise InputError(f"{path} is a link that leads nowhere: remove it or restore it")
    return sorted(path.name for path in entries if path.is_dir())


def warn_of_loose_images(folder: Path) -> None:
    """Warn of images that lie beside the folders of the classes."""
    loose = [e for e in os.scandir(folder) if is_image(e.name) and _is_data(e.name)]
    if loose := [entry for entry in loose if Path(entry.path).is_file()]:
        said = f"{len(loose)} images in {folder} are left out: they are in no class's folder"
        log.warning(printable(said))


def listed(names: Iterable[str]) -> str:
    """Names from data, for a message: sorted, and escaped where they would break the line."""
    return ", ".join(map(printable, sorted(names)))


def _holds(folder: Path) -> bool:
    """Whether an image is at any depth of a folder."""
    return any(is_image(entry.name) for entry in files_below("--data-path", folder))


def _is_data(path: str) -> bool:
    """Whether a person put a file there, and not an editor, a notebook or macOS."""
    return "/." not in f"/{path}" and "/__MACOSX/" not in f"/{path}/"


@dataclass
class _Class:
    """The images of one class."""

    joined: bytes
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names_and_sizes: str
    """A part of the JSON over which the fingerprint is taken."""
    times: str
    others: list[Path]
    hashes: NDArray[np.int64]
    """Of names and sizes: equal ones may be the same image."""


def _list_classes(
    root: Path, folders: list[Path], names: list[str], *, show_progress: bool
) -> tuple[Listing, str]:
    places = [folder / name for folder in folders for name in names]
    digest, times = hashlib.sha256(b"["), hashlib.sha256(os.fsencode(root.resolve()))
    bar = progress_bar(None, main=show_progress, unit="image", desc="listing images", keep=False)
    found: list[_Class] = []
    begun_s = time.perf_counter()
    first = _list_class(root, places[0])
    # Over a network many questions are answered in the time of one. On a disk of this host, threads
    # would only wait for each other: with 32, a million files took 24 s instead of 6.
    far = (time.perf_counter() - begun_s) / len(first.ends) > 1e-4
    with bar, ThreadPoolExecutor(min(32, len(places)) if far else 1) as pool:
        rest = pool.map(lambda place: _list_class(root, place), places[1:])
        for part in chain([first], rest):
            bar.update(len(part.ends))
            begun = any(len(other.ends) for other in found)
            digest.update(
                f"{', ' if begun and part.ends.size else ''}{part.names_and_sizes}".encode()
            )
            times.update(part.times.encode())
            found.append(part)
    digest.update(b"]")
    times.update(digest.digest())
    counts = [len(part.ends) for part in found]
    for number, folder in enumerate(folders):
        parts = found[number * len(names) : (number + 1) * len(names)]
        if others := [path for part in parts for path in part.others]:
            log.info(left_out(others))
        warn_of_loose_images(folder)
    before = np.cumsum([0, *(len(part.joined) for part in found)])
    ends = [part.ends + start for part, start in zip(found, before[:-1], strict=True)]
    joined = np.frombuffer(b"".join(part.joined for part in found), np.uint8)
    labels = np.repeat(np.tile(np.arange(len(names), dtype=np.int32), len(folders)), counts)
    train_count = sum(counts[: len(names)]) if len(folders) > 1 else 0
    texts = Texts(joined, np.concatenate(ends))
    sizes = np.concatenate([part.sizes for part in found])
    listing = Listing(names, train_count, digest.hexdigest(), texts, labels, sizes)
    if train_count:
        hashes = np.concatenate([part.hashes for part in found])
        _warn_of_the_same(Files(root, texts, labels), train_count, hashes)
    return listing, times.hexdigest()


def _warn_of_the_same(files: Files, train_count: int, hashes: NDArray[np.int64]) -> None:
    """Say how many images validate and train, and name the first.

    Only images of one name and size are compared, and at most 1,000 of them.
    """
    _, train, val = np.intersect1d(hashes[:train_count], hashes[train_count:], return_indices=True)
    pairs = [
        (files[int(one)][0], files[int(two)][0])
        for one, two in zip(train[:1000], train_count + val[:1000], strict=True)
    ]
    with suppress(OSError):  # whoever decodes them says it
        if same := [two for one, two in pairs if one.read_bytes() == two.read_bytes()]:
            log.warning(
                f"{len(same)} of {len(pairs)} images compared are in train and in val (the first: "
                f"{printable(min(same))}): the validation counts what was trained on"
            )


def _list_class(root: Path, folder: Path) -> _Class:
    if not folder.is_dir():  # a class of train/ that is not in val/
        none = np.empty(0, np.int64)
        return _Class(b"", none, none, "", "", [], none)
    images, others = _entries(folder)
    begin, above = len(f"{folder}/"), folder.relative_to(root)
    paths = [f"{above}/{entry.path[begin:]}" for entry in images]
    joined = os.fsencode("".join(paths))
    lengths = [len(path) for path in paths]
    if not joined.isascii():
        encoded = [os.fsencode(path) for path in paths]
        lengths = [len(path) for path in encoded]
        # The same in every locale.
        paths = [path.decode("utf-8", "surrogateescape") for path in encoded]
    found = [entry.stat() for entry in images]
    sizes = [status.st_size for status in found]
    times = "".join([f" {status.st_mtime_ns} {status.st_ctime_ns}" for status in found])
    said = json.dumps([*zip(paths, sizes, strict=True)])[1:-1]
    ends, in_bytes = np.cumsum(lengths, dtype=np.int64), np.array(sizes, np.int64)
    hashes = np.array([hash((e.name, size)) for e, size in zip(images, sizes, strict=True)])
    return _Class(joined, ends, in_bytes, said, times, others, hashes)


def _entries(folder: Path) -> tuple[list["os.DirEntry[str]"], list[Path]]:
    """The images at any depth of a folder, and what is left out; both sorted, none hidden."""
    begin = len(f"{folder}".rstrip("/")) + 1
    images, others = [], []
    for entry in files_below("--data-path", folder):
        if not _is_data(entry.path[begin:]):
            continue
        link = entry.is_symlink()
        if not is_image(entry.name) or (link and Path(entry.path).is_dir()):
            others.append(Path(entry.path))
        elif not link or Path(entry.path).is_file():
            images.append(entry)
        else:
            target = Path(entry.path).readlink()
            raise InputError(
                f"{entry.path} is a link to {target}, which does not exist: get the file (git "
                "annex get, dvc pull), or remove the link"
            )
    if not images:
        raise InputError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
    return images, others


def images_and_others(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files at any depth of a folder, and what is left out; both sorted, none hidden.

    A file's name decides. A damaged image is then named by who decodes it, and not left out. Links
    to folders are left out.

    Raises:
        InputError: there are no images, or one is a link to a file that does not exist.
    """
    images, others = _entries(folder)
    return [Path(entry.path) for entry in images], others


def left_out(files: Sequence[Path]) -> str:
    """The message that files of a folder are left out, with how their names end."""
    kinds = ("link to a folder" if p.is_dir() else p.suffix.lower() or "no ending" for p in files)
    endings = ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).most_common(8))
    return printable(f"files left out, not images by their names: {len(files)} ({endings})")


def list_once_per_host(root: Path, ranks: Ranks) -> tuple[Listing, str]:
    """`list_images` by one rank per host; the others map its result. Calls collectives.

    A rank that does not see that rank's file, in another container perhaps, lists the images, too.
    """
    inode = 0
    with suppress(OSError):  # it is refused below
        inode = root.stat().st_ino
    homes = gather((socket.gethostname(), os.fspath(root.resolve()), inode))
    first = homes.index(homes[ranks.rank])
    token = secrets.token_hex()
    with ExitStack() as stack:

        def own() -> tuple[tuple[Listing, str] | None, str]:
            if first != ranks.rank:
                return None, ""
            found = list_images(root, show_progress=ranks.is_main)
            path = ""
            if homes.count(homes[first]) > 1:
                with suppress(OSError):  # no room, or no right to write there
                    file = tempfile.NamedTemporaryFile(prefix="torch-recipes-listing-")  # noqa: SIM115
                    stack.callback(_close, file)
                    _write(file, *found, token)
                    path = file.name
            return found, path

        found, path = together(own)
        path, token = gather((path, token))[first]
        found = together(lambda: found or _read(path, token) or list_images(root))
    return found


def fingerprint(listing: Listing, read: Callable[[int], bytes]) -> str:
    """The list's fingerprint, then a SHA-256 over the bytes of 100 images, evenly spread in it.

    Args:
        listing: of all images.
        read: gives the bytes of an image.

    Raises:
        InputError: an image cannot be read.
    """
    count, digest = len(listing.labels), hashlib.sha256()
    for number in range(some := min(count, 100)):
        index = number * count // some
        try:
            digest.update(read(index))
        except OSError as error:
            raise InputError(f"{listing.names[index]} cannot be read: {error.strerror}") from None
        except TrainingError as error:
            raise InputError(f"{error}") from None
    return f"{listing.fingerprint}{CONTENTS}{digest.hexdigest()}"


def _close(file: Any) -> None:
    with suppress(OSError):  # a full disk takes no more of what is left to write
        file.close()


def _write(file: IO[bytes], listing: Listing, copy: str, token: str) -> None:
    names = listing.names
    arrays: dict[str, NDArray[Any]] = {"names": names.joined, "ends": names.ends}
    arrays |= {"labels": listing.labels, "sizes": listing.sizes}
    write_arrays(file, arrays, {**listing.header, "copy": copy, "token": token})
    file.flush()


def _read(path: str, token: str) -> tuple[Listing, str] | None:
    with suppress(OSError, ValueError):
        arrays, more = read_arrays(Path(path), check=False)
        if more.pop("token") == token:
            copy, names = more.pop("copy"), Texts(arrays["names"], arrays["ends"])
            labels, sizes = arrays["labels"], arrays["sizes"]
            return Listing(**more, names=names, labels=labels, sizes=sizes), copy
    return None


def verify_once(files: Sequence[tuple[Path, int]], copy: str, ranks: Ranks) -> None:
    """Decode every image, unless this user did and no file has changed since. Calls collectives.

    Ranks that see the same copy of the data share the work.

    Args:
        files: (path, class) of every image.
        copy: this copy's SHA-256 from `list_images`, taken before the images are decoded. So a
            file that changes meanwhile is checked again next time.
        ranks: rank 0 shows progress.

    Raises:
        InputError: on all ranks, with all images that any of them cannot decode.
    """
    marker, known = Path("torch-recipes", "verified-3", copy), False
    with suppress(OSError, RuntimeError):  # no home folder, or it cannot be read
        marker = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / marker
        known = marker.is_file()
    found = gather((copy, known))
    peers = [rank for rank, (other, _) in enumerate(found) if other == copy]
    known = all(found[rank][1] for rank in peers)

    def faults_of_mine() -> list[str]:
        mine = files[peers.index(dist.get_rank()) :: len(peers)]
        return [] if known else faults_of(mine, show_progress=ranks.is_main)

    faults = gather(together(faults_of_mine))
    with agreed():
        if ranks.is_main:
            refuse_faults([*chain(*faults)])
    if known:
        log.info(f"{len(files)} images: verified before, unchanged since ({marker.parent})")
    else:
        log.info(f"{len(files)} images: verified, all can be decoded")
        with suppress(OSError):  # if it cannot be remembered, the next run verifies again
            if marker.is_absolute():
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()


@dataclass
class ImageFiles:
    """Images of (path, class) pairs: decoded to RGB, uint8 (3, height, width), and transformed."""

    files: Sequence[tuple[Path, int]]
    transform: Callable[[Tensor], Tensor]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        try:
            image = decoded(path)
        except Exception as error:  # Pillow's decoders raise many types
            raise TrainingError(
                f"cannot read {path}, which was there at the start: {error}"
            ) from None
        return self.transform(image), label
