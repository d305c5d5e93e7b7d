"""A folder of images, one sub-folder per class: listed, split by class, checked, decoded."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from common import log
from common.errors import InputError, TrainingError
from common.group.collectives import agreed, gather
from common.launch.ranks import Ranks
from common.reading import files_below, refuse_closed
from common.seeds import mix

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}

_DEEP = ("I", "F")
"""Begin Pillow's modes of more than 8 bits per channel, which convert("RGB") cuts off."""

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"}


def list_images(
    root: Path, seed: int
) -> tuple[list[str], list[tuple[Path, int]], Sequence[int], Sequence[int]]:
    """List the images of `root`, which has one sub-folder per class, or train/ and val/ with them.

    `seed` splits each class 80/20 if there are no train/ and val/.

    Returns:
        Class names, (path, class) of every image, and the indices to train and to validate on.

    Raises:
        InputError: no folder, no classes, an empty class, or too few images to validate on.
    """
    folders = [root / "train", root / "val"]
    refuse_closed("--data-path", root, *folders)
    if not root.is_dir():
        raise InputError(f"--data-path {root} is not a folder")
    if not all(folder.is_dir() for folder in folders):
        folders = [root]
    elif beside := [n for n in class_names(root) if n not in ("train", "val") and _holds(root / n)]:
        log.info(f"images left out, beside train and val: those in {', '.join(beside)}")
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
    if missing := set(names) - set(class_names(folders[-1])):
        raise InputError(
            f"{folders[-1]} has no folder for {', '.join(sorted(missing))}: add it, with images"
        )
    files, *val = (_list_classes(folder, names) for folder in folders)
    if not val:
        return names, files, *_split_by_class(names, [label for _, label in files], seed)
    return names, files + val[0], range(len(files)), range(len(files), len(files + val[0]))


def class_names(folder: Path) -> list[str]:
    """Names of the sub-folders, sorted."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _is_data(p, folder))


def _holds(folder: Path) -> bool:
    """Whether an image is at any depth of a folder."""
    return any(is_image(path) for path in files_below("--data-path", folder))


def _is_data(path: Path, folder: Path) -> bool:
    """Whether a person put `path` there, and not an editor, a notebook or macOS."""
    parts = path.relative_to(folder).parts
    return not any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _list_classes(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    found = [images_and_others(folder / name) for name in names]
    if others := [path for _, more in found for path in more]:
        log.info(left_out(others))
    if loose := [p for p in folder.iterdir() if is_image(p) and _is_data(p, folder)]:
        log.warning(f"{len(loose)} images in {folder} are left out: they are in no class's folder")
    return [(path, label) for label, (images, _) in enumerate(found) for path in images]


def images_and_others(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files at any depth of a folder, and what is left out; both sorted, none hidden.

    A file's name decides. A damaged image is then named by who decodes it, and not left out. Links
    to folders are left out.

    Raises:
        InputError: there are no images, or one is a link to a file that does not exist.
    """
    files = sorted(p for p in files_below("--data-path", folder) if _is_data(p, folder))
    images = []
    for path in filter(is_image, files):
        if path.is_file():  # and no link to a folder
            images.append(path)
        elif not path.exists():
            raise InputError(
                f"{path} is a link to {path.readlink()}, which does not exist: get the file (git "
                "annex get, dvc pull), or remove the link"
            )
    if not images:
        raise InputError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
    return images, sorted({*files} - {*images})


def left_out(files: Sequence[Path]) -> str:
    """The message that files of a folder are left out, with how their names end."""
    kinds = ("link to a folder" if p.is_dir() else p.suffix.lower() or "no ending" for p in files)
    endings = ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).most_common(8))
    return f"files left out, not images by their names: {len(files)} ({endings})"


def is_image(path: Path) -> bool:
    """Whether a file is an image by its name."""
    return path.suffix.lower() in SUFFIXES


def _split_by_class(names: list[str], classes: list[int], seed: int) -> tuple[list[int], list[int]]:
    """80/20 within each class, by seed; a class of fewer than five images trains with all."""
    train: list[int] = []
    val: list[int] = []
    labels = np.array(classes)
    for label in range(len(names)):
        generator = np.random.Generator(np.random.PCG64(mix(seed, label)))
        order = generator.permutation(np.flatnonzero(labels == label))
        cut = len(order) // 5
        val += sorted(order[:cut].tolist())
        train += sorted(order[cut:].tolist())
    if not val:
        raise InputError(
            "every class has fewer than five images, so none can be kept for validation: "
            "add images, or give train/ and val/ folders"
        )
    if few := [name for label, name in enumerate(names) if (labels == label).sum() < 5]:
        found = f"{len(few)} classes have fewer than five images, so none to validate on"
        log.warning(f"{found}: {', '.join(few[:10])}")
    return train, val


