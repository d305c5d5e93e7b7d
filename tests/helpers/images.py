"""Small files as public data sets have them, and faulty ones."""

import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from PIL import Image


def photo(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> None:
    """Write a small JPEG of noise around a colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 60, (size[1], size[0], 3))
    colour = np.array([(90 * seed) % 190, (50 * seed) % 190, (20 * seed) % 190])
    Image.fromarray((noise + colour).astype(np.uint8)).save(path, quality=90)


def flowers(root: Path, per_class: int = 10, names: tuple[str, ...] = ("daisy", "tulip")) -> Path:
    """Write an image folder with one sub-folder per class."""
    for label, name in enumerate(names):
        for number in range(per_class):
            photo(root / name / f"{name} {number}.jpg", label)
    return root


def faulty_folder(root: Path, fault: str) -> str:
    """Write a folder with a fault; returns what the error must name."""
    flowers(root)
    if fault == "truncated JPEG":
        path = root / "daisy" / "cut.jpg"
        photo(path, 3, size=(200, 200))
        path.write_bytes(path.read_bytes()[:-800])
        return r"cut\.jpg cannot be decoded"
    if fault == "tiny":
        Image.new("RGB", (1, 3)).save(root / "daisy" / "a.jpg")  # small, but not a fault
        (root / "daisy" / "odd.ppm").write_bytes(b"P6 9999999999 1 255 x")
        return r"odd\.ppm is larger than Pillow opens"
    if fault == "text named .jpg":
        (root / "daisy" / "notes.jpg").write_text("hello")
        return r"notes\.jpg cannot be decoded"
    if fault == "empty class":
        (root / "rose").mkdir()
        return "rose has no images"
    if fault == "no classes":
        return "no sub-folders"
    if fault == "16 bits":
        pixels = np.full((8, 8), 40_000, np.uint16)
        Image.fromarray(pixels).save(root / "daisy" / "deep.png")
        return r"deep\.png has more than 8 bits per channel \(mode I;16"
    if fault == "floats":
        Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(root / "daisy" / "deep.tiff")
        return r"deep\.tiff has more than 8 bits per channel \(mode F\)"
    if fault == "one class":
        shutil.rmtree(root / "tulip")
        return r"one class only \(daisy\)"
    if fault == "other classes to validate on":
        for part, names in (("train", ("daisy", "tulip")), ("val", ("daisy", "tulip", "rose"))):
            flowers(root / part, names=names)
        return "val has classes that train has not: rose"
    if fault == "a class is all classes":
        (root / "all").symlink_to(root)
        return r"daisy lies in .*all, by links: its images would count twice"
    if fault == "a class is a part of another":
        (root / "daisy" / "wild").mkdir()
        photo(root / "daisy" / "wild" / "0.jpg", 0)
        (root / "wild").symlink_to(root / "daisy" / "wild")
        return r"wild lies in .*daisy, by links"
    if fault == "validation is training":
        flowers(root / "train")
        (root / "val").symlink_to("train")
        return r"val/daisy and .*train/daisy lead to the same images: remove one of them"
    if fault == "damaged EXIF":
        exif = Image.Exif()
        exif[0x0112] = 6  # turned
        path = root / "daisy" / "turned.png"
        Image.new("RGB", (8, 8)).save(path, exif=exif)
        chunk = path.read_bytes()
        at = chunk.index(b"eXIf") + 4
        length = int.from_bytes(chunk[at - 8 : at - 4], "big")
        damaged = b"eXIf" + b"?" * length
        crc = zlib.crc32(damaged).to_bytes(4, "big")
        path.write_bytes(chunk[: at - 4] + damaged + crc + chunk[at + length + 4 :])
        return r"turned\.png cannot be decoded"
    if fault.startswith(("train", "Train")):
        shutil.rmtree(root)
        for part in fault.split():
            flowers(root / part)
        return "which are no classes: name the folders train and val"
    raise AssertionError(fault)


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """An array in the IDX format of MNIST."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder's address on a web server on loopback."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:  # a failed test would hang at its end
            server.shutdown()
            thread.join()


def small_fashion_mnist(folder: Path, count: int = 20) -> None:
    """Fashion-MNIST's four unpacked files in the IDX format, with random images."""
    random = np.random.default_rng(0)
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (raw / f"{part}-{name}-ubyte").write_bytes(idx(array))
