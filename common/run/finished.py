"""Whether the files of a finished run are all there, and as the run wrote them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import InputError
from common.reading import read_metrics
from common.weights import weights_sha256


def preprocessing_sha256(seen: Mapping[str, Any]) -> str:
    """SHA-256 of what preprocessing.json says of pixels and model; its user may rename classes."""
    kept = {key: value for key, value in seen.items() if key != "classes"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def lost_file(folder: Path, summary: dict[str, Any], records: Iterable[str]) -> str:
    """Name of the first file of a finished run that is gone or damaged; empty if all are whole.

    Args:
        folder: of the run.
        summary: of the run.
        records: names of the run's JSON files.

    Raises:
        InputError: model.pt, best.pt or summary.json is not what the run wrote.
    """
    name = ""
    try:
        for name in records:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            wrote = summary.get("preprocessing_sha256") if name == "preprocessing.json" else None
            if wrote and preprocessing_sha256(content) != wrote:
                return name
        name = "metrics.jsonl"
        last = read_metrics(folder)[-1]
        if last["step"] != summary["steps"] or "train_loss" not in last:
            return name
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return name
    altered = [key for key, value in last.items() if key in summary and summary[key] != value]
    if altered:
        raise InputError(
            f"{folder / 'summary.json'} is not what the run wrote ({altered[0]} is "
            f"{summary[altered[0]]}, but {last[altered[0]]} in metrics.jsonl): restore it, or move "
            "it away, and the same command writes it again"
        )
    for name, of in (("model.pt", summary), ("best.pt", summary.get("best"))):
        if not of:
            continue
        if not (folder / name).exists():
            return name
        try:
            found = weights_sha256(torch.load(folder / name, "cpu", weights_only=True))
        except Exception:  # torch.load raises whatever the unpickler raises
            found = ""
        wrote = of.get("weights_sha256") if isinstance(of, dict) else None
        if not isinstance(wrote, str):
            raise InputError(
                f"{folder / 'summary.json'} is damaged (no weights_sha256 of {name}): restore it, "
                "or move it away, and the same command writes it again"
            )
        if found != wrote:
            raise InputError(
                f"{folder / name} is not what the run wrote, whose weights_sha256 is in "
                "summary.json: move it away, and the same command writes it again"
            )
    return ""
