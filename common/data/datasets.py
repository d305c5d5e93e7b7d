"""The data sets: each function opens one, and returns a `Data` of two `Samples`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import log
from common.data import decode, image_folder
from common.data.array_file import Texts
from common.data.packed import PackedImages, copied_once_per_host, open_on_all_ranks
from common.data.stream import Key, Samples
from common.downloads import download_flower_photos, downloading
from common.errors import InputError
from common.group.collectives import agreed
from common.launch.ranks import Ranks
from common.option_rules import may_change, refuse_below, same_as
from common.reading import files_below, refuse_closed
from common.seeds import mix

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_TORCHVISION: dict[str, tuple[str, str, int, Sequence[float], Sequence[float]]] = {
    "fashion_mnist": ("FashionMNIST", "FashionMNIST", 28, (0.286,), (0.353,)),
    "cifar10": ("CIFAR10", "cifar-10-batches-py", 32, IMAGENET_MEAN, IMAGENET_STD),
}
"""torchvision's class, its folder in --data-path, the side of an image [px], mean and standard
deviation of its channels."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How your own data are loaded."""

    num_workers: int | Literal["auto"] | None = may_change(None)
    """Loading processes per rank [processes]; 0: the training process loads.
    None: for photos one per free CPU core, at most 16; else 0.
    auto: measured at the start, and remembered in the run's folder."""
    pin_memory: bool = may_change(True)
    """Page-locked host memory for copies to a GPU: about two batches per loading process, which
    the kernel cannot swap out. Turn it off if host memory is short."""

    def __post_init__(self) -> None:
        if self.num_workers != "auto":
            refuse_below(self, num_workers=0)


@dataclass(frozen=True)
class DataOptions(LoaderOptions):
    """What to train on, and how it is loaded."""

    data: Literal["digits", "imagefolder", "packed", "fashion_mnist", "cifar10", "fake"] = same_as(
        "digits", packed="imagefolder"
    )
    """Data set. digits (1,797 images of 8x8 px, from scikit-learn) needs no download. packed: an
    image folder that make pack has packed; a run may change from one to the other."""
    data_path: Path | None = may_change(None)
    """Folder of the data.
    imagefolder: one sub-folder per class, or train/ and val/ with such sub-folders.
    packed: the OUT of make pack.
    A run goes on, and is evaluated, only with images of the same paths and sizes in bytes. Of 100
    images, evenly spread, the bytes are compared, too. A change in another one is not noticed if
    its size stays."""
    download: bool = may_change(False)
    """Let rank 0 download what is missing: fashion_mnist or cifar10 into --data-path;
    the flower photos, if --data-path ends in flower_photos; torchvision's file of --weights."""
    verify_images: bool = may_change(True)
    """imagefolder: decode every image first, to find a bad one early.
    The result is kept in ~/.cache/torch-recipes until a file changes."""
    augment: bool = True
    """Change training images at random: digits and fake are shifted; fashion_mnist and cifar10
    shifted and mirrored; photos cut out, resized and mirrored."""
    data_local: Path | None = may_change(None)
    """packed: copy it to this folder first, once per host, such as a job's $TMPDIR."""
    image_size: int | None = None
    """Side of the square that the model sees [px].
    None: digits 8, fashion_mnist 28, cifar10 and fake 32, imagefolder and packed 224."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data in ("imagefolder", "packed", *_TORCHVISION) and self.data_path is None:
            raise ValueError(f"--data {self.data} needs --data-path DIR")
        refuse_below(self, image_size=4)


@dataclass(frozen=True)
class Data:
    """A data set, ready to train on. InputError: a part is empty, or nothing tells data apart."""

    train: Samples
    val: Samples
    fingerprint: str
    """Changes with the data. SHA-256 over the bytes of the images and labels; imagefolder
    and packed: over all files' relative paths and sizes, and over the bytes of 100 of them."""
    class_names: Sequence[str] = ()
    channels: int = 0
    side: int = 0
    """Of an image: 1 or 3 channels; the side [px]."""
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    """Of each channel, for images that are bytes (`common.data.batches`); 0 to 1."""
    resize: Sequence[int] = ()
    """An image's shorter side, or both, before its middle is cut out [px]; empty: no images."""
    held_out: Sequence[str] = ()
    """imagefolder and packed: the files to validate on, by their path in the folder."""
    labels: Sequence[int] | NDArray[Any] = ()
    """Classes of the training samples, in their order; only --class-weights needs them."""

    def __post_init__(self) -> None:
        for part, samples in (("train", self.train), ("val", self.val)):
            if not len(samples):
                raise InputError(
                    f"the data set has no samples in Data.{part}: give it at least one"
                )
            samples.classes = len(self.class_names)
        if self.train.source is self.val.source and self.train.seed == self.val.seed:
            both = np.intersect1d(self.train.indices, self.val.indices)
            if len(both):
                log.warning(
                    f"{len(both)} samples to validate on are trained on, too, such as number "
                    f"{both[0]}: the metrics will be too good"
                )
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InputError(
                f"Data.fingerprint is {self.fingerprint!r}: give a text that changes with the data "
                "(docs/bring-your-own.md)"
            )

    @property
    def indices_sha256(self) -> str:
        """SHA-256 over the indices to train and to validate on, in their order."""
        digest = hashlib.sha256()
        for samples in (self.train, self.val):
            digest.update(np.asarray(samples.indices, np.int64).tobytes())
        return digest.hexdigest()

    @property
    def sizes_for_model(self) -> tuple[int, int, int]:
        """Channels, classes and side, which a model must fit."""
        return self.channels, len(self.class_names), self.side

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a script needs to show the model an image."""
        sizes = {"size": [self.side, self.side], "resize": self.resize, "crop": self.side}
        normal = {"mean": self.mean, "std": self.std}
        return {"channels": self.channels, **sizes, **normal, "classes": self.class_names}


def load_data(options: DataOptions, seed: int, ranks: Ranks) -> Data:
    """Open the data set; every rank calls it, and an error on one rank is raised on all.

    Args:
        options: name the data set. Rank 0 downloads it first, if they ask for that.
        seed: splits digits and imagefolder 80/20, and keys the augmentation.
        ranks: share the work of verifying an image folder.

    Raises:
        InputError: no such folder, no classes, an empty class, files that are no images, or that
            this user may not read.
    """
    if options.data == "imagefolder":
        return image_folder_data(options, seed, ranks)
    if options.data == "packed":
        return packed_data(options, seed, ranks)
    if options.data in _TORCHVISION:
        with agreed():
            _refuse_closed_files(options)
    with agreed():
        if ranks.is_main and options.download and options.data in _TORCHVISION:
            by_hand = f"bring the folder {_TORCHVISION[options.data][1]} from another machine"
            with downloading(options.data, options.data_path, by_hand):
                for train in (True, False):
                    _torchvision_part(options, train=train, download=True)
    make = {"digits": digits_data, "fake": fake_data}.get(options.data, torchvision_data)
    with agreed():
        return make(options, seed)


def digits_data(options: DataOptions, seed: int) -> Data:
    """scikit-learn's digits, normalised, in memory; split by seed."""
    pixels, labels = read_digits()
    mean, std = 0.305, 0.376
    images = (torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16 - mean) / std
    if options.image_size not in (None, 8):
        images = torch.nn.functional.interpolate(images, options.image_size, mode="bilinear")
    order = np.random.Generator(np.random.PCG64(mix(seed))).permutation(len(images)).tolist()
    return _in_memory(options, seed, images, torch.from_numpy(labels), order, mean, std)


