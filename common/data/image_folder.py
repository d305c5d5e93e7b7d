"""A folder of images, one sub-folder a class: listed, split by class, checked, decoded."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from common.errors import InputError, TrainingError
from common.group.collectives import agreed, gather
from common.launch.ranks import Ranks
from common.seeds import mix

log = logging.getLogger("recipes")

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"}


def list_images(
    root: Path, seed: int
) -> tuple[list[str], list[tuple[Path, int]], Sequence[int], Sequence[int]]:
    """What is in `root`: a sub-folder a class, or train/ and val/ with those in them.

    Args:
        root: the folder.
        seed: splits each class 80/20 where the folder does not.

    Returns:
        Class names, (path, class) of every image, and the indices to train and to validate on.

    Raises:
        InputError: no folder, no classes, an empty one, or nothing left to validate on.
    """
    if not root.is_dir():
        raise InputError(f"--data-path {root} is not a folder")
    split = [root / "train", root / "val"]
    if not all(part.is_dir() for part in split):
        split = [root]
    names = _class_names(split[0])
    files = [_list_classes(folder, names) for folder in split]
    if len(split) == 1:
        return names, files[0], *_split_by_class(files[0], seed)
    cut, count = len(files[0]), len(files[0]) + len(files[1])
    return names, files[0] + files[1], range(cut), range(cut, count)


def fingerprints(root: Path, files: list[tuple[Path, int]]) -> tuple[str, str]:
    """SHA-256 over every file's relative path and size; and one of this copy of them.

    The second also has the folder's place and the times at which each file was changed. Those of
    its inode (ctime) tell a replacement that was given the old file's time of writing (cp -p).
    """
    listing, times = [], hashlib.sha256(str(root.resolve()).encode())
    for path, _ in files:
        status = path.stat()
        listing.append((str(path.relative_to(root)), status.st_size))
        times.update(f" {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    fingerprint = hashlib.sha256(json.dumps(listing).encode())
    times.update(fingerprint.digest())
    return fingerprint.hexdigest(), times.hexdigest()


def verify_once(files: list[tuple[Path, int]], copy: str, ranks: Ranks) -> None:
    """`verify`, unless this user did and no file changed since. Calls collectives.

    The ranks that see the same copy of the data share the work; a host's own copy is checked there.

    Args:
        files: of the folder.
        copy: from `fingerprints`, taken before: a file that changes meanwhile is checked next time.
        ranks: rank 0 shows progress.

    Raises:
        InputError: on all ranks, where one of them finds an image that cannot be decoded.
    """
    marker, known = Path("torch-recipes", "verified", copy), False
    with suppress(OSError, RuntimeError):  # no home, or nothing may be read there
        marker = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / marker
        known = marker.is_file()
    found = gather((copy, known))
    peers = [rank for rank, (other, _) in enumerate(found) if other == copy]
    known = all(found[rank][1] for rank in peers)
    with agreed():
        if known:
            log.info(f"{len(files)} images: verified before, unchanged since ({marker.parent})")
        else:
            mine = files[peers.index(dist.get_rank()) :: len(peers)]
            verify([path for path, _ in mine], show_progress=ranks.is_main)
    if not known:
        log.info(f"{len(files)} images: verified, all can be decoded")
        with suppress(OSError):  # then it is done again next time
            if marker.is_absolute():
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()


def verify(paths: list[Path], *, show_progress: bool) -> None:
    """Decode every image once, on all cores.

    Raises:
        InputError: names the first that cannot be decoded, and counts the others.
    """
    with ThreadPoolExecutor() as pool:
        found = tqdm(
            pool.map(_image_fault, paths),
            total=len(paths),
            desc="checking images",
            unit="image",
            disable=not show_progress or len(paths) < 1000,
        )
        faults = [fault for fault in found if fault]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}: remove or replace it")


class ImageFiles:
    """Decoded RGB images of (path, label) pairs, each a uint8 tensor (3, height, width)."""

    def __init__(self, files: list[tuple[Path, int]]) -> None:
        self.files = files

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        try:
            return _decoded(path), label
        except Exception as error:  # Pillow raises what its many decoders raise
            raise TrainingError(
                f"cannot read {path}, which was there at the start: {error}"
            ) from None


@cache
def fast_jpeg() -> Callable[[Path], Any] | None:
    """TorchCodec's JPEG decoder, which gives Pillow's bytes sooner; None without torch 2.11."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):  # not installed, or of another torch
        return None
    decode: Callable[[Path], Any] = decode_jpeg
    return decode


