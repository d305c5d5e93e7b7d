"""Data sets, on small files in their real formats."""

import gzip
import hashlib
import os
import pickle
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torchvision import transforms as v1

from common import log
from common.data import decode, image_folder, workers
from common.data.batches import DeviceBatches
from common.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Data,
    DataOptions,
    load_data,
    read_digits,
    shifted,
)
from common.data.image_folder import list_images
from common.data.stream import Samples
from common.data.workers import cores_per_rank, default_num_workers
from common.errors import InputError, TrainingError
from common.launch.ranks import Ranks
from tests.helpers.commands import Recipe
from tests.helpers.images import (
    faulty_folder,
    flowers,
    idx,
    photo,
    served,
    small_fashion_mnist,
)
from tests.helpers.pool import Pool, in_group


def load(seed: int = 0, **options: Any) -> Data:
    data: Data = in_group(Ranks(), lambda ranks: load_data(DataOptions(**options), seed, ranks))
    return data


def test_digits_are_what_sklearn_loads() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = read_digits()
    assert np.array_equal(pixels, load_digits().data)
    assert np.array_equal(labels, load_digits().target)


def test_digits_are_real_and_split_by_seed() -> None:
    data, other = load(), load(seed=1)
    assert (len(data.train), len(data.val), len(data.class_names)) == (1437, 360, 10)
    assert set(data.train.indices).isdisjoint(data.val.indices)
    assert set(data.train.indices) != set(other.train.indices)
    assert data.fingerprint == other.fingerprint
    assert data.train[(0, 0)][0].shape == (1, 8, 8)
    assert load(image_size=16).val[(0, 0)][0].shape == (1, 16, 16)


def test_a_batch_in_memory_is_its_samples_each_shifted_by_its_own_key() -> None:
    """Each is padded with its darkest value and cropped at a place that only its key decides."""
    data = load(data="fake", image_size=16)
    keys = [(3, index) for index in (5, 0, 17, 5)]
    images, labels = data.train.__getitems__(keys)
    places = set()
    for key, image, label in zip(keys, images, labels, strict=True):
        alone, its_label = data.train[key]
        assert torch.equal(alone, image)
        assert its_label == label
        whole = data.train.source[0][data.train.indices[key[1]]]
        padded = nn.functional.pad(whole, [2] * 4, value=float(whole.min()))
        (place,) = (
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(image, padded[:, down : down + 16, right : right + 16])
        )
        places.add(place)
    assert len(places) == 3, "each has its own draw"
    marked = torch.zeros(len(data.train), 1, 16, 16)
    marked[:, :, 8, 8] = 1
    moved = shifted(marked, data.train.seeds_of([(0, i) for i in range(len(data.train))]))
    down_and_right = moved.flatten(1).argmax(1).bincount()
    assert int((down_and_right > len(data.train) / 25 * 0.5).sum()) == 25, (
        "all 25 places are about equally frequent"
    )


@pytest.mark.parametrize("data", ["digits", "fake", "fashion_mnist", "imagefolder"])
def test_without_augmentation_an_image_is_the_same_in_every_epoch(
    data: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data}
    if data == "fashion_mnist":
        small_fashion_mnist(tmp_path)
    elif data == "imagefolder":
        flowers(tmp_path)
    if data in ("fashion_mnist", "imagefolder"):
        options["data_path"] = tmp_path

    def images(**more: bool) -> list[Tensor]:
        train = load(**options, **more).train
        return [train[(epoch, 0)][0] for epoch in range(8)]

    assert not all(torch.equal(image, images()[0]) for image in images()[1:])
    first, *others = images(augment=False)
    assert all(torch.equal(image, first) for image in others)


def test_fake_data_is_the_same_every_time() -> None:
    first, second = load(data="fake", image_size=12), load(data="fake", image_size=12)
    assert first.train[(0, 3)][0].shape == (3, 12, 12)
    assert torch.equal(first.val[(0, 3)][0], second.val[(0, 3)][0])


