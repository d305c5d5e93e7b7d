"""`make soak ROUNDS=50`: runs that are interrupted at random moments and started again.

Every round trains ddp_launch on 2 or 3 ranks, kills or stops it at random moments, up to five
times, and starts it again each time. Nothing may be lost: metrics.jsonl has every step once, in
order, and the weights are those of a run that was never interrupted. The ranks are forked from a
process that has imported everything, so that a start takes a fraction of a second.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import torch._dynamo  # DDP and the optimizers do, in every process
import torch._inductor.config
import torch.utils.tensorboard

from common.files import read_metrics, write_json
from common.launch.port import listen
from common.launch.process import run_rank
from common.launch.ranks import Ranks
from common.machine import describe_machine
from common.run.options import RunOptions
from common.terminal import progress_bar
from common.training.optimizer import OptimizerOptions
from recipes.ddp_launch.train import Config, train

RESULT = Path(__file__).parent / "results" / "soak.json"
WORLDS = (2, 3)
STEPS = 28
PATIENCE_S = 60
GRACE_S = 2


def be_rank(rank: int, world_size: int, store: Any, config: Config, log: Path) -> None:
    """Train as one rank; stdout and stderr go to `log`."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    address, port = store.getsockname()
    fd = store.fileno() if rank == 0 else None
    ranks = Ranks(rank, rank, world_size, world_size, "soak", address, port, listen_fd=fd)
    if rank != 0:
        store.close()
    os._exit(run_rank(lambda: train(config, ranks), ranks))


def start(world_size: int, folder: Path) -> list[ForkProcess]:
    """Start or resume the run in `folder`."""
    config = Config(
        run=RunOptions(output_dir=folder, log_every=1, snapshot_every=2, timeout_s=20),
        optimizer=OptimizerOptions(epochs=2),
    )
    context = multiprocessing.get_context("fork")
    folder.mkdir(parents=True, exist_ok=True)
    with listen("127.0.0.1", 0) as store:
        processes = [
            context.Process(
                target=be_rank, args=(rank, world_size, store, config, folder / "said.txt")
            )
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


def problems(folder: Path, expected_sha: str) -> list[str]:
    """The faults of a run that has ended."""
    lines = read_metrics(folder)
    count = Counter(line["step"] for line in lines if "loss" in line)
    steps = [line["step"] for line in lines if "loss" in line]
    found = [f"step {step} lost" for step in range(1, STEPS + 1) if not count[step]]
    found += [f"step {step} repeated" for step in count if count[step] > 1]
    if not found and steps != sorted(steps):
        found.append("steps out of order")
    if json.loads((folder / "summary.json").read_text())["weights_sha256"] != expected_sha:
        found.append("other weights")
    return found + [f"{path.name} left" for path in folder.glob("snapshots/*.unsound")]


def play(world_size: int, folder: Path, dice: random.Random, usual_s: float) -> list[str]:
    """One round: train to the end; returns the interruptions.

    Raises:
        RuntimeError: a process does not end, or ends with an unexpected status.
    """
    interruptions: list[str] = []
    most = dice.randint(1, 5)
    while True:
        processes = start(world_size, folder)
        how = ""
        if len(interruptions) < most and not wait(processes, dice.uniform(0, usual_s)):
            how = interrupt(processes, dice)
            interruptions.append(how)
        if not wait(processes, PATIENCE_S):
            for process in processes:
                process.kill()
            raise RuntimeError(f"{folder}: not ended {PATIENCE_S} s after {how or 'the start'}")
        codes = [process.exitcode for process in processes]
        if not any(codes):
            return interruptions
        if not how or not {0, 1, 75, -signal.SIGKILL}.issuperset(codes):
            raise RuntimeError(f"{folder}: ended with {codes}, after {how or 'no interruption'}")


def soak(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Play all rounds; the counts."""
    expected, usual_s = {}, 0.0
    for world_size in WORLDS:
        start_s = time.monotonic()
        processes = start(world_size, folder / f"whole{world_size}")
        assert wait(processes, PATIENCE_S)
        usual_s = max(usual_s, time.monotonic() - start_s)
        summary = json.loads((folder / f"whole{world_size}" / "summary.json").read_text())
        expected[world_size] = summary["weights_sha256"]
    dice, interruptions, wrong = random.Random(seed), Counter[str](), []
    with progress_bar(rounds, unit="round") as bar:
        for number in range(rounds):
            world_size, run = dice.choice(WORLDS), folder / f"round{number}"
            try:
                interruptions.update(play(world_size, run, dice, usual_s))
                wrong += [f"round {number}: {what}" for what in problems(run, expected[world_size])]
            except RuntimeError as failed:
                wrong.append(f"round {number}: {failed}")
            bar.update()
    return {
        "rounds": rounds,
        "seed": seed,
        "ranks": list(WORLDS),
        "steps_a_round": STEPS,
        "interruptions": dict(interruptions),
        "wrong": wrong,
    }


def main() -> int:
    """Run from a command line; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random moments and interruptions"
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sklearn.datasets.load_digits()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(given.rounds, given.seed, Path(folder))
        for line in result["wrong"]:
            print(line, file=sys.stderr)
    given.output.parent.mkdir(exist_ok=True)
    elapsed_s = round(time.monotonic() - start_s, 1)
    command = f"make soak ROUNDS={given.rounds}"
    about = {"command": command, "elapsed_s": elapsed_s, **describe_machine()}
    write_json(given.output, {**result, "about": about})
    count = sum(result["interruptions"].values())
    print(
        f"{given.rounds} rounds, {count} interruptions, {len(result['wrong'])} faults "
        f"({elapsed_s:.0f} s): {given.output}"
    )
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