def read_digits() -> tuple[Any, Any]:
    """Pixels (1797, 64) in 0..16 and classes (1797,): what `sklearn.datasets.load_digits` reads.

    Importing sklearn would take a second in every rank, so only its file is read.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError(
            "--data digits is part of scikit-learn, which is missing: pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return table[:, :-1], table[:, -1].astype(int)


def fake_data(options: DataOptions, seed: int) -> Data:
    """1,280 images of noise around one fixed pattern per class, the same on every machine."""
    size, count = options.image_size or 32, 1280
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, size, size, generator=generator)
    labels = torch.arange(count) % 10
    images = patterns[labels] + 2 * torch.randn(count, 3, size, size, generator=generator)
    return _in_memory(options, seed, images, labels, range(count), 0.0, 1.0)


def _in_memory(
    options: DataOptions,
    seed: int,
    images: Tensor,
    labels: Tensor,
    order: Sequence[int],
    mean: float,
    std: float,
) -> Data:
    """Ten classes; the first 80 % in `order` are for training, the others for validation."""
    cut = len(order) * 4 // 5
    train = ArraySamples([images, labels], order[:cut], seed, shift=options.augment)
    val = ArraySamples([images, labels], order[cut:], seed)
    channels, side, _ = images[0].shape
    normal, names = ([mean] * channels, [std] * channels), [str(n) for n in range(10)]
    sizes = channels, side, *normal, [side, side]
    return Data(train, val, train.digest(), names, *sizes, labels=labels[list(order[:cut])].numpy())


class ArraySamples(Samples):
    """Samples of a list of tensors, read a batch at a time; `shift` moves the first's images."""

    def __init__(
        self, source: list[Tensor], indices: Sequence[int], seed: int, *, shift: bool = False
    ) -> None:
        super().__init__(source, indices, seed)
        self.shift = shift

    def __getitems__(self, keys: Sequence[Key]) -> list[Tensor]:
        """A part of each tensor."""
        inputs, *more = (part[[self.indices[index] for _, index in keys]] for part in self.source)
        return [shifted(inputs, self.seeds_of(keys)) if self.shift else inputs, *more]

    def digest(self) -> str:
        """SHA-256 over all tensors."""
        return hashlib.sha256(b"".join(p.numpy().tobytes() for p in self.source)).hexdigest()


