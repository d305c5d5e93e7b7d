"""How long a restart takes: `python -m tests.faults.restarting` on an idle machine.

One rank of ddp_launch's default run is killed after its third snapshot, at a random moment. The
phases go from the kill until the launcher has reaped that rank, until all ranks have ended and the
launcher starts them again, until rank 0 has found the snapshot, and until its first new step.
`--redraw` only writes the page again.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT
from common.manifest import describe_machine
from common.writing import write_json
from tests.helpers.commands import clean_env, ranks_of, wait_for
from tools.bench import put_between

RESULT = Path(__file__).parent / "results" / "restarting.json"
PAGE = ROOT / "docs" / "watching.md"
BEGIN, END = "<!-- restarting: written by tests.faults.restarting -->", "<!-- end of restarting -->"
PHASES = ("detection", "end of the other ranks", "start-up", "first step")
ROUNDS = 10


def measure(folder: Path, victim: int) -> list[float]:
    """Seconds of each phase, and of all."""
    command = [sys.executable, "-m", "recipes", "ddp_launch", "--restarts", "1", "--nproc", "2"]
    process = subprocess.Popen(
        [*command, "--output-dir", folder],
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[tuple[float, str]] = []
    output = process.stdout
    assert output
    reader = threading.Thread(target=lambda: said.extend((time.time(), line) for line in output))
    reader.start()
    wait_for(lambda: len(list(folder.glob("snapshots/step_*.pt"))) >= 3)
    pid = ranks_of(process.pid)[victim]
    time.sleep(random.uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)
    times = [time.time()]
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), every_s=0.001)
    times.append(time.time())
    reader.join()
    assert process.wait() == 0, said
    for start in ("restart 1 of 1", "resuming after", "restarted:"):
        times.append(next(time_s for time_s, line in said if re.match(start, line)))
    return [b - a for a, b in pairwise(times)] + [times[-1] - times[0]]


def text(result: dict[str, Any]) -> str:
    """The result as sentences."""
    *phases, all_s = [f"{name} {seconds:.2f} s" for name, seconds in result["median_s"].items()]
    rounds, most = result["rounds_s"], max(seconds[-1] for seconds in result["rounds_s"])
    return "\n".join(
        (
            f"Medians of {len(rounds)} restarts: {', '.join(phases)};",
            f"{all_s}. The slowest restart took {most:.2f} s.",
        )
    )


def main() -> None:
    """Measure and write, unless `--redraw` is given; renew the page."""
    if sys.argv[1:] != ["--redraw"]:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [measure(Path(folder, str(n)), n % 2) for n in range(ROUNDS)]
        columns = dict(zip((*PHASES, "all"), zip(*rounds, strict=True), strict=True))
        median = {name: statistics.median(values) for name, values in columns.items()}
        about = {"command": "python -m tests.faults.restarting", **describe_machine()}
        load = os.getloadavg()[2]
        write_json(RESULT, {**about, "load_15_min": load, "median_s": median, "rounds_s": rounds})
    content = text(json.loads(RESULT.read_text()))
    put_between(PAGE, BEGIN, END, content)
    print(content)


if __name__ == "__main__":
    main()
