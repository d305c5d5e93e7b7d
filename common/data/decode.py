"""Images as tensors: decoded, checked, cut to the size that a model sees."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from common.errors import InputError
from common.reading import refuse_closed
from common.terminal import progress_bar

_DEEP = ("I", "F")
"""Begin Pillow's modes of more than 8 bits per channel, which convert("RGB") cuts off."""

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"}


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    stem, dot, ending = name.rpartition(".")
    return bool(stem) and dot + ending.lower() in SUFFIXES


def verify(files: Sequence[tuple[Path, object]], *, show_progress: bool) -> None:
    """Decode the image of every (path, class) once, on all cores.

    Raises:
        InputError: names the first image that cannot be decoded, and counts the others; or the
            first one that this user may not read.
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
    refuse_faults(faults, "remove or replace it")


def refuse_faults(faults: Sequence[str], advice: str) -> None:
    """Raise InputError with the first of the faults and the number of the others, if any."""
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}: {advice}")


def image_fault(source: Path | bytes, name: str) -> str | None:
    """What is wrong with an image file, or with its content; None: it can be decoded."""
    from PIL import Image, ImageOps

    try:
        with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
            if image.mode.startswith(_DEEP):
                return f"{name} has more than 8 bits per channel (mode {image.mode})"
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
    except Exception as error:  # Pillow's decoders raise many types
        return f"{name} cannot be decoded as an image ({error})"
    return None


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