def test_image_folder_splits_each_class_80_to_20(tmp_path: Path) -> None:
    root = flowers(tmp_path / "my photos", names=("gänse blümchen", "tulip", "薔薇"))
    data = load(data="imagefolder", data_path=root, image_size=24)
    assert data.class_names == ["gänse blümchen", "tulip", "薔薇"]
    assert (len(data.train), len(data.val)) == (24, 6)
    labels = [data.val[(0, i)][1] for i in range(6)]
    assert sorted(labels) == [0, 0, 1, 1, 2, 2]
    assert data.train[(0, 0)][0].shape == (3, 24, 24)
    again = load(data="imagefolder", data_path=root, image_size=24)
    assert np.array_equal(again.train.indices, data.train.indices)
    assert torch.equal(again.train[(1, 2)][0], data.train[(1, 2)][0])
    assert not torch.equal(again.train[(1, 2)][0], data.train[(0, 2)][0])


def test_classes_without_images_to_validate_on_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    flowers(tmp_path, per_class=4, names=("daisy", "rose"))
    flowers(tmp_path, per_class=5, names=("tulip",))
    listing, _ = list_images(tmp_path)
    _, val = listing.split(0)
    assert {Path(listing.names[index]).parent.name for index in val} == {"tulip"}
    assert caplog.messages == [
        "2 classes have fewer than five images, so none to validate on: daisy, rose"
    ]


def test_names_of_data_stay_in_their_line_on_a_terminal(recipe: Recipe) -> None:
    """A class whose name ends the line, begins one with error:, and clears the screen."""
    name, root = "a\nerror: rank 7\x1b[2J\x9b2J", recipe.tmp_path / "data"
    flowers(root, 4, (name,))
    flowers(root, 6, ("tulip",))
    for number in (1, 2):
        (root / name / f"{name} {number}.jpg").write_text("no image")
    options = "--nproc 2 --device cpu --image-size 8 --num-workers 0 --data imagefolder --data-path"
    result = recipe("ddp_launch", *options.split(), root, "--check")
    said, shown = f"{result.stdout}\n{result.stderr}", r"a\nerror: rank 7\x1b[2J\x9b2J"
    assert f"none to validate on: {shown}\n" in said
    assert f"{shown} 2.jpg cannot be decoded" in said
    assert not {"\x1b", "\x9b"} & {*said}, said
    (error,) = result.errors
    assert "2 images cannot be used; the first: " in error, "each rank has found one"
    assert result.status == 2


def test_image_folder_with_its_own_split(tmp_path: Path) -> None:
    flowers(tmp_path / "train", per_class=3)
    flowers(tmp_path / "val", per_class=2)
    data = load(data="imagefolder", data_path=tmp_path, image_size=24)
    assert (len(data.train), len(data.val)) == (6, 4)


def test_a_changed_folder_has_another_fingerprint(tmp_path: Path) -> None:
    flowers(tmp_path)
    before = load(data="imagefolder", data_path=tmp_path).fingerprint
    photo(tmp_path / "daisy" / "one more.jpg", 5)
    assert load(data="imagefolder", data_path=tmp_path).fingerprint != before


def test_the_bytes_of_100_images_are_in_the_fingerprint(tmp_path: Path) -> None:
    listing, _ = list_images(flowers(tmp_path))
    read: list[int] = []

    def byte(index: int) -> bytes:
        read.append(index)
        return b"1" if index == changed else b"0"

    changed = -1
    first = image_folder.fingerprint(listing, byte)
    assert first.startswith(f"{listing.fingerprint}, contents ")
    assert read == list(range(20)), "all, if there are few"
    for index in range(20):
        changed = index
        assert image_folder.fingerprint(listing, byte) != first
    read.clear()
    many = replace(listing, labels=np.zeros(1_234_567, np.int32))
    image_folder.fingerprint(many, byte)
    assert (len(read), read[0]) == (100, 0)
    assert set(np.diff(read).tolist()) == {12345, 12346}


