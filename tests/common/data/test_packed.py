"""Packed images are those of the folder, in its order, and damage is named."""

import fcntl
import gc
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from common import log
from common.data import image_folder, packed
from common.data.datasets import Data, DataOptions, load_data
from common.data.decode import decoded
from common.data.image_folder import list_images
from common.data.packed import INDEX, Pack
from common.data.stream import Samples
from common.errors import InputError, TrainingError
from common.launch.ranks import Ranks
from common.writing import write_file
from tests.helpers.commands import Recipe, Result
from tests.helpers.images import flowers, photo
from tests.helpers.packs import DAMAGES, flip, flip_image, remove
from tests.helpers.pool import Pool, call_main, in_group
from tools import pack as tool

MIB = 2**20
CLASSES = ("daisy", "rose", "tulip")


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def photos(root: Path, per_class: int = 10) -> Path:
    """Photos in three classes, all different, one of them a PNG, one with a strange name."""
    for label, name in enumerate(CLASSES):
        for number in range(per_class):
            photo(root / name / f"{number}.v2.jpg", label * per_class + number)
    photo(root / "rose" / "more" / "a\nb.PNG", 77)
    photo(root / "tulip" / os.fsdecode(b"t\xfcr.jpeg"), 78)
    return root


def packed_copy(root: Path, out: Path, shard_bytes: int = 20_000, side: int = 0) -> Path:
    tool.pack(root, out, shard_bytes, side, 90)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_copy(folder, tmp_path_factory.mktemp("packed") / "photos.packed")


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "own")


def load(**options: Any) -> Data:
    data: Data = in_group(Ranks(), lambda ranks: load_data(DataOptions(**options), 3, ranks))
    return data


def test_the_same_samples_split_and_hashes_as_the_folder(folder: Path, made: Path) -> None:
    ours = load(data="packed", data_path=made, image_size=16)
    theirs = load(data="imagefolder", data_path=folder, image_size=16)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.indices_sha256 == theirs.indices_sha256
    assert ours.preprocessing == theirs.preprocessing
    assert list(ours.held_out) == list(theirs.held_out)
    assert len(ours.held_out) == len(ours.val) == 6
    for mine, their in ((ours.train, theirs.train), (ours.val, theirs.val)):
        keys = [(2, index) for index in reversed(range(len(mine)))]
        for one, other in zip(mine.__getitems__(keys), their.__getitems__(keys), strict=True):
            assert torch.equal(one, other)


def test_a_split_of_the_folder_stays(tmp_path: Path) -> None:
    photos(tmp_path / "own" / "train", 4)
    photos(tmp_path / "own" / "val", 2)
    data = load(data="packed", data_path=packed_copy(tmp_path / "own", tmp_path / "packed"))
    assert (len(data.train), len(data.val)) == (14, 8)
    assert all(name.startswith("val/") for name in data.held_out)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # WebDataset leaves files open