def fingerprints(root: Path, files: list[tuple[Path, int]]) -> tuple[str, str]:
    """SHA-256 of the data, over every file's relative path and size; and SHA-256 of this copy.

    The second one also depends on the folder's place and on the time at which each file changed.
    The time of its inode (ctime) shows that a file was replaced, even by `cp -p`.
    """
    listing, times = [], hashlib.sha256(os.fsencode(root.resolve()))
    for path, _ in files:
        status = path.stat()
        name = os.fsencode(path.relative_to(root)).decode("utf-8", "surrogateescape")
        listing.append((name, status.st_size))  # the same in every locale
        times.update(f" {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    fingerprint = hashlib.sha256(json.dumps(listing).encode())
    times.update(fingerprint.digest())
    return fingerprint.hexdigest(), times.hexdigest()


def verify_once(files: list[tuple[Path, int]], copy: str, ranks: Ranks) -> None:
    """Decode every image, unless this user did and no file has changed since. Calls collectives.

    Ranks that see the same copy of the data share the work.

    Args:
        files: (path, class) of every image.
        copy: this copy's SHA-256 from `fingerprints`, taken before the images are decoded. So a
            file that changes meanwhile is checked again next time.
        ranks: rank 0 shows progress.

    Raises:
        InputError: on all ranks, if one of them finds an image that cannot be decoded.
    """
    marker, known = Path("torch-recipes", "verified-3", copy), False
    with suppress(OSError, RuntimeError):  # no home folder, or it cannot be read
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
        with suppress(OSError):  # if it cannot be remembered, the next run verifies again
            if marker.is_absolute():
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()


def verify(paths: list[Path], *, show_progress: bool) -> None:
    """Decode every image once, on all cores.

    Raises:
        InputError: names the first image that cannot be decoded, and counts the others; or the
            first one that this user may not read.
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


def _image_fault(path: Path) -> str | None:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode.startswith(_DEEP):
                return f"{path} has more than 8 bits per channel (mode {image.mode})"
            # A JPEG is then decoded at this size, which is faster and still reads the whole file.
            image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
            image.load()
            try:
                ImageOps.exif_transpose(image).convert("RGB")
            except Exception:  # TorchCodec may decode it, as it ignores some faults of EXIF data
                decoded(path)
    except PermissionError:
        refuse_closed("--data-path", path)
        raise
    except Exception as error:  # Pillow's decoders raise many types
        return f"{path} cannot be decoded as an image ({error})"
    return None


@dataclass
class ImageFiles:
    """Images of (path, class) pairs: decoded to RGB, uint8 (3, height, width), and transformed."""

    files: list[tuple[Path, int]]
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


@cache
def fast_jpeg() -> Callable[[Path], Tensor] | None:
    """TorchCodec's JPEG decoder, which gives the same bytes as Pillow but is faster.

    None if TorchCodec is not installed or does not fit this torch; it needs 2.11 or newer.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):
        return None
    return cast(Callable[[Path], Tensor], decode_jpeg)


def decoded(path: Path) -> Tensor:
    """An RGB image as a uint8 tensor (3, height, width)."""
    if path.suffix.lower() in (".jpg", ".jpeg") and (decode := fast_jpeg()):
        with suppress(RuntimeError, ValueError):  # Pillow tells what is wrong, or can decode it
            return decode(path)
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    with Image.open(path) as opened:
        if opened.mode.startswith(_DEEP):
            raise ValueError(f"it has more than 8 bits per channel (mode {opened.mode})")
        # Turned as the camera was held, as TorchCodec does it.
        image: Tensor = pil_to_tensor(ImageOps.exif_transpose(opened).convert("RGB"))
    return image


def random_crop(image: Tensor, side: int) -> Tensor:
    """torchvision's RandomResizedCrop and RandomHorizontalFlip as they are for a Pillow image.

    v2's own class would resize in one call, and photos would differ by up to 0.17 of 255 grey
    levels on average. Pillow (13, src/libImaging/Resample.c, ImagingResampleInner) and torch round
    after each pass, but they choose the order of the two passes differently.
    """
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2.functional import resize

    top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    crop: Tensor = image[:, top : top + height, left : left + width]
    if height - side > max(0, 2 * (width - side)):
        crop = resize(crop, [side, width])
    crop = resize(crop, [side, side])
    return crop.flip(-1) if torch.rand(1) < 0.5 else crop


def center_crop(image: Tensor, side: int) -> Tensor:
    """The middle (3, side, side) of the image, whose shorter side is first resized to 8/7 side."""
    from torchvision.transforms.v2 import functional

    resized = functional.resize(image, [side * 256 // 224])
    cropped: Tensor = functional.center_crop(resized, [side])
    return cropped
