"""The data sets: real ones, embedded or on disk, each as a `Data` of two `Samples`."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import image_folder
from common.data.stream import (
    Key,
    Samples,
)
from common.errors import InputError
from common.group.collectives import agreed
from common.launch.ranks import Ranks
from common.options import free
from common.seeds import mix

log = logging.getLogger("recipes")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and how it is loaded."""

    data: Literal["digits", "imagefolder", "fashion_mnist", "cifar10", "fake"] = "digits"
    """Data set. digits (1,797 images of 8x8 px, from scikit-learn) needs no download."""
    data_path: Path | None = free(None)
    """Folder of the data; imagefolder: one sub-folder per class, or train/ and val/ with
    one sub-folder per class in each."""
    download: bool = free(False)
    """Let rank 0 download fashion_mnist or cifar10 into --data-path."""
    verify_images: bool = free(True)
    """imagefolder: decode every image before training, so that a bad one is found now; once, until
    a file changes (remembered in ~/.cache/torch-recipes)."""
    image_size: int | None = None
    """Side of the square the model sees [px]. None: digits 8, fashion_mnist 28, cifar10 and fake
    32, imagefolder 224."""
    num_workers: int | Literal["auto"] | None = free(None)
    """Loading processes per rank [processes]; 0 loads in the training process. None: for
    imagefolder as many as the rank has cores to spare, up to 8; 0 for data in memory. auto measures
    first and remembers its answer in the run's folder."""
    loader: Literal["map", "stream"] = free("map")
    """Map-style samples with a sampler, or the same batches from a hand-sharded iterable."""
    pin_memory: bool = free(True)
    """Page-locked host memory for copies to a GPU; turn it off when host memory is short."""

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        if self.data in ("imagefolder", "fashion_mnist", "cifar10") and self.data_path is None:
            raise ValueError(f"--data {self.data} needs --data-path DIR")
        if self.image_size is not None and self.image_size < 4:
            raise ValueError(f"--image-size must be at least 4 px, got {self.image_size}")
        if isinstance(self.num_workers, int) and self.num_workers < 0:
            raise ValueError(f"--num-workers must be 0 or more, got {self.num_workers}")


@dataclass(frozen=True)
class Data:
    """A data set ready to train on."""

    train: Samples
    val: Samples
    class_names: list[str]
    channels: int
    """Channels of an image: 1 or 3."""
    side: int
    """Side of an image [px]."""
    fingerprint: str
    """SHA-256 that changes when the data does (see `load_data`)."""
    mean: Sequence[float] = (0.0,)
    """Mean of each channel, where images are bytes (`common.data.batches`); 0 to 1."""
    std: Sequence[float] = (1.0,)
    """Standard deviation of each channel; 0 to 1."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, classes and side: what a model must fit."""
        return self.channels, len(self.class_names), self.side


def load_data(options: DataOptions, seed: int, ranks: Ranks) -> Data:
    """Open the data set that `options` name, after rank 0 has downloaded it where asked to.

    Every rank calls it, and what one rank finds wrong is raised on all.

    The fingerprint is over the bytes of the arrays, or for imagefolder over every file's relative
    path and size.

    Args:
        options: see `DataOptions`.
        seed: splits digits and imagefolder 80/20 and keys the augmentation.
        ranks: imagefolder's check is shared out over them; rank 0 shows its progress.

    Raises:
        InputError: no such folder, no classes, an empty class, files that are no images.
    """
    with agreed():
        if ranks.is_main and options.download and options.data in ("fashion_mnist", "cifar10"):
            try:
                for train in (True, False):
                    _torchvision_class(options)(options.data_path, train=train, download=True)
            except (OSError, RuntimeError) as error:
                raise InputError(
                    f"cannot download {options.data} into {options.data_path}: {error}"
                ) from error
    if options.data == "imagefolder":
        return _image_folder(options, seed, ranks)
    with agreed():
        return _open(options, seed)
    raise AssertionError("agreed() raises where the block did")


def _open(options: DataOptions, seed: int) -> Data:
    if options.data == "digits":
        pixels, labels = _digits()
        images = (torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16 - 0.305) / 0.376
        order = np.random.Generator(np.random.PCG64(mix(seed))).permutation(len(images)).tolist()
        arrays = Arrays(_resized(images, options.image_size), labels)
        cut = len(order) * 4 // 5
        return _arrays_data(arrays, order[:cut], order[cut:], seed)
    if options.data == "fake":
        images, labels = _fake_images(options.image_size or 32)
        arrays, count = Arrays(images, labels), len(labels)
        cut = count * 4 // 5
        return _arrays_data(arrays, range(cut), range(cut, count), seed)
    return _torchvision(options, seed)


def _arrays_data(arrays: "Arrays", train: Sequence[int], val: Sequence[int], seed: int) -> Data:
    channels, side, _ = arrays.images[0].shape
    names = [str(number) for number in range(10)]
    training = ArraySamples(arrays, train, seed, shift=True)
    validation = ArraySamples(arrays, val, seed)
    return Data(training, validation, names, channels, side, arrays.digest())


