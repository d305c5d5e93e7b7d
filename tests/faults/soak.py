"""`make test SUITE=soak`: runs that are interrupted, damaged and started again, at random.

Every round trains ddp_launch on 2 or 3 ranks, kills or stops it at random moments, up to five
times, and starts it again each time. Between two starts, one random file of the run's folder is
deleted, cut or filled with garbage. The run must go on, or end with status 2
and name the file, which is then put back. Nothing may be lost: metrics.jsonl has every step once,
in order, and the weights are those of a run that was never interrupted. The ranks are forked from a
process that has imported everything, so that a start takes a fraction of a second.

With `ARGS=--restarts` the launcher's own `--restarts` and `--shrink` go on after each kill, over 4,
2, 1 and 4 processes: a rank beyond the devices that are there dies at its start, which stands in
for a device that does not come back.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import torch._dynamo  # DDP and the optimizers do, in every process
import torch._inductor.config
import torch.utils.tensorboard

from common.kernels import choose_kernels
from common.launch.port import listen
from common.launch.process import run_rank
from common.launch.ranks import Ranks
from common.launch.start import Child, LaunchOptions, prepare_launch, supervise
from common.manifest import describe_machine
from common.reading import read_metrics
from common.restart import with_restarts
from common.run.options import RunOptions
from common.terminal import progress_bar
from common.training.ddp import ParallelOptions
from common.training.optimizer import OptimizerOptions
from common.watch.clock import STEP
from common.weights import weights_sha256
from common.writing import write_json
from recipes.ddp_launch.train import Config, train
from tests.helpers.pool import PATIENCE_S

RESULT = Path(__file__).parent / "results" / "soak.json"
WORLDS = (2, 3)
RESTARTED = Path(__file__).parent / "results" / "soak_restarts.json"
DEVICES = (4, 2, 1)
"""Devices that are there, one after another, when ranks restart. The first number is V, too."""
EPOCHS = 2
STEPS = 28
GRACE_S = 2
_INTERRUPTED = {0, 1, 75, -signal.SIGKILL, -signal.SIGTERM}
"""Statuses after an interruption; a rank without a handler yet ends of SIGTERM itself."""


def log_to(file: Path) -> None:
    """Append stdout and stderr of this process to a file."""
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)


def be_rank(rank: int, world_size: int, store: Any, config: Config, log: Path) -> None:
    """Train as one rank; stdout and stderr go to `log`."""
    log_to(log)
    if (devices := devices_of(log)).exists() and rank >= int(devices.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    address, port = store.getsockname()
    fd = store.fileno() if rank == 0 else None
    ranks = Ranks(rank, rank, world_size, world_size, "soak", address, port, listen_fd=fd)
    if rank != 0:
        store.close()
    os._exit(run_rank(lambda: train(config, ranks), ranks))


def said(folder: Path) -> Path:
    """The file with all that the last start of the run in `folder` said."""
    return folder.with_suffix(".txt")


def devices_of(log: Path) -> Path:
    """The file with the number of devices, for the run with that log."""
    return log.with_suffix(".devices")


def start(world_size: int, folder: Path, shards: int = 0) -> list[ForkProcess]:
    """Start or resume the run in `folder`; its global batch has `shards` (--virtual-ranks)."""
    config = Config(
        run=RunOptions(output_dir=folder, log_every=1, snapshot_every=2, timeout_s=20),
        optimizer=OptimizerOptions(epochs=EPOCHS, global_batch_size=96 if shards else None),
        parallel=ParallelOptions(virtual_ranks=shards),
    )
    context = multiprocessing.get_context("fork")
    if not shards:
        said(folder).unlink(missing_ok=True)
    with listen("127.0.0.1", 0) as store:
        processes = [
            context.Process(target=be_rank, args=(rank, world_size, store, config, said(folder)))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
    return processes


def wait(processes: Sequence[ForkProcess], seconds: float) -> bool:
    """Wait at most `seconds`; whether all have ended."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode is not None for process in processes)