def _decoded(path: Path) -> Tensor:
    """A picture as uint8 (3, height, width): tensors are cropped and resized sooner than Pillow's.

    Raises:
        Exception: whatever Pillow's decoders raise.
    """
    image: Tensor
    if path.suffix.lower() in (".jpg", ".jpeg") and (decode := fast_jpeg()):
        with suppress(RuntimeError, ValueError):  # another format of that name, or none: below
            image = decode(path)
            return image
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    with Image.open(path) as opened:
        image = pil_to_tensor(opened.convert("RGB"))
    return image


def random_crop(image: Tensor, side: int) -> Tensor:
    """A random part of 8 to 100 % of the picture, resized to (3, side, side), flipped or not.

    The draws are those of torchvision's RandomResizedCrop and RandomHorizontalFlip.
    """
    from torchvision.transforms import RandomResizedCrop

    top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    crop = _resized(image[:, top : top + height, left : left + width], side, side)
    return crop.flip(-1) if torch.rand(1) < 0.5 else crop


def center_crop(image: Tensor, side: int) -> Tensor:
    """The middle (3, side, side) of the picture at a shorter side of 8/7 as much."""
    from torchvision.transforms.v2.functional import center_crop

    height, width = image.shape[1:]
    short = side * 256 // 224
    size = [short * length // min(height, width) for length in (height, width)]
    cropped: Tensor = center_crop(_resized(image, *size), [side])
    return cropped


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    """Bilinear with antialiasing, as Pillow does it: the order of passes is seen in the rounding.

    Source: Pillow 13, src/libImaging/Resample.c, ImagingResampleInner.
    """
    from torchvision.transforms.v2.functional import resize

    if image.shape[1] - height > max(0, 2 * (image.shape[2] - width)):
        image = resize(image, [height, image.shape[2]], antialias=True)
    resized: Tensor = resize(image, [height, width], antialias=True)
    return resized


def _class_names(folder: Path) -> list[str]:
    names = sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not names:
        raise InputError(f"--data-path {folder} has no sub-folders: one a class is needed")
    return names


def _list_classes(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    files: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        found = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES)
        if not found:
            raise InputError(
                f"class folder {folder / name} has no images ({', '.join(sorted(SUFFIXES))})"
            )
        files += [(path, label) for path in found]
    return files


def _split_by_class(files: list[tuple[Path, int]], seed: int) -> tuple[list[int], list[int]]:
    """80/20 within each class, by seed; a class of fewer than five images trains with all."""
    train: list[int] = []
    val: list[int] = []
    by_class: dict[int, list[int]] = {}
    for index, (_, label) in enumerate(files):
        by_class.setdefault(label, []).append(index)
    for label, indices in by_class.items():
        order = np.random.Generator(np.random.PCG64(mix(seed, label))).permutation(indices)
        cut = len(indices) // 5
        val += sorted(order[:cut].tolist())
        train += sorted(order[cut:].tolist())
    if not val:
        raise InputError(
            "no class has the five images it takes to keep one for validation: "
            "add images, or give train/ and val/ folders"
        )
    return train, val


def _image_fault(path: Path) -> str | None:
    from PIL import Image

    try:
        with Image.open(path) as image:
            eighth = (max(1, image.width // 8), max(1, image.height // 8))
            image.draft("RGB", eighth)  # a JPEG is then decoded at that size, and still in full
            image.load()
    except Exception as error:  # Pillow raises what its many decoders raise
        return f"{path} cannot be decoded as an image ({error})"
    return None
