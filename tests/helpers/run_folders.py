"""Folders of runs: made, read, lost and crafted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.run.folder import preprocessing_sha256
from common.run.options import flatten
from common.weights import save_weights, weights_sha256
from tests.helpers.pool import Pool, call_main

SHORT = (
    *("--nproc", "1", "--epochs", "2", "--snapshot-every", "7", "--log-every", "1"),
    *("--keep-snapshots", "3"),
)
"""28 steps of which each is logged, with a snapshot in the middle of each epoch."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def train(pool: Pool, folder: Path, *options: str) -> tuple[int, str]:
    """A run of one process in a warm rank: its exit status, and all that it said."""
    arguments = [*SHORT, *options, "--output-dir", str(folder)]
    ((status, printed, said),) = pool.run(call_main, 1, "ddp_launch", arguments)
    return status, printed + said


LONG = ("--epochs", "20000", "--snapshot-every", "7", "--log-every", "1")
"""A run that goes on until the test ends it."""


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def made_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / "snapshots").mkdir(parents=True)
    (folder / ".lock").touch()


def emptied(folder: Path) -> None:
    """As `rm -rf run/*`, which leaves hidden files."""
    for path in folder.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "removed": (shutil.rmtree, "run was removed while .*: to train again .* the same command$"),
    "made anew": (made_anew, "run was removed .*another one is in its place.*another --output-dir"),
    "moved": (moved, "run was moved to .*/elsewhere while .*--output-dir .*/elsewhere$"),
    "without its lock": (lambda f: (f / ".lock").unlink(), "run/.lock was removed or replaced"),
    "emptied": (emptied, "run/metrics.jsonl was removed or replaced"),
}
"""How a folder gets lost, and what the run says."""


def a_run(folder: Path, recipe: str, config: Any, model: torch.nn.Module) -> Path:
    """The folder of a finished run, as far as the commands read it."""
    save_weights(model.state_dict(), folder / "model.pt")
    sha = weights_sha256(model.state_dict())
    seen = {"channels": 1, "resize": [8, 8], "crop": 8, "mean": [0.3], "std": [0.4]}
    contents: dict[str, dict[Any, Any]] = {
        "config": {"recipe": recipe, **flatten(config), "norm": "group", "stem": "small"},
        "preprocessing": {**seen, "classes": list("abcdefghij")},
        "class_indices": dict(enumerate("abcdefghij")),
        "summary": {
            "recipe": recipe,
            "val_loss": 1.0,
            "val_correct": 2,
            "steps": 1,
            "best": {"weights_sha256": sha},
            "weights_sha256": sha,
            "preprocessing_sha256": preprocessing_sha256(seen),
        },
        "manifest": {
            "command": f"python -m recipes {recipe} --lr 0.1",
            "git_commit": "0" * 40,
            "gpus": ["A"],
            "world_size": 1,
            "seed": 0,
            "determinism": {"cpu_threads": 1},
            "fingerprint": {"sum": "0"},
            "data_fingerprint": "0" * 64,
            "before": [{"until_step": 3}],
        },
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return folder


class Harmless:
    """What a crafted file holds: loading it with pickle would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def assert_record(folder: Path) -> None:
    for file in ("config.json", "manifest.json", "metrics.jsonl"):
        assert (folder / file).is_file(), file
    assert list((folder / "snapshots").glob("step_*.pt"))
    assert list((folder / "tensorboard").iterdir())
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == summary(folder)["weights_sha256"]
