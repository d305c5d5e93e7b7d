"""The table of docs/faults.md, from the results of the fault matrix."""

import json
from typing import Any

from tests.faults import matrix


def row(fault: str, first_line: str, seconds: float = 0.2, status: int = 1) -> dict[str, Any]:
    return {
        "fault": fault,
        "recipe": "ddp_launch",
        "seconds": seconds,
        "status": status,
        "first_line": first_line,
    }


def test_faults_with_the_same_line_share_one_which_names_each() -> None:
    long = "error: rank 1 on vm: one, two three four five six seven: do this"
    rows = [
        row("a rank sleeps", f"{long} at x.py:7 (f)"),
        row("a rank sleeps", "what another recipe says", seconds=8.25),
        row("a rank hangs in data loading (rank 0)", f"{long} at y.py:9 (g)"),
        row("a rank stops", "error: rank 2 on vm: one"),
        row("Ctrl-C", "", status=130),
        row("SIGTERM", "", status=75),
        row("it is killed once (--restarts)", "lost 1.7 s", status=0),
        row("it is killed twice (--restarts)", "lost 2.0 s", status=0),
    ]
    assert matrix.table(rows).splitlines()[2:] == [
        "| a rank sleeps / hangs in data loading | 8.2 | 1 | rank 1 on vm: one, "
        "two three four five six seven: ... |",
        "| a rank stops | 0.2 | 1 | rank 2 on vm: one |",
        "| Ctrl-C | 0.2 | 130 |  |",
        "| SIGTERM | 0.2 | 75 |  |",
        "| it is killed once / twice (--restarts) | 0.2 | 0 | lost 1.7 s |",
    ]


def test_every_fault_was_caused_in_ddp_launch() -> None:
    """The page says so, and its lines are from this recipe."""
    recipe: dict[str, str] = {}
    for found in json.loads(matrix.RESULT.read_text())["rows"]:
        recipe.setdefault(found["fault"], found["recipe"].split(",")[0])
    assert len(recipe) > 40
    assert set(recipe.values()) == {"ddp_launch"}
