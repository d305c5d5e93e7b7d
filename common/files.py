"""Files that are written completely or not at all; the hash of weights; bytes in words."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def weights_sha256(state_dict: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes, in the state_dict's order."""
    digest = hashlib.sha256()
    for name, value in state_dict.items():
        tensor = value.detach().cpu().contiguous()
        digest.update(name.encode() + str(tensor.dtype).encode() + str(tensor.shape).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a state_dict to a temporary file, then rename it."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(weights, temporary)
    temporary.rename(path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary file, then rename it."""
    temporary = path.with_suffix(".tmp")
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def mebibytes(number: float) -> str:
    """A number of bytes for a table."""
    return f"{number / 2**20:,.0f} MiB"
