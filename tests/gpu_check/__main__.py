"""Run the parts: `python -m tests.gpu_check [--only PART ...] [--device cpu]`."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from common.writing import write_json
from tests import gpu_check
from tests.gpu_check import LIMIT_S, RESULTS, ROOT, laws, price, several, speed, use
from tests.gpu_check.check import Check, Command, Found, adopt_orphans, kill_all

PARTS = {
    "use": use.PART,
    "laws": laws.PART,
    "speed": speed.PART,
    "price": price.PART,
    "several": several.PART,
}

ABOUT = """
import json, platform, torch
from torch.backends import cudnn
cuda = torch.cuda.is_available()
count = torch.cuda.device_count() if cuda else 0
print(json.dumps({
    "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
    "torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "cudnn": cudnn.version(),
}))
"""
"""In a process of its own: this one neither waits for a GPU's driver nor keeps a context on it."""


def about(log: Path) -> Found:
    """The machine and the versions of its software."""
    said = Command([sys.executable, "-c", ABOUT], log, None).ended(time.monotonic() + 120)
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        None,
    )
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return {
        **json.loads(said.splitlines()[-1]),
        "cpu": f"{os.cpu_count()} cores, {cpu}",
        "git_commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def archive(runs: Path, path: Path) -> None:
    """All logs, and the records of all runs, without weights, snapshots and data."""
    with tarfile.open(path, "w:gz") as file:
        for one in sorted(runs.rglob("*")):
            record = (
                one.suffix in (".json", ".jsonl", ".txt", ".log") and one.stat().st_size < 2**20
            )
            if one.is_file() and (record or one.parent.name == "logs"):
                with suppress(OSError):
                    file.add(one, one.relative_to(runs))


def stop(number: int, _frame: object) -> NoReturn:
    """End as the signal asks, through every `finally`."""
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


def run_part(name: str, machine: Found, arguments: argparse.Namespace, runs: Path) -> bool:
    """Run a part and write its JSON after every check; whether all of them hold."""
    device, limit_s = arguments.device, arguments.limit_s or LIMIT_S[arguments.device]
    command = f"python -m tests.gpu_check --device {device} --only {name}"
    result: dict[str, Any] = {"command": command, **machine, "checks": {}}
    began = time.monotonic()

    def tell(check: str, found: Found) -> None:
        result["checks"][check] = found
        result["elapsed_s"] = round(time.monotonic() - began, 1)
        word = "holds" if found["holds"] else "FAILS"
        print(f"{word}  {check}  {found.get('elapsed_s', limit_s)} s", flush=True)
        write_json(arguments.output / f"{name}.json", result)

    def check(check: str, until: float) -> Check:
        return Check(check, device, len(machine["gpus"]), runs / name, until)

    print(f"{name}: {limit_s:g} s at most", flush=True)
    PARTS[name].run(check, limit_s, limit_s / LIMIT_S["cuda"], tell)
    kill_all()
    return all(found["holds"] for found in result["checks"].values())


def main(given: list[str] | None = None) -> int:
    """Run all parts; 0 if all checks hold, 1 if not, 2 without a GPU."""
    text = str(gpu_check.__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=text)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--limit-s", type=float, help="of each part; default 200, 1200 on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args(given)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    adopt_orphans()
    arguments.output.mkdir(parents=True, exist_ok=True)
    holds = True
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = Path(folder)
        try:
            machine = about(runs / "about")
            gpus = len(machine["gpus"])
            if arguments.device == "cuda" and not gpus:
                print("error: no GPU is visible to torch", file=sys.stderr)
                return 2
            for name in arguments.only or PARTS:
                if name == "several" and arguments.device == "cuda" and gpus < 2:
                    print("several: not run, because it needs two GPUs")
                    continue
                holds &= run_part(name, machine, arguments, runs)
                archive(runs, arguments.output / "logs.tar.gz")
        finally:
            kill_all(for_good=True)
            archive(runs, arguments.output / "logs.tar.gz")
    return 0 if holds else 1


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # not sys.exit: it would wait for a check that hangs