def interrupt(processes: Sequence[ForkProcess], dice: random.Random) -> str:
    """Kill all ranks or one rank, or ask all to stop; returns which of these.

    Ranks that then wait for a killed rank are killed, too, as the launcher does.
    """
    how = dice.choice(("all killed", "one killed", "asked to stop"))
    for victim in [dice.choice(processes)] if how == "one killed" else processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(victim.pid or 0, signal.SIGTERM if how == "asked to stop" else signal.SIGKILL)
    if not wait(processes, GRACE_S):
        for process in processes:
            process.kill()
    return how


def damage(folder: Path, dice: random.Random, hit: Counter[str]) -> tuple[str, str, Path, bytes]:
    """Delete, cut or garble one file; returns how, of which entry of the folder, and the file.

    It is of an entry that was damaged least often in all rounds, as `hit` counts.
    """
    entries = sorted(path for path in folder.iterdir() if path.is_file() or any(path.iterdir()))
    least = min(hit[path.name] for path in entries)
    entry = dice.choice([path for path in entries if hit[path.name] == least])
    hit[entry.name] += 1
    how = dice.choice(("deleted", "cut", "garbled"))
    files = [entry] if entry.is_file() else sorted(p for p in entry.rglob("*") if p.is_file())
    file = dice.choice(files)
    before = file.read_bytes()
    if how == "deleted":
        file.unlink()
    elif how == "cut":
        file.write_bytes(before[: dice.randrange(len(before) or 1)])
    else:
        file.write_bytes(dice.randbytes(len(before)))
    return how, entry.name, file, before


def summary_of(folder: Path) -> dict[str, Any]:
    """What a finished run has reached."""
    return dict(json.loads((folder / "summary.json").read_text()))


def problems(folder: Path, expected_sha: str, elapsed_s: float = math.inf) -> list[str]:
    """The faults of a run that has ended with status 0, at most so long after its first start."""
    lines = read_metrics(folder)
    count = Counter(line["step"] for line in lines if "loss" in line)
    steps = [line["step"] for line in lines if "loss" in line]
    found = [f"step {step} lost" for step in range(1, STEPS + 1) if not count[step]]
    found += [f"step {step} repeated" for step in count if count[step] > 1]
    if not found and steps != sorted(steps):
        found.append("steps out of order")
    if sum("val_loss" in line for line in lines) != EPOCHS:
        found.append("an epoch lost or repeated")
    summary = summary_of(folder)
    steps_s = sum(summary["time_s"][kind][0] for kind in STEP)  # of the last start only
    if not steps_s / (1.02 * elapsed_s) <= summary["goodput"] <= 1:
        found.append(f"of {elapsed_s:.3f} s: {steps_s} in steps, goodput {summary['goodput']}")
    if summary["weights_sha256"] != expected_sha:
        found.append("other weights in summary.json")
    if weights_sha256(torch.load(folder / "model.pt", weights_only=True)) != expected_sha:
        found.append("other weights in model.pt")
    for name in ("config.json", "manifest.json", "class_indices.json"):
        json.loads((folder / name).read_text())
    return found


