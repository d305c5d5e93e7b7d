"""Tensors that are divided between ranks (DTensor): a rank's part, and parts from any mesh.

A state is taken apart into a tree without its divided tensors, and pieces by their place in the
tree. Each rank writes its own. They can be put together on any other mesh.

Not by torch.distributed.checkpoint: it unpickles its file `.metadata` (torch 2.15), so that loading
a crafted snapshot would run code, and its files have no checksums.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only, tree_map_with_path

from common.errors import InputError, TrainingError
from common.snapshots.snapshot_files import load_data_only

Part = tuple[Tensor, list[int]]
"""A part of a tensor, and where it begins in each dimension."""


def local_part(tensor: Tensor) -> Part:
    """What this rank holds of a tensor.

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
    if list(local.shape) != sizes:
        raise TrainingError(
            f"a tensor of {tuple(tensor.shape)} is divided as {tensor.placements}, which a "
            "snapshot cannot hold: divide it as torch.chunk does"
        )
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


def take_apart(state: Any, mesh: DeviceMesh) -> tuple[Any, dict[str, Part]]:
    """The state with None in place of each divided tensor, and the pieces that this rank writes."""
    pieces: dict[str, Part] = {}

    def leave_out(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if holds_first(value, mesh):
            pieces[keystr(path)] = local_part(value)
        return None

    return tree_map_with_path(leave_out, state), pieces


def put_together(files: list[str], rank: int, present: Any) -> tuple[dict[str, Any], Any]:
    """What a rank wrote, and its state with this rank's parts of the divided tensors.

    Args:
        files: of every rank that wrote, in rank order; see `take_apart`.
        rank: reads its own file first, or that of another rank if the mesh was smaller.
        present: the same state of this run: its divided tensors are overwritten, and returned.

    Raises:
        InputError: the pieces do not cover this rank's parts.
    """
    divided = {
        keystr(path): value
        for path, value in tree_leaves_with_path(present)
        if isinstance(value, DTensor)
    }
    missing = {key: local_part(tensor)[0].numel() for key, tensor in divided.items()}
    first = rank % len(files)
    mine: dict[str, Any] = {}
    for file in files[first:] + files[:first]:  # on the same mesh, the first one holds all
        found = load_data_only(Path(file), mmap=True)
        mine = mine or found
        for key, tensor in divided.items():
            if key in found["pieces"]:
                missing[key] -= copy_common(local_part(tensor), found["pieces"][key])
        if not any(missing.values()):
            break
    if lacking := [f"{number} numbers of {key}" for key, number in missing.items() if number]:
        raise InputError(f"the snapshot's shards lack {lacking[0]}")
    own = tree_map_only(Tensor, torch.clone, mine["parts"])  # the file may be removed
    return mine, tree_map_with_path(lambda path, value: divided.get(keystr(path), value), own)


def copy_common(to: Part, piece: Part) -> int:
    """Copy what two parts of one tensor have in common, and count it."""
    (target, starts), (source, begins) = to, piece
    common = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(starts, target.shape, begins, source.shape, strict=True)
    ]
    if any(end <= begin for begin, end in common):
        return 0
    into, out_of = (
        tuple(slice(begin - s, end - s) for (begin, end), s in zip(common, at, strict=True))
        for at in (starts, begins)
    )
    target[into] = source[out_of].to(target.device)
    return math.prod(end - begin for begin, end in common)
