"""How much watching slows the steps of a run: `python -m tests.faults.watching`.

Two ranks train ddp_launch's model in blocks of steps that take turns, so that a machine whose speed
drifts favours no way: unwatched, with agreements on stop signals, and with the time measured that
each rank computes. All the while a thread looks at the rank, as in a run. It would disturb all ways
equally, so one look of it is timed by itself; there is one per second at most. The launcher's own
checks of its ranks (fifty per second) run always, and are not part of the difference.

A comparison of replicas is timed beside steps of ResNet-18.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import ROOT
from common.files import write_json
from common.group.collectives import gather_numbers
from common.group.stop import StopAgreement
from common.launch.ranks import Ranks
from common.machine import describe_machine
from common.replicas import unlike_replicas
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.training.ddp import warm_up
from common.training.models import ModelOptions, build_model
from common.watch.record import Watch, stop
from common.watch.stragglers import ComputeTime
from tests.pool import Pool, in_group
from tools.bench import put_between

RESULT = Path(__file__).parent / "results" / "watching.json"
BEGIN, END = "<!-- watching: written by tests.faults.watching -->", "<!-- end of watching -->"
PARTS, BLOCKS, STEPS, LOG_EVERY = 6, 900, 5, 10
WAYS = ("unwatched", "stop signals", "slow ranks")


def measure(ranks: Ranks, folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each block on the slower rank, and seconds per look."""
    set_determinism(**RunOptions().determinism)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))
    clock, copies = ComputeTime(torch.device("cpu")), []
    for _ in range(2):
        model = build_model(ModelOptions(), 1, 10, 8).train()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        warm_up(ddp, images[0], len(images))
        copies.append((ddp, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)))
    clock.follow(*copies[1])
    agreement, progress = StopAgreement(), SimpleNamespace(step=0)
    watch = Watch(folder, ranks.rank, {"world_size": 2}, 60.0, lambda: progress.step)
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "look")}
    for block in range(BLOCKS):
        # There and back again: no way always comes first.
        way = (WAYS + WAYS[::-1])[block % 6]
        ddp, optimizer = copies[way == "slow ranks"]
        start_s = time.perf_counter()
        for _ in range(STEPS):
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if way == "stop signals":
                agreement.after(progress.step)
            if way == "slow ranks":
                clock.end_step()
                if progress.step % LOG_EVERY == 0:
                    clock.halves()
                clock.start()
        mine = torch.tensor((time.perf_counter() - start_s) / STEPS)
        found[way].append(float(gather_numbers(mine).max()))
    for _ in range(20):
        progress.step += 1
        start_s = time.perf_counter()
        os.fstat(watch._stacks.fileno())
        watch._look(asked=False)
        found["look"].append(time.perf_counter() - start_s)
    stop()
    agreement.release()
    return found


def compare(_ranks: Ranks) -> dict[str, list[float]]:
    """Seconds of a step of ResNet-18 with 8 images of 64 px per rank, and of a comparison."""
    torch.set_num_threads(1)
    model = build_model(ModelOptions(model="resnet18"), 3, 10, 64).train()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    warm_up(ddp, images[0], len(images))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: dict[str, list[float]] = {"resnet18 step": [], "comparison": []}
    for _ in range(20):
        start_s = time.perf_counter()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s = time.perf_counter()
        found["resnet18 step"].append(step_s - start_s)
        assert not unlike_replicas({"model": model, "optimizer": optimizer}, 0, buffers=False)
        found["comparison"].append(time.perf_counter() - step_s)
    return found


def main() -> None:
    """Measure and write."""
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        parts = [pool.run(in_group, 2, measure, Path(folder))[0] for _ in range(PARTS)]
    compared = [pool.run(in_group, 2, compare)[0] for _ in range(PARTS // 3)]
    pool.close()
    found = {name: [block for part in parts for block in part[name]] for name in parts[0]}
    found |= {name: [s for part in compared for s in part[name]] for name in compared[0]}
    seconds = {name: statistics.median(values) for name, values in found.items()}
    ratios = {}
    lines = [
        "| what is watched | time of a step, of an unwatched one | 95 % interval |",
        "|---|---|---|",
    ]
    for way in WAYS[1:]:
        pairs = [a / b for a, b in zip(found[way], found[WAYS[0]], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        # The standard error of a median; quartiles, because a shared machine has outliers.
        error = 1.25 * (high - low) / 1.35 / len(pairs) ** 0.5
        interval = [middle - 1.96 * error, middle + 1.96 * error]
        ratios[way] = {"pairs": len(pairs), "median": middle, "interval_95": interval}
        lines.append(f"| {way} | {middle:.4f} | {interval[0]:.4f} to {interval[1]:.4f} |")
    of_100 = seconds["comparison"] / 100 / seconds["resnet18 step"]
    lines += [
        "",
        f"- A step of ddp_launch's default model took {1000 * seconds[WAYS[0]]:.1f} ms.",
        "- The thread that records hangs looks once per second at most; a look took "
        f"{1e6 * seconds['look']:.0f} µs.",
        f"- `--check-replicas 100`: a comparison of ResNet-18 took {seconds['comparison']:.3f} s, "
        f"and a step {seconds['resnet18 step']:.3f} s (8 images of 64 px per rank). So it costs "
        f"{of_100:.2%} of the time.",
    ]
    write_json(
        RESULT,
        {
            "command": "python -m tests.faults.watching",
            **describe_machine(),
            "steps_a_block": STEPS,
            "ratios": ratios,
            "seconds": seconds,
        },
    )
    put_between(ROOT / "docs" / "watching.md", BEGIN, END, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
