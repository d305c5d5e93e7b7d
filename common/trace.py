"""A hash of everything that one step computes, to find where two runs part (`make reproduce`)."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from common.fingerprint import tensor_bytes
from common.writing import write_bytes

STEP = "RECIPES_TRACE_STEP"
"""Environment variable with the number of the step to trace, from 1 on."""
_WITHOUT_VALUES = ("empty", "new_empty")
_IN_FLIGHT = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of operations whose results are there later; who reads them shows the hashes."""


class StepTrace(TorchDispatchMode):
    """Hashes what each operation of one step gives and changes, on this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank = rank
        self._step = int(os.environ.get(STEP, 0))
        self._modules: Any = ModuleTracker()
        self.calls: list[dict[str, Any]] = []

    def before(self, step: int) -> None:
        """Begin, if it is the step to trace."""
        if step == self._step:
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            self._modules.__enter__()
            self.__enter__()  # type: ignore[no-untyped-call]

    def after(self, step: int, folder: Path) -> None:
        """End, and write a line of JSON for each operation."""
        if step == self._step:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._modules.__exit__()
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            folder.mkdir(exist_ok=True)
            lines = "".join(json.dumps(call) + "\n" for call in self.calls)
            write_bytes(folder / f"rank_{self._rank}.jsonl", lines.encode())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute, then hash."""
        given = {**(kwargs or {})}
        returns = func._schema.returns
        views = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
        name = func._schema.name.split("::")[1]
        if views or func.namespace in _IN_FLIGHT or name.startswith(_WITHOUT_VALUES):
            return func(*args, **given)
        reads = _hashes([args, given])
        result = func(*args, **given)
        changed = [
            argument
            for argument, said in zip(args, func._schema.arguments, strict=False)
            if said.alias_info and said.alias_info.is_write
        ]
        module = max(sorted(self._modules.parents), key=len, default="Global")
        self.calls.append(
            {
                "operation": str(func),
                "module": "" if module == "Global" else module,
                "reads": reads,
                "gives": _hashes([result, changed]),
            }
        )
        return result


def _hashes(tree: Any) -> list[str]:
    return [_hash(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _hash(tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return "not hashed: no dense tensor"
    plain: Tensor = getattr(tensor, "to_local", lambda: tensor)()  # of a DTensor, this rank's part
    about = f"{tensor.dtype} {[*tensor.shape]}".encode()
    return hashlib.sha256(about + tensor_bytes(plain)).hexdigest()[:12]


def first_difference(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> str:
    """The first operation of one rank that gives other bits, in words; empty if there is none."""
    for number, (here, there) in enumerate(zip(one, two, strict=False), 1):
        if here != there:
            where = f" in {here['module']}" if here["module"] else ""
            what = f"operation {number} of {len(one)}, {here['operation']}{where}"
            if here["operation"] != there["operation"]:
                return f"{what}; there it is {there['operation']}"
            if here["reads"] != there["reads"]:
                return (
                    f"in what {what}, reads: weights or data differ already: trace an earlier step"
                )
            return what
    if len(one) != len(two):
        return f"operation {min(len(one), len(two)) + 1}: one of the traces ends before it"
    return ""


def read_traces(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Each rank, and the operations of its step."""
    for path in sorted(folder.glob("rank_*.jsonl")):
        yield int(path.stem.split("_")[1]), list(map(json.loads, path.read_text().splitlines()))
