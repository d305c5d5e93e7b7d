"""`python -m tests.whole_run_on_other_cpus`: ddp_launch's default run on emulated CPUs.

It takes long, so it is run by hand; tests/doors/test_other_cpus.py is its short form. The result is
docs/other_cpus.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT
from common.manifest import describe_machine
from common.writing import write_json
from tests.helpers.machine import EMULATED_CPUS, free_port
from tools.fresh import fresh_environment

RANKS = 2


def start(cpu: str, folder: Path) -> list["subprocess.Popen[bytes]"]:
    """Two ranks; a launcher's own processes would leave the emulator."""
    port = free_port()
    command = ["-m", "recipes.ddp_launch.train", "--output-dir", str(folder)]
    ranks = []
    for rank in map(str, range(RANKS)):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": str(port)}
        size = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        env = fresh_environment({**numbers, **size, "MASTER_ADDR": "127.0.0.1"})
        ranks.append(
            subprocess.Popen(
                ["qemu-x86_64-static", "-cpu", cpu, sys.executable, *command],
                env=env,
                stderr=folder.with_name(f"{cpu} {rank}.log").open("wb"),
            )
        )
    return ranks


def main() -> int:
    """Run under every CPU at once; 1 if a hash is not that of the native record."""
    native = json.loads((ROOT / "recipes/ddp_launch/results/make_run.json").read_text())
    expected = native["summary"]["weights_sha256"]
    machine, begun_s = describe_machine(), time.monotonic()
    runs: dict[str, Any] = {"native": {"weights_sha256": expected, "from": "make_run.json"}}
    with tempfile.TemporaryDirectory() as scratch:
        begun = {cpu: start(cpu, Path(scratch) / cpu) for cpu in EMULATED_CPUS}
        for cpu, ranks in begun.items():
            failed = [number for number, rank in enumerate(ranks) if rank.wait()]
            if failed:
                said = Path(scratch, f"{cpu} {failed[0]}.log").read_text()
                raise SystemExit(f"{said[-3000:]}\nerror: rank {failed[0]} on {cpu} failed")
            found = json.loads((Path(scratch) / cpu / "summary.json").read_text())
            runs[cpu] = {key: found[key] for key in ("weights_sha256", "elapsed_s", "steps")}
    emulator = subprocess.run(["qemu-x86_64-static", "--version"], capture_output=True, text=True)
    about = {
        "command": "python -m tests.whole_run_on_other_cpus",
        "emulator": emulator.stdout.splitlines()[0],
        "elapsed_s": round(time.monotonic() - begun_s),
        **machine,
    }
    write_json(ROOT / "docs" / "other_cpus.json", {"about": about, "runs": runs})
    return int(any(run["weights_sha256"] != expected for run in runs.values()))


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