def test_greyscale_palette_and_transparent_images_are_read(tmp_path: Path) -> None:
    flowers(tmp_path)
    for mode in ("L", "P", "RGBA", "CMYK"):
        suffix = "jpg" if mode == "CMYK" else "png"
        Image.new(mode, (20, 20)).save(tmp_path / "daisy" / f"{mode}.{suffix}")
    data = load(data="imagefolder", data_path=tmp_path, image_size=16)
    shapes = {data.train[(0, i)][0].shape for i in range(len(data.train))}
    assert shapes == {(3, 16, 16)}


def photos(root: Path) -> Path:
    """Write the two photos in scikit-learn as JPEG files, one of them upright."""
    for number, pixels in enumerate(load_sample_images().images):
        path = root / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True)
        image = Image.fromarray(pixels).resize((500, 375), Image.Resampling.LANCZOS)
        (image.rotate(90, expand=True) if number else image).save(path, quality=90)
    return root


class Pictures:
    """The same files, opened by Pillow."""

    def __init__(self, files: list[tuple[Path, int]], steps: list[Any]) -> None:
        self.files, self.transform = files, v1.Compose(steps)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


def test_photos_are_what_the_classic_pipeline_shows(tmp_path: Path) -> None:
    """Crops and flips are the same, and colours within 0.2 of 255 grey levels on average.

    Pillow's own resizing differs between versions by up to 0.17 (10.2 and 13.0), its decoders not.
    """
    photos(tmp_path / "train")
    photos(tmp_path / "val")
    data = load(data="imagefolder", data_path=tmp_path)
    to_float = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    augment = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()]
    plain = [v1.Resize(256), v1.CenterCrop(224)]
    std = torch.tensor(IMAGENET_STD).view(-1, 1, 1)
    batches = DeviceBatches([], torch.device("cpu"), torch.float32, data.mean, data.std)
    for ours, steps in ((data.train, augment), (data.val, plain)):
        theirs = Samples(Pictures(ours.source.files, steps + to_float), ours.indices, 0)
        for epoch in range(20):
            for index in range(2):
                (mine, label), (classic, expected) = ours[(epoch, index)], theirs[(epoch, index)]
                assert (mine.dtype, label) == (torch.uint8, expected), "bytes travel"
                error = (batches.prepare(mine) - classic) * std * 255
                assert error.abs().mean() < 0.2


def test_bytes_are_normalised_as_torchvision_does() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    batches = DeviceBatches([], torch.device("cpu"), torch.float32, IMAGENET_MEAN, IMAGENET_STD)
    expected = v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)(images / 255)
    assert torch.allclose(batches.prepare(images), expected, rtol=0, atol=1e-6)
    floats = torch.randn(2, 1, 8, 8)
    assert batches.prepare(floats) is floats, "taken as they are"


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_both_jpeg_decoders_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(load_sample_images().images[0]).convert(mode).save(path, quality=80)
    assert (decode.fast_jpeg() is None) == (torch.__version__ < "2.11")
    fast = image_folder.ImageFiles([(path, 0)], torch.clone)[0][0]
    monkeypatch.setattr(decode, "fast_jpeg", lambda: None)
    assert torch.equal(fast, image_folder.ImageFiles([(path, 0)], torch.clone)[0][0])


@pytest.mark.parametrize(
    "fault",
    [
        *("truncated JPEG", "tiny", "text named .jpg", "empty class", "no classes"),
        *("16 bits", "floats", "one class", "other classes to validate on"),
        *("train valid test", "Train Val", "train", "train dev", "train valid extra"),
        *("damaged EXIF", "a class is all classes", "a class is a part of another"),
        "validation is training",
    ],
)
def test_a_bad_image_folder_is_named_before_training(tmp_path: Path, fault: str) -> None:
    says = faulty_folder(tmp_path / "data", fault)
    root = tmp_path / "data" / "daisy" if fault == "no classes" else tmp_path / "data"
    with pytest.raises(InputError, match=says):
        load(data="imagefolder", data_path=root)


