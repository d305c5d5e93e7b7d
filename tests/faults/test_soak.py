"""Killed at random moments, damaged and started again, often: nothing lost or repeated."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.weights import save_weights, weights_sha256
from tests.faults.soak import EPOCHS, STEPS, problems
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import need
from tests.helpers.pool import LONG_PATIENCE_S

FILES = (
    ".lock",
    "config.json",
    "manifest.json",
    "class_indices.json",
    "metrics.jsonl",
    "status.json",
    "snapshots",
    "logs",
    "tensorboard",
)
"""What an unfinished run has in its folder: summary.json and model.pt come with its end."""


def test_what_is_lost_or_repeated_is_noticed(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2)}
    sha = weights_sha256(weights)
    save_weights(weights, tmp_path / "model.pt")
    for name in ("config.json", "manifest.json", "class_indices.json"):
        (tmp_path / name).write_text("{}")

    def run(steps: list[int], epochs: int = EPOCHS, **summary: Any) -> list[str]:
        lines = [json.dumps({"step": step, "loss": 1.0}) for step in steps]
        lines += [json.dumps({"step": STEPS, "val_loss": 1.0})] * epochs
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        spent_s = {"data": [1.0], "compute": [2.0], "communication": [1.0]}
        content = {"weights_sha256": sha, "time_s": spent_s, "goodput": 0.5, **summary}
        (tmp_path / "summary.json").write_text(json.dumps(content))
        return problems(tmp_path, sha, 10.0)

    steps = list(range(1, STEPS + 1))
    assert run(steps) == []
    assert run(steps[:5] + steps[6:]) == ["step 6 lost"]
    assert run([*steps[:5], *steps[4:]]) == ["step 5 repeated"]
    assert run(steps, epochs=1) == ["an epoch lost or repeated"]
    for goodput, right in ((0.4, True), (0.3, False), (1.1, False)):
        assert (run(steps, goodput=goodput) == []) is right
    assert run([2, 1, *steps[2:]]) == ["steps out of order"]
    assert problems(tmp_path, "b")[1:] == [
        "other weights in summary.json",
        "other weights in model.pt",
    ]
    for name in ("manifest.json", "model.pt"):
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            problems(tmp_path, sha)
        (tmp_path / name).write_text("{}")


@pytest.mark.slow
def test_twenty_rounds(recipe: Recipe) -> None:
    need("make")
    output = recipe.tmp_path / "soak.json"
    process = recipe.start(
        "make",
        "-C",
        ROOT,
        "test",
        "SUITE=soak",
        f"PYTHON={sys.executable}",
        "ROUNDS=20",
        f"ARGS=--output {output}",
    )
    recipe.finish(process, recipe.tmp_path, LONG_PATIENCE_S).assert_ok()
    found = json.loads(output.read_text())
    assert found["wrong"] == []
    happened = found["happened"]
    for how in ("all killed", "one killed", "asked to stop"):
        assert happened[how] >= 2, "each way to interrupt was tried"
    for name in FILES:
        assert any(f"{name} {how}" in happened for how in ("deleted", "cut", "garbled")), name
    assert happened["put back"], "some damage is refused"
    assert happened["runs over several starts"] >= 2, "their times add up"