def _digits() -> tuple[Any, Any]:
    """Pixels (1797, 64) in 0..16 and classes (1797,): what `sklearn.datasets.load_digits` reads.

    From the file in the package, because importing sklearn takes a second in every rank.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError("--data digits needs scikit-learn, which holds it: pip install it")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return table[:, :-1], table[:, -1].astype(int)


class Arrays:
    """Images (count, channels, height, width) or other float32 inputs, and labels, in memory."""

    def __init__(self, images: Tensor, labels: Any) -> None:
        self.images, self.labels = images, torch.as_tensor(labels)

    def digest(self) -> str:
        """SHA-256 over all of it."""
        return hashlib.sha256(
            self.images.numpy().tobytes() + bytes(self.labels.tolist())
        ).hexdigest()


class ArraySamples(Samples):
    """Images in memory, a batch at once; with `shift` each is `shifted` by what its key draws."""

    def __init__(
        self, source: Arrays, indices: Sequence[int], seed: int, *, shift: bool = False
    ) -> None:
        super().__init__(source, indices, torch.Tensor.clone, seed)
        self.shift = shift

    def __getitems__(self, keys: Sequence[Key]) -> list[Tensor]:
        """Images and classes of a batch, of one epoch."""
        places = [self.indices[index] for _, index in keys]
        images, labels = self.source.images[places], self.source.labels[places]
        return [shifted(images, self.seeds_of(keys)) if self.shift else images, labels]


def shifted(images: Tensor, draws: NDArray[np.uint64]) -> Tensor:
    """Images moved by up to an eighth of the side, each way, filled with each one's darkest value.

    Args:
        images: (samples, channels, height, width).
        draws: a random number for each.
    """
    count, channels, height, width = images.shape
    reach = max(1, width // 8)
    ways = 2 * reach + 1  # of 2^64 numbers: none of them is likelier by more than 10^-16
    down, right = (torch.from_numpy((draws // n % ways).astype(np.int64)) for n in (1, ways))
    padded = images.amin((1, 2, 3), keepdim=True).repeat(
        1, channels, height + 2 * reach, width + 2 * reach
    )
    padded[:, :, reach:-reach, reach:-reach] = images
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, down, right]


def _resized(images: Tensor, size: int | None) -> Tensor:
    if size in (None, images.shape[-1]):
        return images
    return torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear")


def _fake_images(size: int, count: int = 1280) -> tuple[Tensor, Tensor]:
    """Noise around one fixed pattern a class: learnable, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, size, size, generator=generator)
    labels = torch.arange(count) % 10
    return patterns[labels] + 2 * torch.randn(count, 3, size, size, generator=generator), labels


def _torchvision_class(options: DataOptions) -> Any:
    from torchvision import datasets

    return {"fashion_mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}[options.data]


def _torchvision(options: DataOptions, seed: int) -> Data:
    from torchvision.transforms import v2

    try:
        train, val = (
            _torchvision_class(options)(options.data_path, train=train) for train in (True, False)
        )
    except RuntimeError as error:
        raise InputError(
            f"no {options.data} in --data-path {options.data_path}: add --download, or put it there"
        ) from error
    size, grey = options.image_size, options.data == "fashion_mnist"
    resize = [v2.Resize((size, size))] if size else []
    side = size or (28 if grey else 32)
    mean, std = ((0.286,), (0.353,)) if grey else (IMAGENET_MEAN, IMAGENET_STD)
    augment = [v2.RandomCrop(side, padding=side // 8), v2.RandomHorizontalFlip()]
    digest = hashlib.sha256()
    for part in (train, val):
        digest.update(np.asarray(part.data).tobytes() + np.asarray(part.targets).tobytes())
    to_bytes = v2.PILToTensor()
    training = Samples(train, range(len(train)), v2.Compose([*resize, *augment, to_bytes]), seed)
    validation = Samples(val, range(len(val)), v2.Compose([*resize, to_bytes]), seed)
    channels = 1 if grey else 3
    return Data(
        training, validation, list(train.classes), channels, side, digest.hexdigest(), mean, std
    )


def _image_folder(options: DataOptions, seed: int, ranks: Ranks) -> Data:
    assert options.data_path is not None
    with agreed():
        names, files, train, val = image_folder.list_images(options.data_path, seed)
        fingerprint, copy = image_folder.fingerprints(options.data_path, files)
    if options.verify_images:
        image_folder.verify_once(files, copy, ranks)
    log.info(f"JPEGs are decoded by {'TorchCodec' if image_folder.fast_jpeg() else 'Pillow'}")
    side = options.image_size or 224
    augment = partial(image_folder.random_crop, side=side)
    plain = partial(image_folder.center_crop, side=side)
    source = image_folder.ImageFiles(files)
    training = Samples(source, train, augment, seed)
    validation = Samples(source, val, plain, seed)
    return Data(
        training, validation, names, 3, side, fingerprint, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
