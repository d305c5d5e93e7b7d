"""Killed at random moments and started again, fifty times: no step lost, none repeated."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Recipe, need
from tests.faults.soak import STEPS, problems


def test_a_lost_or_repeated_step_is_noticed(tmp_path: Path) -> None:
    def run(steps: list[int]) -> list[str]:
        lines = [json.dumps({"step": step, "loss": 1.0}) for step in steps]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        (tmp_path / "summary.json").write_text('{"weights_sha256": "a"}')
        return problems(tmp_path, "a")

    steps = list(range(1, STEPS + 1))
    assert run(steps) == []
    assert run(steps[:5] + steps[6:]) == ["step 6 lost"]
    assert run([*steps[:5], *steps[4:]]) == ["step 5 repeated"]
    assert run([2, 1, *steps[2:]]) == ["steps out of order"]
    assert problems(tmp_path, "b") == ["steps out of order", "other weights"]


@pytest.mark.slow
def test_fifty_rounds(recipe: Recipe) -> None:
    need("make")
    output = recipe.tmp_path / "soak.json"
    process = recipe.start(
        "make",
        "-C",
        ROOT,
        "soak",
        f"PYTHON={sys.executable}",
        "ROUNDS=50",
        f"ARGS=--output {output}",
    )
    recipe.finish(process, recipe.tmp_path, timeout_s=900).assert_ok()
    found = json.loads(output.read_text())
    assert found["wrong"] == []
    assert len(found["interruptions"]) == 3, "each way to interrupt was tried"
    assert min(found["interruptions"].values()) >= 5