def test_trains_may_be_a_class_and_what_is_beside_train_and_val_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flowers(tmp_path / "vehicles", names=("car", "train", "test"))
    found = load(data="imagefolder", data_path=tmp_path / "vehicles")
    assert found.class_names == ["car", "test", "train"]
    for part in ("train", "val"):
        flowers(tmp_path / "split" / part)
    flowers(tmp_path / "split", names=("rose",))
    (tmp_path / "split" / "runs" / "logs").mkdir(parents=True)
    with caplog.at_level("INFO", log.name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "propagate", True)
        load(data="imagefolder", data_path=tmp_path / "split")
    assert "images left out, beside train and val: those in rose" in caplog.messages


def own_copy(ranks: Ranks, root: Path, apart: bool) -> list[int]:
    """Images that this rank verifies in each of two loads; `apart`: each rank has its own copy."""
    counts: list[int] = []

    def counted(paths: Any, **_: Any) -> list[str]:
        counts.append(len(paths))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_folder, "faults_of", counted)
        options = DataOptions("imagefolder", root / str(ranks.rank if apart else 0))
        for _ in range(2):
            load_data(options, 0, ranks)
    return counts


def test_ranks_share_the_verification_of_what_they_all_see(pool: Pool, tmp_path: Path) -> None:
    for rank in range(2):
        flowers(tmp_path / str(rank), per_class=5 + rank)
    assert pool.run(in_group, 2, own_copy, tmp_path, True) == [[10], [12]]
    assert pool.run(in_group, 2, own_copy, tmp_path, False) == [[], []], "verified before"
    photo(tmp_path / "0" / "daisy" / "one more.jpg", 5)
    assert pool.run(in_group, 2, own_copy, tmp_path, False) == [[6], [5]]
    (tmp_path / "0" / "daisy" / "one more.jpg").touch()
    assert pool.run(in_group, 2, own_copy, tmp_path, False) == [[6], [5]]


def on_cores(ranks: Ranks, cores: list[set[int]], quota: float | None) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: cores[ranks.rank])
        patch.setattr(workers, "cpu_quotas", lambda: [quota] if quota else [])
        return cores_per_rank()


def test_loading_processes_by_the_cores_of_a_rank(pool: Pool) -> None:
    def shared_out(*cores: set[int], quota: float | None = None) -> tuple[int, int]:
        found = pool.run(in_group, len(cores), on_cores, list(cores), quota)
        assert len(set(found)) == 1, "one number on all ranks"
        answer: tuple[int, int] = found[0]
        return answer

    host = set(range(12))
    assert shared_out(host) == (12, 1)
    assert shared_out(host, host, host) == (4, 3)
    assert shared_out(set(range(4)), set(range(4, 8))) == (4, 2), "each bound to its own cores"
    assert shared_out(set(range(6)), set(range(4, 8))) == (3, 2), "bound to cores that overlap"
    assert shared_out({0}, {0}) == (1, 2)
    assert shared_out(host, host, quota=6.0) == (3, 2)
    gpu = torch.device("cuda")
    assert [default_num_workers(cores, gpu) for cores in (1, 4, 64)] == [1, 4, 16]
    cpu = torch.device("cpu")
    assert default_num_workers(torch.get_num_threads() + 3, cpu) == 3
    assert default_num_workers(torch.get_num_threads(), cpu) == 0


def test_more_loading_processes_than_cores_are_told_in_one_line(recipe: Recipe) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the run inherits it
    options = ("--nproc", "1", "--max-steps", "1", "--num-workers", "2")
    try:
        result = recipe("ddp_launch", *options, env={"SLURM_JOB_ID": "1"})
    finally:
        os.sched_setaffinity(0, cores)
    said = "--num-workers 2 is more than the CPU cores per rank (1): fewer may load faster"
    assert result.assert_ok().stdout.count(said) == 1
    assert "Slurm gives a rank more by --cpus-per-task" in result.stdout
    assert "Warning" not in result.stderr, "torch would say it again for each DataLoader"