def shifted(images: Tensor, draws: NDArray[np.uint64]) -> Tensor:
    """Images moved by up to an eighth of the side; the rim is filled with an image's darkest value.

    Args:
        images: (samples, channels, height, width).
        draws: (samples,), a random number for each image.
    """
    count, channels, height, width = images.shape
    reach = max(1, width // 8)
    ways = 2 * reach + 1  # 2^64 is no multiple of it, which changes a probability by 10^-16
    down, right = (torch.from_numpy((draws // n % ways).astype(np.int64)) for n in (1, ways))
    padded = images.amin((1, 2, 3), keepdim=True).repeat(
        1, channels, height + 2 * reach, width + 2 * reach
    )
    padded[:, :, reach:-reach, reach:-reach] = images
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, down, right]


def torchvision_data(options: DataOptions, seed: int) -> Data:
    """fashion_mnist or cifar10, from the files that torchvision downloads."""
    from torchvision.transforms import v2

    _, _, side, mean, std = _TORCHVISION[options.data]
    side = options.image_size or side
    plain = v2.Compose([v2.PILToTensor(), v2.Resize((side, side))])
    crop = v2.RandomCrop(side, padding=side // 8)
    augmented = v2.Compose([plain, crop, v2.RandomHorizontalFlip()])
    try:
        changed = augmented if options.augment else plain
        train = _torchvision_part(options, train=True, transform=changed)
        val = _torchvision_part(options, train=False, transform=plain)
    except RuntimeError as error:
        raise InputError(
            f"no {options.data} in --data-path {options.data_path}: add --download, or put it there"
        ) from error
    digest = hashlib.sha256()
    for part in (train, val):
        digest.update(np.asarray(part.data).tobytes() + np.asarray(part.targets).tobytes())
    labels, names, sizes = train.targets, train.classes, (len(mean), side, mean, std, [side, side])
    train, val = (Samples(part, range(len(part)), seed) for part in (train, val))
    return Data(train, val, digest.hexdigest(), names, *sizes, labels=labels)


def _refuse_closed_files(options: DataOptions) -> None:
    """torchvision would say that files which this user may not read are not there."""
    assert options.data_path is not None
    refuse_closed("--data-path", options.data_path)
    folder = options.data_path / _TORCHVISION[options.data][1]
    if folder.is_dir():
        files = files_below("--data-path", folder)
        refuse_closed("--data-path", *(Path(file.path) for file in files))


def _torchvision_part(options: DataOptions, **more: Any) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, _TORCHVISION[options.data][0])
    return kind(options.data_path, **more)


def image_folder_data(options: DataOptions, seed: int, ranks: Ranks) -> Data:
    """The images in `--data-path`, one sub-folder per class; verified. Calls collectives."""
    assert options.data_path is not None
    with agreed():
        if ranks.is_main:
            download_flower_photos(options.data_path, wanted=options.download)
    listing, copy = image_folder.list_once_per_host(options.data_path, ranks)
    files = image_folder.Files(options.data_path, listing.names, listing.labels)
    with agreed():
        parts = listing.split(seed)
    if options.verify_images:
        image_folder.verify_once(files, copy, ranks)
    with agreed():
        sha256 = image_folder.fingerprint(listing, lambda index: files[index][0].read_bytes())
    return _photos(options, seed, listing, sha256, parts, partial(image_folder.ImageFiles, files))


def packed_data(options: DataOptions, seed: int, ranks: Ranks) -> Data:
    """The images of a pack, which were verified when they were packed. Calls collectives."""
    assert options.data_path is not None
    root = options.data_path
    if options.data_local:
        root = copied_once_per_host(root, options.data_local, ranks)
    pack = open_on_all_ranks(root, ranks)
    with agreed():
        parts = pack.listing.split(seed)
        sha256 = image_folder.fingerprint(pack.listing, pack.read)
    return _photos(options, seed, pack.listing, sha256, parts, partial(PackedImages, pack))


def _photos(
    options: DataOptions,
    seed: int,
    listing: image_folder.Listing,
    sha256: str,
    parts: tuple[NDArray[Any], ...],
    source: Callable[[Callable[[Tensor], Tensor]], Any],
) -> Data:
    """Photos in RGB, cut to the side that the model sees; `source` takes the function that cuts."""
    log.info(f"JPEGs are decoded by {'TorchCodec' if decode.fast_jpeg() else 'Pillow'}")
    side = options.image_size or 224
    normal, resize = (IMAGENET_MEAN, IMAGENET_STD), [side * 256 // 224]  # as in center_crop
    training_crop = decode.random_crop if options.augment else decode.center_crop
    train, val = (
        Samples(source(partial(crop, side=side)), part, seed)
        for part, crop in zip(parts, (training_crop, decode.center_crop), strict=True)
    )
    held_out = Texts(listing.names.joined, listing.names.ends, parts[1])
    more: Any = {"held_out": held_out, "labels": listing.labels[parts[0]]}
    return Data(train, val, sha256, listing.class_names, 3, side, *normal, resize, **more)