def play(
    world_size: int,
    folder: Path,
    dice: random.Random,
    usual_s: float,
    expected_sha: str,
    hit: Counter[str],
) -> Counter[str]:
    """One round: train to the end, and start once more after that; counts what happened.

    Raises:
        RuntimeError: a process does not end, or ends with an unexpected status; or something is
            missing at the end.
    """
    happened: Counter[str] = Counter()
    damaged: set[Path] = set()
    last: tuple[Path, bytes] | None = None
    most, ended, begun_s = dice.randint(1, 5), False, time.time()
    while True:
        processes = start(world_size, folder)
        how = ""
        may_interrupt = not ended and happened["interruptions"] < most
        if may_interrupt and not wait(processes, dice.uniform(0, usual_s)):
            how = interrupt(processes, dice)
            happened.update([how, "interruptions"])
        if not wait(processes, PATIENCE_S):
            for process in processes:
                process.kill()
            raise RuntimeError(f"not ended {PATIENCE_S} s after {how or 'the start'}")
        codes, told = {process.exitcode for process in processes}, said(folder).read_text()
        about = f"after {how or 'no interruption'}, damaged {sorted(map(str, damaged))}:\n{told}"
        if codes == {0}:
            try:
                wrong = problems(folder, expected_sha, time.time() - begun_s)
            except Exception as error:  # whatever is missing or cannot be read
                wrong = [repr(error)]
            if wrong:
                raise RuntimeError(f"{wrong} {about}")
            if ended:
                return happened
            happened["runs over several starts"] += summary_of(folder)["resumed_from"] is not None
            ended = True
        elif codes == {2} and damaged and not how:
            errors = [line for line in told.splitlines() if line.startswith("error:")]
            if len(errors) != 1 or not any(named(file, errors[0]) for file in damaged):
                raise RuntimeError(f"no damaged file is named {about}")
            if last:
                last[0].write_bytes(last[1])
                happened["put back"] += 1
            else:  # what was put back was damaged before
                shutil.rmtree(folder)
                happened["started afresh"] += 1
            last = None
            continue
        elif not how or not _INTERRUPTED | ({2} if damaged else set()) >= codes:
            raise RuntimeError(f"ended with {codes} {about}")
        finished = ended or (folder / "summary.json").exists()  # perhaps interrupted after that
        if not finished and folder.is_dir() and any(folder.iterdir()):  # else it is only read
            kind, entry, file, before = damage(folder, dice, hit)
            last = file, before
            damaged.add(file)
            happened.update([f"{entry} {kind}", "damages"])


def named(file: Path, line: str) -> bool:
    """Whether a message names a file; of a snapshot that is gone only the folder is known."""
    return str(file.parent) in line and (file.name in line or file.parent.name == "snapshots")


def be_launcher(folder: Path) -> None:
    """Start the ranks of the run in `folder` as `--nproc 4 --restarts 99 --shrink` does."""
    log_to(said(folder))

    def ranks(nproc: int) -> int:
        prepare_launch()
        processes = enumerate(start(nproc, folder, DEVICES[0]))
        return supervise(
            [Child(r, p.pid or 0, partial(getattr, p, "exitcode")) for r, p in processes]
        )

    os._exit(with_restarts(ranks, DEVICES[0], LaunchOptions(restarts=99, shrink=True)))


def play_restarts(folder: Path, dice: random.Random, usual_s: float, sha: str) -> Counter[str]:
    """One round: ranks are killed, and devices come and go; counts what happened.

    Raises:
        RuntimeError: a process does not end, or ends with an unexpected status; or something is
            missing at the end.
    """
    happened: Counter[str] = Counter()
    devices, most = devices_of(said(folder)), dice.randint(1, 6)
    while True:
        devices.write_text(str(DEVICES[0]))
        launcher = multiprocessing.get_context("fork").Process(target=be_launcher, args=(folder,))
        launcher.start()
        asked = False
        while happened["interruptions"] < most and not wait([launcher], dice.uniform(0, usual_s)):
            happened["interruptions"] += 1
            there = DEVICES[happened["interruptions"] % len(DEVICES)]
            devices.write_text(str(there))
            asked = dice.random() < 0.1
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            victims = [int(pid) for pid in children.read_text().split()] if not asked else []
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if asked:
                    os.kill(launcher.pid or 0, signal.SIGTERM)
                    break
                if victims:
                    os.kill(dice.choice(victims), signal.SIGKILL)
                    happened["kills"] += 1
        if not wait([launcher], PATIENCE_S):
            launcher.kill()
            raise RuntimeError(f"not ended after {PATIENCE_S} s: {said(folder).read_text()}")
        told = said(folder).read_text()
        if launcher.exitcode == 0:
            if wrong := problems(folder, sha):
                raise RuntimeError(f"{wrong}:\n{told}")
            starts = re.findall(r"(?m)^restart \d+ of .* on (\d) processes", told)
            happened.update([f"restarts on {number}" for number in starts])
            return happened
        gave_up = launcher.exitcode == 1 and "not restarted: two restarts have failed" in told
        if not gave_up and not (asked and launcher.exitcode in (75, -signal.SIGTERM)):
            raise RuntimeError(f"ended with {launcher.exitcode}:\n{told}")
        happened["gave up" if gave_up else "stopped by SIGTERM"] += 1