def test_verification_can_be_left_out(tmp_path: Path) -> None:
    faulty_folder(tmp_path, "text named .jpg")
    data = load(data="imagefolder", data_path=tmp_path, verify_images=False)
    files = data.train.source.files
    (bad,) = (index for index, (path, _) in enumerate(files) if path.name == "notes.jpg")
    with pytest.raises(TrainingError, match=r"cannot read .*notes\.jpg"):
        data.train.source[bad]


def fashion_files(folder: Path, count: int = 20) -> list[tuple[str, str]]:
    """Gzipped IDX files as they are downloaded; returns torchvision's (name, md5) pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    resources = []
    for part in ("train", "t10k"):
        images = rng.integers(0, 255, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(array)))
            digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
            resources.append((path.name, digest))
    return resources


def test_fashion_mnist_is_downloaded_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchvision.datasets import FashionMNIST

    mirror, store = tmp_path / "mirror", tmp_path / "store"
    store.mkdir()
    monkeypatch.setattr(FashionMNIST, "resources", fashion_files(mirror))
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # no server there
    with pytest.raises(InputError, match="add --download"):
        load(data="fashion_mnist", data_path=store)
    assert not list(store.iterdir())
    with pytest.raises(InputError, match=r"cannot download.*: bring the folder FashionMNIST from"):
        load(data="fashion_mnist", data_path=store, download=True)
    with served(mirror) as address:
        monkeypatch.setattr(FashionMNIST, "mirrors", [address])
        data = load(data="fashion_mnist", data_path=store, download=True)
    assert (len(data.train), len(data.val), data.channels) == (20, 20, 1)
    assert data.class_names[9] == "Ankle boot"
    assert data.train[(0, 0)][0].shape == (1, 28, 28)
    assert (
        load(data="fashion_mnist", data_path=store, image_size=32).train[(0, 0)][0].shape[1] == 32
    )


def test_cifar10_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        digest = hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest()
        return [name, digest]

    def batch(count: int) -> dict[str, Any]:
        pixels = rng.integers(0, 255, (count, 3072)).astype(np.uint8)
        return {"data": pixels, "labels": [i % 10 for i in range(count)]}

    monkeypatch.setattr(CIFAR10, "train_list", [write(f"data_batch_{i}", batch(8)) for i in (1, 2)])
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", batch(6))])
    name, digest = write("batches.meta", {"label_names": list("abcdefghij")})
    meta = {"filename": name, "key": "label_names", "md5": digest}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    data = load(data="cifar10", data_path=tmp_path)
    assert (len(data.train), len(data.val), data.channels) == (16, 6, 3)
    assert data.class_names[:2] == ["a", "b"]
    assert data.train[(0, 0)][0].shape == data.val[(0, 0)][0].shape == (3, 32, 32)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load(data="imagefolder", data_path=tmp_path / "none")
    with pytest.raises(ValueError, match="needs --data-path"):
        DataOptions(data="cifar10")


def test_what_programs_leave_among_the_images_is_no_data(tmp_path: Path) -> None:
    root = flowers(tmp_path / "data")
    before = load(data="imagefolder", data_path=root)
    photo(root / "daisy" / ".ipynb_checkpoints" / "daisy 0-checkpoint.jpg", 0)
    (root / "daisy" / "._daisy 0.jpg").write_bytes(b"a resource fork of macOS")
    photo(root / "__MACOSX" / "daisy" / "daisy 0.jpg", 0)
    os.mkfifo(root / "daisy" / "pipe.jpg")  # opening it would wait for ever
    after = load(data="imagefolder", data_path=root)
    assert after.class_names == ["daisy", "tulip"]
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_the_camera_was_held(
    tmp_path: Path, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both decoders, to the same bytes."""
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8, :, 0] = pixels[:, :8, 1] = 255
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.jpg")))
    for decoder in {decode.fast_jpeg(), None}:
        monkeypatch.setattr(decode, "fast_jpeg", lambda found=decoder: found)
        found, _ = image_folder.ImageFiles([(tmp_path / "a.jpg", 0)], torch.clone)[0]
        assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)


