"""Damage to packed images, and what is said of it."""

import os
from collections.abc import Callable
from pathlib import Path

from common.data.packed import INDEX, Pack


def cut(root: Path) -> None:
    os.truncate(root / "000001.tar", 1000)


def remove(root: Path) -> None:
    (root / "000001.tar").unlink()


def swap(root: Path) -> None:
    (root / "000000.tar").write_bytes((root / "000001.tar").read_bytes())


def change(root: Path) -> None:
    flip(root / "000001.tar", 600)


def cut_index(root: Path) -> None:
    os.truncate(root / INDEX, 2000)


def flip_index(root: Path) -> None:
    flip(root / INDEX, -70)


def remove_index(root: Path) -> None:
    (root / INDEX).unlink()


def flip(path: Path, place: int) -> None:
    """Flip a bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_image(root: Path, index: int) -> Path:
    """Flip a bit of the last byte of an image; returns its tar file."""
    pack = Pack(root, check=False)
    tar: Path = root / pack.shards[int(pack.arrays["shard"][index])].name
    flip(tar, int(pack.arrays["offset"][index]) + int(pack.arrays["size"][index]) - 1)
    return tar


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tar file is cut off": (
        cut,
        r"000001.tar has 1,000 bytes, and [\d,]+ by index.bin: it is cut",
    ),
    "a tar file is missing": (remove, r"000001.tar is missing: copy it again"),
    "a tar file is another one": (swap, r"000000.tar (has [\d,]+ bytes|begins with other bytes)"),
    "a tar file is of another pack": (
        change,
        r"000001.tar begins with other bytes than index.bin says: it is damaged or of another pack",
    ),
    "the index is cut off": (cut_index, r"index.bin is damaged \(it has 2,000 bytes"),
    "the index is altered": (flip_index, r"index.bin is damaged \(its checksum is wrong\)"),
    "the index is missing": (remove_index, r"has no index.bin: make one with make pack DATA="),
}
"""What happens to a pack of more than one tar file; how it is done, and what is said."""
