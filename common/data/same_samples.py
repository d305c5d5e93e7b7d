"""Whether all ranks read the same samples, and each rank the same ones each time it reads them."""

import hashlib
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.data.datasets import Data
from common.errors import InputError
from common.fingerprint import tensor_bytes
from common.group.collectives import agreed
from common.identity import refuse_unlike_rank_0


def sample_hashes(data: Data) -> dict[str, str]:
    """Hashes of the class names and of a few samples as epoch 0 shows them. A collective.

    Returns:
        By the name of what was hashed ("sample 5 of Data.train"); the same on every rank.

    Raises:
        InputError: a rank reads something else than rank 0, or than it has just read.
    """
    with agreed():
        found = {"Data.class_names": _hash(list(data.class_names))}
        train, val = len(data.train), len(data.val)
        places = [("train", place) for place in (0, train // 2, train - 1, 0)]  # the first twice
        for part, place in (*places, ("val", 0), ("val", val // 2)):
            samples = getattr(data, part)
            index = f"{samples.indices[place]}{f' (place {place})' if place else ''}"
            name, now = f"sample {index} of Data.{part}", _hash(samples.__getitems__([(0, place)]))
            if found.setdefault(name, now) != now:
                raise InputError(
                    f"{name} was another one when it was read again: it may depend on its index "
                    "and on the generators of Python, NumPy (np.random) and torch, which are "
                    "seeded for each sample; begin another generator anew in each __getitem__, "
                    "from torch.initial_seed()"
                )
    refuse_unlike_rank_0(
        found,
        "another one than on rank 0 (if sets order the data: PYTHONHASHSEED=0 on all ranks; or "
        "hosts with unlike CPUs or libraries)",
    )
    return found


def _hash(value: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(value):
        digest.update(_content(leaf))
    return digest.hexdigest()[:8]


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        dense = leaf.values() if leaf.is_nested else leaf.to_dense()
        return f"{leaf.dtype} {tuple(dense.shape)}".encode() + tensor_bytes(dense)
    if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
        return _hash(leaf.tolist()).encode()
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, bytes):
        return leaf
    known = isinstance(leaf, np.generic | str | int | float)
    return (repr(leaf) if known else type(leaf).__name__).encode()