def test_photos_that_training_would_leave_out_are_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", "recipes")
    flowers(tmp_path)
    first, second, *_ = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("a.gif", "b.heic"):
        (first / name).touch()
    photo(tmp_path.parent / f"{tmp_path.name} elsewhere" / "a.jpg", 1)
    for place in (first, first / "below"):
        place.mkdir(exist_ok=True)
        (place / "more").symlink_to(tmp_path.parent / f"{tmp_path.name} elsewhere")
        (place / "loop").symlink_to(first)
    (tmp_path / "loose.jpg").touch()
    list_images(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    kinds = "link to a folder 4, .gif 1, .heic 1"
    assert f"files left out, not images by their names: 6 ({kinds})" in said
    assert f"1 images in {tmp_path} are left out: they are in no class's folder" in said
    (first / "in circles.txt").symlink_to("in circles.txt")
    list_images(tmp_path)
    (tmp_path / "bird").symlink_to("annex/bird")
    with pytest.raises(InputError, match=r"/bird is a link that leads nowhere: remove it"):
        list_images(tmp_path)
    (tmp_path / "bird").unlink()
    (second / "gone.jpg").symlink_to("annex/gone.jpg")
    with pytest.raises(InputError, match=r"gone.jpg is a link to annex/gone.jpg, which does not"):
        list_images(tmp_path)


def test_classes_are_those_of_train_and_one_that_does_not_validate_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    names = ("daisy", "rose", "tulip")
    flowers(tmp_path / "train", names=names)
    for number in range(3):
        photo(tmp_path / "val" / "tulip" / f"{number}.jpg", 50 + number)
    data = load(data="imagefolder", data_path=tmp_path, image_size=16)
    assert tuple(data.class_names) == names
    assert [data.val[(0, index)][1] for index in range(3)] == [2, 2, 2], "no index has moved"
    assert any("val has no images of daisy, rose" in said for said in caplog.messages)
    assert not any("in train and in val" in said for said in caplog.messages)
    copies = [tmp_path / "val" / "tulip" / f"tulip {number}.jpg" for number in (3, 5)]
    shutil.copy(tmp_path / "train" / "tulip" / copies[0].name, copies[0])
    copies[1].symlink_to(tmp_path / "train" / "tulip" / copies[1].name)
    list_images(tmp_path)
    assert any(f"in train and in val (the first: {copies[0]})" in said for said in caplog.messages)
    shutil.rmtree(tmp_path / "val" / "tulip")
    with pytest.raises(InputError, match="val has none of the classes in train"):
        list_images(tmp_path)


def test_all_bad_photos_are_named_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 20, and a file with all; each with what to do."""
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = flowers(tmp_path / "data")
    for number in range(22):
        (root / "daisy" / f"text {number:02}.jpg").write_text("no image")
    Image.fromarray(np.full((8, 8), 60_000, np.uint16)).save(root / "daisy" / "a deep.png")
    Image.fromarray(np.full((8, 8), 7, np.uint16)).save(root / "daisy" / "b fits.png")
    Image.fromarray(np.eye(8, dtype=np.float32) / 2).save(root / "daisy" / "c float.tiff")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    photo(root / "daisy" / "d large.jpg", 1, size=(80, 80))
    with pytest.raises(InputError, match=r"^26 images cannot be used; all are in ") as refused:
        load(data="imagefolder", data_path=root)
    (file,) = re.findall(r"all are in (\S+);", str(refused.value))
    named = Path(file).read_text().splitlines()
    assert len(named) == 26
    shown = [message for message in caplog.messages if str(root) in message]
    assert shown == named[:20]
    assert "(finer steps of grey are lost): from PIL" in named[0]
    assert "Image.fromarray((a // 257).astype('uint8'))" in named[0]
    assert "(nothing is lost, because its values fit): from PIL" in named[1]
    assert "fromarray(((a - a.min()) * (255 / (a.max() - a.min()))).astype('uint8'))" in named[2]
    assert "is larger than Pillow opens" in named[3]
    assert "make a smaller copy" in named[3]
    assert all("cannot be decoded" in line and "remove or replace it" in line for line in named[4:])
