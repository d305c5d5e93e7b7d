"""`--profile`: what each rank did in a few steps."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.commands import Recipe
from tests.helpers.pool import Pool
from tests.helpers.training import training

STEPS = 3


def overlapping(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Ranges of which one begins within the other and ends after it: Perfetto drops the second."""
    found, around = [], dict[tuple[Any, Any], list[dict[str, Any]]]()
    whole = [event for event in events if event["ph"] == "X"]
    for event in sorted(whole, key=lambda event: (event["ts"], -event["dur"])):
        outer = around.setdefault((event["pid"], event["tid"]), [])
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        if outer and outer[-1]["ts"] + outer[-1]["dur"] < event["ts"] + event["dur"]:
            found.append((outer[-1]["name"], event["name"]))
        outer.append(event)
    return found


def ranges(trace: Path) -> dict[str, list[dict[str, Any]]]:
    """The phases of each recorded step, in their order, and the step itself before them."""
    events = json.loads(trace.read_text())["traceEvents"]
    assert overlapping(events) == []
    named = [event for event in events if event.get("cat") == "user_annotation"]
    named.sort(key=lambda event: (event["ts"], -event["dur"]))
    found: dict[str, list[dict[str, Any]]] = {}
    kinds = ("data", "compute", "communication", "save", "evaluate", "other")
    for event in named:
        if event["name"].startswith("ProfilerStep#"):
            found[event["name"]] = [event]
        elif event["name"] in kinds:
            found[next(reversed(found))].append(event)
    return found


def test_each_rank_leaves_its_phases_and_the_bits_stay(pool: Pool, tmp_path: Path) -> None:
    runs = []
    for steps in (0, STEPS):
        options = {"run": {"profile": steps, "log_every": 1}, "optimizer": {"max_steps": 10}}
        runs.append(training(pool, 2, tmp_path / str(steps), **options))
    plain, profiled = runs
    assert profiled.sha == plain.sha
    assert not (plain.folder / "profile").exists()
    ranks = [ranges(profiled.folder / "profile" / f"rank_{rank}.json") for rank in (0, 1)]
    for found in ranks:
        assert [*found] == [f"ProfilerStep#{number}" for number in (3, 4, 5)]
        for whole, *phases in found.values():
            names = [phase["name"] for phase in phases]
            assert names == ["data", "compute", "communication", "compute"]
            assert all(whole["ts"] <= phase["ts"] for phase in phases)
            ends = [event["ts"] + event["dur"] for event in (phases[-1], whole)]
            assert ends[0] <= ends[1]
    for rank in (0, 1):
        table = (profiled.folder / "profile" / f"rank_{rank}.txt").read_text()
        assert "aten::convolution_backward" in table


def test_a_run_that_ends_earlier_leaves_what_it_recorded(recipe: Recipe) -> None:
    result = recipe("model_parallel_toy", "--max-steps", "5", "--profile", "100").assert_ok()
    assert "aten::" in result.stdout
    assert f"{result.folder}/profile/rank_0.json opens in https://ui.perfetto.dev" in result.stdout
    assert "USDT" not in result.stderr
    found = ranges(result.folder / "profile" / "rank_0.json")
    assert [*found] == ["ProfilerStep#3", "ProfilerStep#4"]
    assert [phase["name"] for phase in found["ProfilerStep#3"]][1:] == ["data", "compute"]


def test_a_run_shorter_than_its_beginning_says_that_nothing_was_recorded(recipe: Recipe) -> None:
    result = recipe("model_parallel_toy", "--max-steps", "2", "--profile", "1").assert_ok()
    assert "--profile: no step to record" in result.stdout
    assert not (result.folder / "profile").exists()
