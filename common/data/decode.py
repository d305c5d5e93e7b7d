"""Images as tensors: decoded, checked, cut to the size that a model sees."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from common import log
from common.errors import InputError
from common.masking import printable
from common.reading import refuse_closed
from common.terminal import progress_bar

if TYPE_CHECKING:
    from PIL import Image

_DEEP = ("I", "F")
"""Begin Pillow's modes of more than 8 bits per channel, which convert("RGB") cuts off."""

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"}


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    stem, dot, ending = name.rpartition(".")
    return bool(stem) and dot + ending.lower() in SUFFIXES


def faults_of(files: Sequence[tuple[Path, object]], *, show_progress: bool) -> list[str]:
    """What is wrong with images, and what to do: each (path, class) is decoded, on all cores.

    Raises:
        InputError: this user may not read one.
    """
    bar = progress_bar(
        len(files), main=show_progress, unit="image", desc="checking images", keep=False
    )
    faults: list[str] = []
    with bar, ThreadPoolExecutor() as pool:
        for start in range(0, len(files), 1024):  # each file in the pool's queue takes memory
            places = range(start, min(start + 1024, len(files)))
            paths = (files[place][0] for place in places)
            for fault in pool.map(lambda path: image_fault(path, str(path)), paths):
                faults += [fault] if fault else []
                bar.update()
    return faults


def refuse_faults(faults: Sequence[str]) -> None:
    """Raise InputError if there are faults. 20 of them are shown; a file holds all, if more."""
    if len(faults) < 2:
        if faults:
            raise InputError(faults[0])
        return
    lines, where = sorted({printable(fault) for fault in faults}), ""
    for line in lines[:20]:
        log.warning(line)
    if len(lines) > 20:
        with suppress(OSError):  # no room: the others are named when these are gone
            file = NamedTemporaryFile("w", -1, "utf-8", None, ".txt", "bad-images-", delete=False)  # noqa: SIM115
            with file:
                file.write("\n".join([*lines, ""]))
            where = f"; all are in {file.name}"
    raise InputError(f"{len(lines)} images cannot be used{where}; the first: {lines[0]}")


def image_fault(source: Path | bytes, name: str) -> str | None:
    """What is wrong with an image file, or its content, and what to do; None: nothing."""
    from PIL import Image, ImageOps

    try:
        with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
            if image.mode.startswith(_DEEP):
                return f"{name} has {_too_deep(image)}"
            # A JPEG is then decoded at this size, which is faster and still reads the whole file.
            image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
            image.load()
            try:
                ImageOps.exif_transpose(image).convert("RGB")
            except Exception:  # TorchCodec may decode it, as it ignores some faults of EXIF data
                decoded(source, name)
    except PermissionError:
        if isinstance(source, Path):
            refuse_closed("--data-path", source)
        raise
    except Image.DecompressionBombError as error:
        return f"{name} is larger than Pillow opens ({error}): make a smaller copy, or remove it"
    except Exception as error:  # Pillow's decoders raise many types
        what = re.sub(r" <_io.*>$", "", " ".join(str(error).split()))  # says nothing of the file
        return f"{name} cannot be decoded as an image ({what}): remove or replace it"
    return None


def _too_deep(image: "Image.Image") -> str:
    """What is said of an image of more than 8 bits per channel."""
    values, how, kept = np.asarray(image), "a", "nothing is lost, because its values fit"
    with np.errstate(all="ignore"):
        fits = bool((values == values.astype(np.uint8)).all())
    if not fits:
        kept = "finer steps of grey are lost"
        how = "((a - a.min()) * (255 / (a.max() - a.min())))"
        if image.mode.startswith("I;16"):
            how = "(a // 257)"
    return (
        f"more than 8 bits per channel (mode {image.mode}): replace it by a copy of 8 bits "
        f"({kept}): from PIL import Image; import numpy; a = numpy.asarray(Image.open(FILE)); "
        f"Image.fromarray({how}.astype('uint8')).save(COPY)"
    )


@cache
def fast_jpeg() -> Callable[[Path | bytes], Tensor] | None:
    """TorchCodec's JPEG decoder, which gives the same bytes as Pillow but is faster.

    None if TorchCodec is not installed or does not fit this torch; it needs 2.11 or newer.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):
        return None
    return cast(Callable[[Path | bytes], Tensor], decode_jpeg)


def decoded(source: Path | bytes, name: str = "") -> Tensor:
    """An RGB image as a uint8 tensor (3, height, width).

    Args:
        source: an image file, or its content, which has `name`.
    """
    suffix = Path(name if isinstance(source, bytes) else source).suffix.lower()
    if suffix in (".jpg", ".jpeg") and (decode := fast_jpeg()):
        with suppress(RuntimeError, ValueError):  # Pillow tells what is wrong, or can decode it
            return decode(source)
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    with Image.open(source if isinstance(source, Path) else BytesIO(source)) as opened:
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
