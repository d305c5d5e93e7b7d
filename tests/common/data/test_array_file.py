"""Arrays in a file that processes map, and many names in two arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.data.array_file import Texts, read_arrays, write_arrays

# Names of files may hold bytes that are no UTF-8, which Python shows as lone surrogates.
NAMES = st.binary(max_size=8).map(lambda name: name.decode("utf-8", "surrogateescape"))


@given(st.lists(NAMES, min_size=1, max_size=20), st.data())
def test_texts_are_a_sequence_of_what_they_were_made_of(names: list[str], data: Any) -> None:
    texts = Texts.of(names)
    assert list(texts) == names
    chosen = data.draw(st.lists(st.integers(0, len(names) - 1)))
    some = Texts(texts.joined, texts.ends, np.array(chosen, np.int64))
    assert list(some) == [names[index] for index in chosen]
    step = data.draw(st.integers(1, 3))
    assert list(texts[1::step]) == names[1::step]
    assert list(some[::-1]) == [names[index] for index in chosen[::-1]]
    assert texts[-1] == names[-1]
    with pytest.raises(IndexError):
        texts[len(names)]


def write(path: Path, arrays: dict[str, NDArray[Any]], more: Any = None) -> None:
    with path.open("wb") as file:
        write_arrays(file, arrays, more)


@given(st.dictionaries(st.text(max_size=30), st.lists(st.integers(0, 255), max_size=70)))
def test_arrays_come_back_at_places_that_any_type_may_have(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, list[int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "arrays.bin"
    kinds = (np.uint8, np.int32, np.int64, np.float64)
    arrays = {n: np.array(v, kinds[len(v) % 4]) for n, v in content.items()}
    write(path, arrays, {"names": list(content)})
    found, more = read_arrays(path, check=True)
    assert more == {"names": list(content)}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
        assert found[name].ctypes.data % 64 == 0 or not len(array)


def test_a_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrays.bin"
    write(path, {"a": np.arange(1000)})
    good = path.read_bytes()
    for bad in (b"", b"another file", good[:40], good[:-1], good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"begin|bytes"):
            read_arrays(path, check=False)
    for place in (9, 13, 30):
        flipped = bytearray(good)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="checksum of its beginning"):
            read_arrays(path, check=False)
    flipped = bytearray(good)
    flipped[-100] ^= 1
    path.write_bytes(flipped)
    read_arrays(path, check=False)
    with pytest.raises(ValueError, match="checksum"):
        read_arrays(path, check=True)
