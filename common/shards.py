"""Tensors that are divided between ranks (DTensor): a rank's part, and whole ones from parts.

A state is taken apart into a tree without its divided tensors, and pieces by their place in the
tree. Pieces from any mesh can be put together on any other mesh.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_map_with_path

from common.errors import InputError
from common.files import load_data_only

Pieces = Mapping[str, tuple[Tensor, list[int]]]
"""By the tensor's place in the state: a part of it, and where the part begins in each dimension."""


class Shards:
    """The pieces in each rank's file of a snapshot, read when needed; iterable many times."""

    def __init__(self, paths: list[str], first: int = 0) -> None:
        """Begin with the file `first`, where a rank on the same mesh finds all its pieces."""
        self.paths = [Path(path) for path in paths[first:] + paths[:first]]
        self.opened = [load_data_only(self.paths[0], mmap=True)]

    def __iter__(self) -> Iterator[Pieces]:
        """Pieces of a file at a time."""
        for number, path in enumerate(self.paths):
            if number == len(self.opened):
                self.opened.append(load_data_only(path, mmap=True))
            yield self.opened[number]["pieces"]


def local_part(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """What this rank holds of a tensor, and where that begins in each dimension.

    The innermost dimension of the mesh divides first: FSDP2 shards what tensor parallelism gave to
    a rank. Parts are as `torch.chunk` would cut them.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [0] * tensor.ndim
    local: Tensor = tensor.to_local().detach()
    mesh = tensor.device_mesh
    starts, sizes, place = [0] * tensor.ndim, list(tensor.shape), mesh.get_coordinate()
    assert place is not None
    for level in reversed(range(mesh.ndim)):
        dim = getattr(tensor.placements[level], "dim", None)
        if dim is not None:  # else every rank along this dimension of the mesh has a copy
            most = -(-sizes[dim] // mesh.size(level))
            begin = min(most * place[level], sizes[dim])
            starts[dim] += begin
            sizes[dim] = min(most, sizes[dim] - begin)
    assert list(local.shape) == sizes, f"{tensor.placements} of {tuple(tensor.shape)}"
    return local, starts


def holds_first(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of `mesh` that holds its part of the tensor.

    Over all ranks for which this is true, each number of the whole tensor is there once.
    """
    divided: set[str] = set()
    if isinstance(tensor, DTensor):
        own = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
        divided = {name for name, placement in own if hasattr(placement, "dim")}
    others = set(mesh.mesh_dim_names or ()) - divided
    return all(mesh.get_local_rank(name) == 0 for name in others)


def take_apart(state: Any, mesh: DeviceMesh) -> tuple[Any, dict[str, tuple[Tensor, list[int]]]]:
    """The state with None in place of each divided tensor, and the pieces that this rank writes."""
    pieces: dict[str, tuple[Tensor, list[int]]] = {}

    def leave_out(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if holds_first(value, mesh):
            pieces[keystr(path)] = local_part(value)
        return None

    return tree_map_with_path(leave_out, state), pieces


def put_together(tree: Any, present: Any, shards: Iterable[Pieces]) -> Any:
    """The state `tree` of `take_apart`, with this rank's parts of the divided tensors.

    Args:
        tree: a part of a snapshot.
        present: the same state of this run: its divided tensors are overwritten, and returned.
        shards: pieces of every rank that wrote.
    """
    divided: dict[str, DTensor] = {}

    def note(path: Any, value: Any) -> None:
        if isinstance(value, DTensor):
            divided[keystr(path)] = value

    tree_map_with_path(note, present)
    for key, tensor in divided.items():
        fill(key, *local_part(tensor), shards)
    return tree_map_with_path(lambda path, value: divided.get(keystr(path), value), tree)


def fill(key: str, local: Tensor, starts: list[int], shards: Iterable[Pieces]) -> None:
    """Copy the pieces of one tensor into a part of it that begins at `starts`.

    Raises:
        InputError: the pieces do not cover the part.
    """
    missing = local.numel()
    for pieces in shards:
        if not missing:
            return
        if key not in pieces:
            continue
        piece, begins = pieces[key]
        both = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(starts, local.shape, begins, piece.shape, strict=True)
        ]
        if all(end > begin for begin, end in both):
            target, source = (
                tuple(slice(begin - s, end - s) for (begin, end), s in zip(both, at, strict=True))
                for at in (starts, begins)
            )
            local[target] = piece[source].to(local.device)
            missing -= math.prod(end - begin for begin, end in both)
    if missing:
        raise InputError(f"the snapshot's shards lack {missing} numbers of {key}")


def whole(
    prefix: str, state: Mapping[str, Tensor], shards: Iterable[Pieces], folder: Path
) -> dict[str, Tensor]:
    """Every entry of a state_dict as one plain tensor, in files that vanish with the tensors.

    Args:
        prefix: place of the state_dict in the pieces' keys.
        state: this rank's state_dict, for names, shapes and types.
        shards: pieces of every rank that wrote.
        folder: for the files, which have no name there any more when this returns.
    """
    entries: dict[str, Tensor] = {}
    for name, value in state.items():
        file = folder / "whole.tmp"
        flat = torch.from_file(str(file), shared=True, size=value.numel(), dtype=value.dtype)
        file.unlink()
        entries[name] = flat.view(value.shape)
        fill(f"{prefix}[{name!r}]", entries[name], [0] * value.ndim, shards)
    return entries
