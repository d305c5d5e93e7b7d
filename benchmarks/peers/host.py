"""What a step costs the host: ddp_launch and its peers with a model of one layer.

Such a step is nearly all Python: loading 8 samples, hooks, the optimizer, logging.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import compare
from common.figure import save_figure
from tools.comparison import median, spread
from tools.fresh import run_fresh

STEPS = 700
"""Nearly four epochs [steps]."""


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Each contestant on 1 and 2 processes, as in `compare`."""
    linear = {"PEERS_LINEAR": "1"}  # read by `task`, in each process
    run_fresh("benchmarks.peers.host", [folder, str(rounds)], linear)
    found = json.loads((folder / "host.json").read_text())
    return {**found, "tables": tables(found["runs"])}


def tables(runs: dict[str, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    """Milliseconds per step, and the ratio to Accelerate's in the same round."""
    rows = []
    for name in compare.CONTESTANTS:
        row = [name]
        for own in runs.values():
            pairs = zip(own["accelerate"], own[name], strict=True)
            ratios = [theirs["steps_per_s"] / run["steps_per_s"] for theirs, run in pairs]
            row.append(f"{1000 / median(own[name], 'steps_per_s'):.2f}")
            row.append("1" if name == "accelerate" else spread(ratios))
        rows.append(row)
    of = [word for n in runs for word in (f"{compare.in_words(n)} [ms]", "over accelerate's")]
    rounds = len(next(iter(next(iter(runs.values())).values())))
    title = (
        f"A step of a model of one layer, 8 samples: medians (least to most) of {rounds} rounds."
    )
    return [{"title": title, "columns": ["", *of], "rows": rows}]


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of bare PyTorch, ddp_launch and Accelerate."""
    (table,) = tables(result["runs"])
    rows = [row for row in table["rows"] if row[0] in ("bare", "ddp_launch", "accelerate")]
    return [{**table, "rows": rows}]


def draw(result: dict[str, Any], path: Path) -> None:
    """Time of a step: a point per run."""

    def plot(axes: Any) -> None:
        for shade, (n, by_name) in enumerate(result["runs"].items()):
            for place, own in enumerate(by_name.values()):
                ms = [1000 / run["steps_per_s"] for run in own]
                label = None if place else compare.in_words(n)
                axes.plot(ms, [place + 0.2 * shade] * len(ms), f"C{shade}o", alpha=0.5, label=label)
        axes.set_yticks(range(len(by_name)), list(by_name))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("a step of a model of one layer [ms]")
        axes.legend()

    save_figure(path, plot)


if __name__ == "__main__":
    here, rounds = Path(sys.argv[1]), int(sys.argv[2])
    result = compare.measure(["--steps", str(STEPS)], here, rounds)
    (here / "host.json").write_text(json.dumps(result))