def test_three_readers_that_others_wrote_find_the_images(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    """Python's tarfile, GNU tar and WebDataset: all images, with the right classes."""
    listing, _ = list_images(folder)
    expected = {
        f"{number:09d}": ((folder / name).read_bytes(), int(label))
        for number, (name, label) in enumerate(zip(listing.names, listing.labels, strict=True))
    }
    tars = sorted(made.glob("*.tar"))
    assert len(tars) > 3
    with_tarfile: dict[str, Any] = {}
    for path in tars:
        with tarfile.open(path) as tar:
            members = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
        for name, content in members.items():
            if not name.endswith(".cls"):
                key = name.partition(".")[0]
                with_tarfile[key] = content, int(members[f"{key}.cls"])
    assert with_tarfile == expected
    for path in tars:
        assert os.spawnlp(os.P_WAIT, "tar", "tar", "-xf", str(path), "-C", str(tmp_path)) == 0
    with_tar = {
        path.stem: (path.read_bytes(), int(path.with_suffix(".cls").read_text()))
        for path in tmp_path.iterdir()
        if path.suffix != ".cls"
    }
    assert with_tar == expected
    import webdataset

    samples = webdataset.WebDataset([str(path) for path in tars], shardshuffle=False)
    with_webdataset = {
        sample["__key__"]: (
            next(sample[kind] for kind in ("jpg", "jpeg", "png") if kind in sample),
            int(sample["cls"]),
        )
        for sample in samples
    }
    assert with_webdataset == expected
    del samples
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("split", [False, True])
def test_tar_files_that_webdataset_made_are_indexed(
    folder: Path, tmp_path: Path, split: bool
) -> None:
    import webdataset

    listing, _ = list_images(folder)
    parts = (tmp_path / "train", tmp_path / "val") if split else (tmp_path,)
    for part in parts:
        part.mkdir(exist_ok=True)
        pattern = str(part / "shard-%04d.tar")
        with (
            warnings.catch_warnings(),
            webdataset.ShardWriter(pattern, maxcount=20, verbose=0) as to,
        ):
            for number, (name, label) in enumerate(zip(listing.names, listing.labels, strict=True)):
                kind = "png" if name.endswith("PNG") else "jpg"
                to.write(
                    {
                        "__key__": f"{number:04d}",
                        kind: (folder / name).read_bytes(),
                        "cls": int(label),
                    }
                )
    assert tool.index(tmp_path).startswith(
        f"indexed {len(listing.names) * len(parts)} images of 3 classes"
    )
    data = load(data="packed", data_path=tmp_path, image_size=16)
    assert data.class_names == ["0", "1", "2"]
    gc.collect()
    pack, theirs = data.train.source.pack, image_folder.Files(folder, listing.names, listing.labels)
    for index, (path, label) in enumerate(theirs):
        assert pack.read(index) == path.read_bytes()
        assert pack.listing.labels[index] == label
    assert len(data.val) == (len(theirs) if split else 6)
    with pytest.raises(InputError, match="has an index"):
        tool.index(tmp_path)


class Arrays:
    """A Dataset as a user writes it: arrays in a pack."""

    def __init__(self, root: Path) -> None:
        self.pack = Pack(root, check=True)

    def __getitem__(self, index: int) -> tuple[Any, float]:
        array = np.load(io.BytesIO(self.pack.read(index)))
        return array, float(array.sum() * np.random.rand())


def test_files_of_any_kind_in_tar_files_are_read_by_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same batches as from memory, in a loading process; they are no data for --data."""
    arrays = [np.full((2, 3), number, np.float32) for number in range(40)]
    for part in range(2):
        with tarfile.open(tmp_path / f"{part}.tar", "w") as tar:
            for number in range(20 * part, 20 * part + 20):
                stored = io.BytesIO()
                np.save(stored, arrays[number])
                note = b"[7]" if number % 2 else b'{"caption": "a note"}'
                for suffix, content in ((".npy", stored.getvalue()), (".json", note)):
                    add(tar, f"{number:04d}{suffix}", content)
    assert tool.main([str(tmp_path), "--suffix", ".npy"]) == 0
    assert "indexed 40 .npy files in 2 tar files" in capsys.readouterr().out
    assert tool.main([str(tmp_path), "--verify"]) == 0
    assert "ok: 40 samples in 2 tar files" in capsys.readouterr().out

    packed_samples = Samples(Arrays(tmp_path), range(40), seed=1)
    batches = [[(0, index) for index in range(start, start + 8)] for start in range(0, 40, 8)]
    loaded = list(
        DataLoader(
            packed_samples, batch_sampler=batches, num_workers=1, collate_fn=lambda batch: batch
        )
    )
    for keys, (found, drawn) in zip(batches, loaded, strict=True):
        assert torch.equal(found, torch.stack([torch.from_numpy(arrays[i]) for _, i in keys]))
        assert torch.equal(drawn, packed_samples.__getitems__(keys)[1])
    with pytest.raises(InputError, match=r"was indexed with --suffix \.npy: read it in a Dataset"):
        load(data="packed", data_path=tmp_path)
    local = tmp_path / "local"
    with pytest.raises(InputError, match=r"was indexed with --suffix"):
        load(data="packed", data_path=tmp_path, data_local=local)
    assert not local.exists(), "nothing is copied before"


@pytest.mark.parametrize("without", [0, 12])
def test_classes_of_files_of_any_kind_are_those_that_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without: int
) -> None:
    """12 samples of the classes 0, 300, 600 ..., and perhaps one that has none."""
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(13 if without else 12):
            for suffix, content in ((".npy", b"-"), (".cls", f"{300 * number}".encode())):
                if suffix == ".npy" or number != without or not without:
                    add(tar, f"{number:04d}{suffix}", content)
    status = tool.main([str(tmp_path), "--suffix", ".npy"])
    if without:
        assert status == 2
        said = "1 of 13 samples have no class (the first: 0012.npy): give all one, or none"
        assert said in capsys.readouterr().err
    else:
        assert status == 0
        listing = Pack(tmp_path, check=True).listing
        assert listing.class_names == [str(300 * number) for number in range(12)]
        assert listing.labels.tolist() == list(range(12))


def tar_of_images(path: Path) -> list[int]:
    """Four images and their classes; returns where each file begins, and the last one ends."""
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    places = [0]
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            for suffix, content in (("png", image.getvalue()), ("cls", b"%d" % (number % 2))):
                add(tar, f"{number}.{suffix}", content)
                places.append(tar.offset)
    return places


def spoil(path: Path, places: list[int], how: str) -> None:
    """Make a tar file one of which a reader would leave out something."""
    whole = path.read_bytes()
    if how == "cut between two files":
        path.write_bytes(whole[: places[4]])
    elif how == "cut in a file":
        path.write_bytes(whole[: places[5] - 100])
    elif how == "cut in its end":
        path.write_bytes(whole[: places[-1] + 512])
    elif how == "damaged":
        path.write_bytes(whole[: places[4]] + b"x" + whole[places[4] + 1 :])
    elif how == "joined":
        path.write_bytes(whole + whole)
    elif how.endswith(" beside"):
        path.with_name(how.removesuffix(" beside")).touch()
    elif how == "another class in val":
        for part in ("train", "val"):
            path.parent.joinpath(part).mkdir()
        tar_of_images(path.parent / "train" / "0.tar")
        with tarfile.open(path) as tar:
            first = tar.extractfile("0.png")
            image = first.read() if first else b""
        path.rename(path.parent / "val" / "0.tar")
        with tarfile.open(path.parent / "val" / "0.tar", "a") as tar:
            add(tar, "9.png", image)
            add(tar, "9.cls", b"7")
    elif how.startswith("nothing in"):
        for part in ("train", "val"):
            path.parent.joinpath(part).mkdir()
            with tarfile.open(path.parent / part / "0.tar", "w"):
                pass
        path.rename(path.parent / ("train" if how.endswith("val") else "val") / "0.tar")
    elif how == "the same file twice":
        path.with_name("1.tar").symlink_to("0.tar")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        with tarfile.open(path, "a") as tar:
            member = tarfile.TarInfo("9.png")
            member.linkname = "0.png"
            member.type = {"hard link": tarfile.LNKTYPE, "link": tarfile.SYMTYPE}.get(how, b"0")
            if how == "class without an image":
                add(tar, "9.cls", b"0")
            elif how in OTHER_CLASSES:
                add(tar, "3.json", OTHER_CLASSES[how])
            elif how == "deep JSON":
                add(tar, "9.json", b"[" * 200_000)
            else:
                tar.addfile(member)


OTHER_CLASSES = {
    "two classes": b'{"label": 7}',
    "two classes in JSON": b'{"cls": 1, "label": 0}',
    "no class": b'{"label": null}',
    "a list as class": b'{"cls": [1]}',
    "a negative class": b'{"cls": -1}',
}
SPOILT = {
    "two classes": "3 has two classes: {'3.cls': '1', '3.json': '7'}",
    "two classes in JSON": "3.json gives no class (two classes: 1 and 0)",
    "nothing in train": "the tar files in {}/train hold no images",
    "nothing in val": "the tar files in {}/val hold no images",
    "the same file twice": "1.tar and {}/0.tar are the same file by a link",
    "no class": "3.json gives no class (a class is a text or a whole number, and not None)",
    "a list as class": "3.json gives no class (a class is a text or a whole number, and not [1])",
    "a negative class": "3.json gives no class (-1: classes are counted from 0; leave out samples",
    "another class in val": "val has classes that train/ has not: 7",
    "cut between two files": "is cut off",
    "cut in a file": "is no tar file as WebDataset makes them",
    "cut in its end": "is cut off",
    "damaged": "is damaged at byte",
    "joined": "tar files that were joined",
    "hard link": "9.png is a link to 0.png: make the tar file with files only",
    "link": "9.png is a link to 0.png: make the tar file with files only",
    "class without an image": "9 has a class and none of the images",
    "deep JSON": "9.json gives no class",
    **{f"{name} beside": f"{name} would be left out" for name in ("1.tar.gz", "1.TAR", "1.txz")},
    "pipe": "0.tar is no file",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_tar_file_is_indexed_whole_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    spoil(tmp_path / "0.tar", tar_of_images(tmp_path / "0.tar"), how)
    assert tool.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert SPOILT[how].replace("{}", str(tmp_path)) in line
    assert not (tmp_path / INDEX).exists()


def test_files_that_belong_to_no_sample_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar_of_images(tmp_path / "0.tar")
    with tarfile.open(tmp_path / "0.tar", "a") as tar:
        for name in ("._0.png", "8.gif", "9.txt"):
            add(tar, name, b"-")
    assert tool.main([str(tmp_path)]) == 0
    said = "files left out, not images by their names: 3 (.png 1, .gif 1, .txt 1)"
    assert said in capsys.readouterr().out


def test_images_beside_tar_files_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar_of_images(tmp_path / "0.tar")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").touch()
    assert tool.main([str(tmp_path)]) == 0
    said = f"1 images beside the tar files are left out, the first of them {tmp_path}/cat/1.jpg"
    assert said in "".join(capsys.readouterr())


def test_an_identifier_is_no_number_of_a_class(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        add(tar, "0.png", image.getvalue())
        add(tar, "0.cls", b"02119789")
        add(tar, "1.png", image.getvalue())
        add(tar, "1.cls", b"1")
    with pytest.raises(InputError, match="the class 2119789 would make 2,119,790 classes"):
        tool.index(tmp_path)


def test_classes_that_are_not_all_numbers_are_in_the_order_of_texts(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number, name in enumerate((b"rose", b"9", b"10")):
            for suffix, content in ((".npy", b"-"), (".cls", name)):
                add(tar, f"{number}{suffix}", content)
    tool.index(tmp_path, ".npy")
    assert Pack(tmp_path, check=True).listing.class_names == ["10", "9", "rose"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--suffix", ".jpx"], "holds no .jpx files"),
        (["out", "--suffix", ".npy"], "--suffix is for tar files that are there: give DATA only"),
    ],
)
def test_a_suffix_that_means_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.npy"))
    assert tool.main([str(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err


def test_the_same_folder_gives_the_same_bytes(folder: Path, made: Path, tmp_path: Path) -> None:
    again = packed_copy(folder, tmp_path / "again")
    assert contents(again) == contents(made)
    assert tool.pack(folder, again, 20_000, 0, 90) == f"{again} is the pack of {folder} already"
    with pytest.raises(InputError, match="made otherwise: give another OUT"):
        tool.pack(folder, again, 30_000, 0, 90)
    remove(again)
    with pytest.raises(InputError, match=r"000001.tar is missing"):
        tool.pack(folder, again, 20_000, 0, 90)
    (tmp_path / "out.part").mkdir()
    with pytest.raises(InputError, match=r"out.part exists: .* was killed; then remove it"):
        tool.pack(folder, tmp_path / "out", 20_000, 0, 90)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_larger_images_are_made_smaller_and_the_others_stay(folder: Path, tmp_path: Path) -> None:
    photo(folder / "rose" / "wide.jpg", 5, size=(300, 100))
    try:
        pack = Pack(packed_copy(folder, tmp_path / "small", side=150), check=True)
        listing, _ = list_images(folder)
    finally:
        (folder / "rose" / "wide.jpg").unlink()
    shapes = set()
    for index, name in enumerate(listing.names):
        if Path(name).name == "wide.jpg":
            shapes.add(tuple(decoded(pack.read(index), name).shape))
        else:
            assert pack.read(index) == (folder / name).read_bytes()
    assert shapes == {(3, 50, 150)}
    assert pack.listing.fingerprint != listing.fingerprint, "other bits"


@pytest.mark.parametrize("fault", DAMAGES)
def test_damage_is_named_before_training(own: Path, fault: str) -> None:
    damage, says = DAMAGES[fault]
    damage(own)
    with pytest.raises(InputError, match=says):
        load(data="packed", data_path=own)
    with pytest.raises(InputError, match=says):
        tool.verify(own)


def test_a_damaged_image_is_named_when_it_is_read_and_by_verify(own: Path) -> None:
    index = 17
    data = load(data="packed", data_path=own, image_size=16)
    tar = flip_image(own, index)
    said = f"{re.escape(str(tar))}: sample 17 \\(rose/\\S+\\) is damaged"
    with pytest.raises(TrainingError, match=said):
        data.train.source[index]
    with pytest.raises(InputError, match=said):
        tool.verify(own)
    assert isinstance(data.train.source[16][1], int)
    with pytest.raises(InputError, match=said):
        load(data="packed", data_path=own)  # it is one of the images in the fingerprint


def test_a_pack_of_bad_images_is_refused_with_their_number(folder: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    for name in ("0.v2.jpg", "1.v2.jpg"):
        (bad / "daisy" / name).write_bytes(b"no image")
    with pytest.raises(InputError, match=r"2 images cannot be used; .*daisy/0.v2.jpg .*remove or"):
        tool.pack(bad, tmp_path / "out", 20_000, 0, 90)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"], "nothing of it is left"


def second_look(ranks: Ranks, root: Path, scratch: Path, tell: bool) -> tuple[list[str], int]:
    """What a rank has of the list that rank 0 made; and how often this rank listed the images."""
    calls: list[Path] = []

    def counted(root: Path, **more: Any) -> Any:
        calls.append(root)
        return list_images(root, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_folder, "list_images", counted)
        patch.setattr(tempfile, "tempdir", str(scratch))
        if not tell:
            patch.setattr(image_folder, "read_arrays", Mock(side_effect=OSError))
        listing, copy = image_folder.list_once_per_host(root, ranks)
    return [*listing.names, copy, listing.fingerprint, *map(str, listing.labels)], len(calls)


def test_one_rank_per_host_lists_the_images(pool: Pool, folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (first, one), (second, none) = pool.run(in_group, 2, second_look, folder, scratch, True)
    assert (one, none) == (1, 0)
    assert first == second
    found = pool.run(in_group, 2, second_look, folder, scratch, False)
    assert found == [(first, 1), (first, 1)], "what cannot be read is listed again"
    assert not list(scratch.iterdir())
    listing, copy = list_images(folder)
    assert first[: len(listing.names) + 1] == [*listing.names, copy]


def another(ranks: Ranks, root: Path) -> None:
    packed.open_on_all_ranks(root / str(ranks.rank), ranks)


def test_ranks_with_different_packs_are_refused(pool: Pool, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "0")
    packed_copy(photos(tmp_path / "more", 11), tmp_path / "1")
    with pytest.raises(InputError, match="another pack than on rank 0"):
        pool.run(in_group, 2, another, tmp_path)


def test_folder_and_pack_give_the_same_bits_and_resume_each_other(
    pool: Pool, recipe: Recipe, tmp_path: Path
) -> None:
    """On one rank and two, with and without a loading process."""

    def alone(folder: str, *more: str | Path) -> None:
        arguments = [*map(str, more), "--nproc", "1", "--output-dir", str(tmp_path / folder)]
        ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", arguments)
        assert status == 0, said

    flowers(tmp_path / "photos")
    with_make = recipe.start(
        "make",
        "-C",
        packed.__file__.split("/common/")[0],
        "pack",
        f"PYTHON={sys.executable}",
        f"DATA={tmp_path / 'photos'}",
        f"OUT={tmp_path / 'packed'}",
    )
    assert recipe.finish(with_make, tmp_path).status == 0
    common = "--image-size 16 --epochs 2 --global-batch-size 4 --virtual-ranks 2".split()
    folder: tuple[str | Path, ...]
    folder = ("--data", "imagefolder", "--data-path", tmp_path / "photos", *common)
    pack: tuple[str | Path, ...]
    pack = ("--data", "packed", "--data-path", tmp_path / "packed", *common)
    alone("whole", *folder)
    recipe("ddp_launch", "--nproc", "2", *pack, "--max-steps", "3").assert_ok()
    alone("run", *folder, "--max-steps", "6")
    mixed = recipe("ddp_launch", "--nproc", "2", *pack, "--num-workers", "1").assert_ok()
    assert mixed.sha == Result(0, "", "", tmp_path / "whole").sha
    assert mixed.summary["resumed_from"] == 6
    for data in ("photos", "packed"):
        found = recipe.module("evaluate", mixed.folder, "--json", "--data-path", tmp_path / data)
        assert json.loads(found.assert_ok().stdout)["held_out"], "the run's own"


def local_copy(ranks: Ranks, root: Path, local: Path) -> tuple[Path, int]:
    """Where the pack is copied to, and how many files this rank copied."""
    written: list[Path] = []

    def counted(path: Path, write: Any, *more: Any) -> None:
        written.append(path)
        write_file(path, write, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "write_file", counted)
        return packed.copied_once_per_host(root, local, ranks), len(written)


def test_a_copy_that_another_job_holds_is_waited_for_as_long_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", log.name)
    tar, now_s, last = tmp_path / "000000.tar", 0.0, 5
    tar.touch()
    with (tmp_path / ".lock").open("w") as theirs, (tmp_path / ".lock").open("w") as own:

        def copy(_: float) -> None:
            nonlocal now_s
            now_s += 500
            os.truncate(tar, min(last, tar.stat().st_size + 1))
            if tar.stat().st_size == 5:
                fcntl.flock(theirs, fcntl.LOCK_UN)

        clock = SimpleNamespace(monotonic=lambda: now_s, sleep=copy)
        monkeypatch.setattr(packed, "time", clock)
        fcntl.flock(theirs, fcntl.LOCK_EX)
        packed.wait_for_lock(own, tmp_path)
        assert tar.stat().st_size == 5, "the other job had ended"
        assert caplog.messages == [
            f"another job copies {tmp_path}, or keeps its .lock: waiting as long as the copy "
            "grows, at most 600 s more"
        ]
        fcntl.flock(own, fcntl.LOCK_UN)
        fcntl.flock(theirs, fcntl.LOCK_EX)
        os.truncate(tar, 0)
        last = 3
        with pytest.raises(
            InputError, match=r"keeps .*\.lock, and its copy has not grown for 600 s"
        ):
            packed.wait_for_lock(own, tmp_path)


def test_one_rank_copies_the_pack_to_the_hosts_own_disk(
    pool: Pool, made: Path, tmp_path: Path
) -> None:
    files = len(contents(made))
    (target, first), (same, second) = pool.run(in_group, 2, local_copy, made, tmp_path / "local")
    assert (target, second) == (same, 0)
    assert first == files
    copied = contents(target)
    assert copied.pop(".lock") == b""
    assert copied == contents(made)
    assert in_group(Ranks(), local_copy, made, tmp_path / "local") == (target, 0), "used again"
    (target / INDEX).unlink()
    (target / "000001.tar").unlink()
    assert in_group(Ranks(), local_copy, made, tmp_path / "local") == (target, 2), "continued"
    os.truncate(target / "000000.tar", 5)
    assert in_group(Ranks(), local_copy, made, tmp_path / "local") == (target, 2), "repaired"
    flip(target / INDEX, -70)
    assert in_group(Ranks(), local_copy, made, tmp_path / "local") == (target, 1), "repaired"
    assert {**contents(made), ".lock": b""} == contents(target)
    outside = tmp_path / "outside"
    outside.write_bytes(b"of somebody")
    for name in (".lock", INDEX, "000001.tar"):
        (target / name).rename(tmp_path / "aside")
        (target / name).symlink_to(outside)
        with pytest.raises(InputError, match=rf"{name} is a link to .*outside: remove it"):
            in_group(Ranks(), local_copy, made, tmp_path / "local")
        (tmp_path / "aside").rename(target / name)
    assert outside.read_bytes() == b"of somebody"
    packed_copy(photos(tmp_path / "more", 11), tmp_path / "other")
    shutil.copy(tmp_path / "other" / INDEX, target / INDEX)
    with pytest.raises(InputError, match="holds another pack: remove it"):
        in_group(Ranks(), local_copy, made, tmp_path / "local")
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"is a link to .*elsewhere: remove it"):
        in_group(Ranks(), local_copy, made, tmp_path / "local")


def test_a_damaged_pack_is_not_copied(own: Path, tmp_path: Path) -> None:
    remove(own)
    with pytest.raises(InputError, match=r"own/000001.tar is missing"):
        in_group(Ranks(), local_copy, own, tmp_path / "local")


def test_a_local_disk_without_room_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"--data-local \S+ has 0.0 GB left, and \S+ needs"):
        load(data="packed", data_path=made, data_local=tmp_path / "full")


def test_an_option_that_means_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["photos", "out", "--shard-mib", "0"]) == 2
    assert capsys.readouterr().err == "error: --shard-mib must be at least 1, got 0\n"
