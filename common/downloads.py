"""The public files that `--download` gets: the flower photos, and torchvision's weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.errors import InputError

FLOWER_PHOTOS = (
    "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
)
"""An archive of 228,813,984 bytes, with 3,670 photos in five classes."""

FLOWER_PHOTOS_MD5 = "6f87fb78e9cc9ab41eff2015b380011d"


@contextmanager
def downloading(what: str, folder: Path | None, by_hand: str) -> Iterator[None]:
    """Raise InputError for a download into `folder` that fails or gives another file.

    `by_hand` says what to do on a machine without internet.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"cannot download {what} into {folder} ({said}): {by_hand}") from error


def download_flower_photos(folder: Path, *, wanted: bool) -> None:
    """Download the photos to `folder`, unless it exists or has another name than flower_photos.

    They are unpacked beside it first, so that a broken download leaves no folder that looks whole.

    Raises:
        InputError: also if they are missing and not `wanted`.
    """
    if folder.name != "flower_photos" or folder.exists():
        return
    if not wanted:
        raise InputError(f"--data-path {folder} is not a folder: add --download to get the photos")
    from torchvision.datasets.utils import download_and_extract_archive

    parent = folder.parent
    with downloading(FLOWER_PHOTOS, parent, "unpack the file there yourself"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".flower_photos-") as part:
            download_and_extract_archive(FLOWER_PHOTOS, part, md5=FLOWER_PHOTOS_MD5)
            (Path(part) / folder.name).rename(folder)


def download_weights(model: str, path: Path, *, wanted: bool) -> None:
    """Download torchvision's weights of `model` to `path`, if its name is that of their file.

    Raises:
        InputError: also if such a file is missing and not `wanted`.
    """
    from torchvision.models import get_model_weights, list_models

    published = get_model_weights(model) if model in list_models() else ()
    addresses = [weights.url for weights in published if weights.url.endswith(f"/{path.name}")]
    if not addresses or path.exists():
        return
    if not wanted:
        raise InputError(f"--weights {path} is not a file: add --download to get {addresses[0]}")
    sha256 = path.stem.rpartition("-")[2]  # its first digits end the file's name
    with downloading(addresses[0], path.parent, "put the file there yourself"):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(addresses[0], str(path), sha256)
