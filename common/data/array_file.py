"""Arrays in one file, which any number of processes map instead of each holding a copy.

A Python list of a million names takes 100 MB in every rank, and as much again in each loading
process, which copies a page as soon as a reference count on it changes. A mapped array takes none.

The file: 16 bytes (`RECIPES1`, and length and CRC-32 of the JSON as little-endian uint32), a JSON
object, and the arrays at multiples of 64 bytes. Its entry "arrays" has each array's type (as NumPy
writes it), length and place in the file; "crc32" is that of all arrays in this order.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

_BEGIN = b"RECIPES1"


class Texts(Sequence[str]):
    """Many short texts, such as the names of files, as two arrays.

    Args:
        joined: (bytes,) uint8, the texts one after the other in UTF-8; bytes of a file name that
            are no UTF-8 as they are.
        ends: (texts,) int64, where in `joined` each one ends.
        chosen: which of them, and in which order; None: all.
    """

    def __init__(
        self, joined: NDArray[np.uint8], ends: NDArray[np.int64], chosen: Any = None
    ) -> None:
        self.joined, self.ends, self.chosen = joined, ends, chosen

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        """These texts."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) if self.chosen is None else len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Texts": ...
    def __getitem__(self, index: int | slice) -> "str | Texts":
        """One text, or some of them."""
        if isinstance(index, slice):
            chosen = np.arange(len(self.ends)) if self.chosen is None else self.chosen
            return Texts(self.joined, self.ends, chosen[index])
        place = range(len(self))[index]
        if self.chosen is not None:
            place = int(self.chosen[place])
        begin = int(self.ends[place - 1]) if place else 0
        return self.joined[begin : int(self.ends[place])].tobytes().decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:  # that of Sequence ends without a word at any IndexError
        return (self[index] for index in range(len(self)))


def write_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any]], more: Any) -> None:
    """Write contiguous, one-dimensional arrays, and `more` as JSON, into a file that is open."""
    places: dict[str, tuple[str, int, int]] = {}
    crc32 = 0
    for array in arrays.values():
        crc32 = zlib.crc32(array.data, crc32)
    end, size = 0, -1
    while end != size:  # the JSON holds the places, and they depend on its length
        size, place = end, _padded(end)
        for name, array in arrays.items():
            places[name] = (array.dtype.str, len(array), place)
            place = _padded(place + array.nbytes)
        text = json.dumps({"arrays": places, "crc32": crc32, "bytes": place, "more": more}).encode()
        end = max(size, len(_BEGIN) + 8 + len(text))
    text = text.ljust(end - len(_BEGIN) - 8)
    about = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
    file.write(_BEGIN + about + text)
    for name, array in arrays.items():
        file.seek(places[name][2])
        file.write(array.data)
    file.truncate(place)


def read_arrays(path: Path, *, check: bool) -> tuple[dict[str, NDArray[Any]], Any]:
    """The arrays of a file, mapped, and what `write_arrays` was given as `more`.

    Args:
        path: the file.
        check: read all of it, and compare its checksum.

    Raises:
        ValueError: it is no such file, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_BEGIN)) != _BEGIN:
            raise ValueError(f"it does not begin with {_BEGIN.decode()}")
        length, crc32 = (int.from_bytes(file.read(4), "little") for _ in range(2))
        text = file.read(length)
        if zlib.crc32(text) != crc32:
            raise ValueError("the checksum of its beginning is wrong")
        head = json.loads(text)
    size = path.stat().st_size
    if size != head["bytes"]:
        raise ValueError(f"it has {size:,} bytes, and was written with {head['bytes']:,}")
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    arrays: dict[str, NDArray[Any]] = {}
    crc32 = 0
    for name, (kind, length, place) in head["arrays"].items():
        dtype = np.dtype(kind)
        arrays[name] = whole[place : place + length * dtype.itemsize].view(dtype)
        if check:
            crc32 = zlib.crc32(arrays[name].data, crc32)
    if check and crc32 != head["crc32"]:
        raise ValueError("its checksum is wrong")
    return arrays, head["more"]


def _padded(place: int) -> int:
    return -(-place // 64) * 64