def soak_restarts(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Play all rounds of `play_restarts`; the counts."""
    hashes, start_s = set[str](), 0.0
    for world_size in DEVICES:
        start_s, whole = time.monotonic(), folder / f"whole{world_size}"
        assert wait(start(world_size, whole, DEVICES[0]), PATIENCE_S)
        hashes.add(summary_of(whole)["weights_sha256"])
    usual_s = time.monotonic() - start_s
    assert len(hashes) == 1, "one hash on any number of processes"
    dice, happened, wrong = random.Random(seed), Counter[str](), []
    with progress_bar(rounds, unit="round") as bar:
        for number in range(rounds):
            try:
                happened += play_restarts(folder / f"round{number}", dice, usual_s, min(hashes))
            except Exception as failed:  # whatever is missing or cannot be read
                wrong.append(f"round {number}: {failed!r}")
            bar.update()
    return {
        "rounds": rounds,
        "seed": seed,
        "devices": list(DEVICES),
        "steps_a_round": STEPS,
        "weights_sha256": sorted(hashes),
        "happened": dict(sorted(happened.items())),
        "wrong": wrong,
    }


def soak(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Play all rounds; the counts."""
    expected, usual_s = {}, 0.0
    for world_size in WORLDS:
        start_s = time.monotonic()
        processes = start(world_size, folder / f"whole{world_size}")
        assert wait(processes, PATIENCE_S)
        usual_s = max(usual_s, time.monotonic() - start_s)
        expected[world_size] = summary_of(folder / f"whole{world_size}")["weights_sha256"]
    dice, happened, wrong = random.Random(seed), Counter[str](), []
    hit = Counter[str]()
    with progress_bar(rounds, unit="round") as bar:
        for number in range(rounds):
            world_size, run = dice.choice(WORLDS), folder / f"round{number}"
            try:
                happened += play(world_size, run, dice, usual_s, expected[world_size], hit)
            except RuntimeError as failed:
                wrong.append(f"round {number}: {failed}")
            bar.update()
    return {
        "rounds": rounds,
        "seed": seed,
        "ranks": list(WORLDS),
        "steps_a_round": STEPS,
        "happened": dict(sorted(happened.items())),
        "wrong": wrong,
    }


def main() -> int:
    """Run from a command line; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random moments and interruptions"
    )
    parser.add_argument("--restarts", action="store_true", help="--restarts and --shrink instead")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    given = parser.parse_args()
    output = given.output or (RESTARTED if given.restarts else RESULT)
    torch.set_num_threads(1)
    choose_kernels(portable=True)  # here: the ranks are forked from a process that has computed
    sklearn.datasets.load_digits()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        play_all = soak_restarts if given.restarts else soak
        result = play_all(given.rounds, given.seed, Path(folder))
        for line in result["wrong"]:
            print(line, file=sys.stderr)
    output.parent.mkdir(exist_ok=True)
    elapsed_s = round(time.monotonic() - start_s, 1)
    command = f"make test SUITE=soak ROUNDS={given.rounds}" + " ARGS=--restarts" * given.restarts
    about = {"command": command, "elapsed_s": elapsed_s, **describe_machine()}
    write_json(output, {**result, "about": about})
    count = Counter(result["happened"])
    print(
        f"{given.rounds} rounds, {count['interruptions']} interruptions, {count['damages']} files "
        f"damaged, {len(result['wrong'])} faults ({elapsed_s:.0f} s): {output}"
    )
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
