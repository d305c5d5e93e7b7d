"""How much watching slows the steps of a run: `python -m tests.faults.watching`.

Two ranks train ddp_launch's model in blocks of steps that take turns, so that a machine whose speed
drifts favours no way: unwatched, with agreements on stop signals, and with the time measured that
each rank computes. All ways train one copy of the model, because two copies may differ in speed.
All the while a thread looks at the rank, as in a run. It would disturb all ways equally, so one
look of it is timed by itself; there is one per second at most. The launcher's own checks of its
ranks (fifty per second) run always, and are not part of the difference.

A comparison of replicas is timed beside steps of ResNet-18. `--redraw` only writes the page again.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import ROOT
from common.group.collectives import gather_numbers
from common.group.stop import StopAgreement
from common.launch.ranks import Ranks
from common.manifest import describe_machine
from common.replicas import unlike_replicas
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.training.ddp import warm_up
from common.training.models import ModelOptions, build_model
from common.watch.clock import Clock
from common.watch.record import Watch, stop
from common.watch.stragglers import ComputeTime
from common.writing import write_json
from tests.helpers.pool import Pool, in_group
from tools.bench import put_between

RESULT = Path(__file__).parent / "results" / "watching.json"
BEGIN, END = "<!-- watching: written by tests.faults.watching -->", "<!-- end of watching -->"
PARTS, BLOCKS, STEPS, LOG_EVERY = 6, 900, 5, 10
WAYS = ("unwatched", "stop signals", "slow ranks")


def replica(
    options: ModelOptions, images: Tensor
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A model for these images (samples, channels, side, side), and its optimizer."""
    model = build_model(options, images.shape[1], 10, images.shape[2]).train()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    warm_up(ddp, images[0], len(images))
    return ddp, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def take_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """One step of training."""
    nn.functional.cross_entropy(ddp(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def hooks_of(ddp: DistributedDataParallel) -> list[dict[int, Any]]:
    """Where torch keeps the hooks that `ComputeTime.follow` registers."""
    last = next(ddp.parameters())
    return [ddp._forward_pre_hooks, ddp.module._forward_pre_hooks, last._post_accumulate_grad_hooks]


def measure(ranks: Ranks, folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each block on the slower rank, and seconds per look."""
    set_determinism(**RunOptions().determinism)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))
    clock = Clock(torch.device("cpu"))
    compute = ComputeTime(clock)
    ddp, optimizer = replica(ModelOptions(), images)
    compute.follow(ddp)
    hooks = hooks_of(ddp)
    watched = [dict(registered) for registered in hooks]
    assert all(len(functions) == 1 for functions in watched), watched
    # Agreements are due by time, and only every third block makes them.
    agreement, progress = StopAgreement(interval_s=len(WAYS)), SimpleNamespace(step=0)
    watch = Watch(folder, ranks.rank, {"world_size": 2}, 60.0, lambda: progress.step)
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "look")}
    for block in range(BLOCKS):
        # There and back again: no way always comes first.
        way = (WAYS + WAYS[::-1])[block % 6]
        for registered, functions in zip(hooks, watched, strict=True):
            registered.clear()
            if way == "slow ranks":
                registered.update(functions)
        start_s = time.perf_counter()
        for _ in range(STEPS):
            take_step(ddp, optimizer, images, labels)
            progress.step += 1
            if way == "stop signals":
                agreement.after(progress.step)
            if way == "slow ranks":
                clock.end_step()
                if progress.step % LOG_EVERY == 0:
                    compute.halves()
                clock.begin_step()
        mine = torch.tensor((time.perf_counter() - start_s) / STEPS)
        found[way].append(float(gather_numbers(mine).max()))
    assert compute.halves().all(), "the clock measured no steps"
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
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    ddp, optimizer = replica(ModelOptions(model="resnet18"), images)
    parts = {"model": ddp.module, "optimizer": optimizer}
    found: dict[str, list[float]] = {"resnet18 step": [], "comparison": []}
    for _ in range(20):
        start_s = time.perf_counter()
        take_step(ddp, optimizer, images, labels)
        step_s = time.perf_counter()
        found["resnet18 step"].append(step_s - start_s)
        assert not unlike_replicas(parts, 0, buffers=False)
        found["comparison"].append(time.perf_counter() - step_s)
    return found


def text(result: dict[str, Any]) -> str:
    """The result as a list."""
    seconds = result["seconds"]
    lines = []
    for way, ratio in result["ratios"].items():
        low, high = ratio["interval_95"]
        lines.append(
            f"- {way}: steps take {ratio['median']:.4f} times as long (95 % interval "
            f"{low:.4f} to {high:.4f})."
        )
    lines += [
        f"- A step took {1000 * seconds[WAYS[0]]:.1f} ms, and a look for hangs "
        f"{1e6 * seconds['look']:.0f} µs.",
        f"- A comparison of replicas took {seconds['comparison']:.3f} s with ResNet-18, a step "
        f"{seconds['resnet18 step']:.3f} s (8 images of 64 px per rank).",
    ]
    return "\n".join(lines)


def measure_all() -> None:
    """Measure and write."""
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        parts = [pool.run(in_group, 2, measure, Path(folder))[0] for _ in range(PARTS)]
    compared = [pool.run(in_group, 2, compare)[0] for _ in range(PARTS // 3)]
    pool.close()
    found = {name: [block for part in parts for block in part[name]] for name in parts[0]}
    found |= {name: [s for part in compared for s in part[name]] for name in compared[0]}
    ratios = {}
    for way in WAYS[1:]:
        pairs = [a / b for a, b in zip(found[way], found[WAYS[0]], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        # The standard error of a median; quartiles, because a shared machine has outliers.
        error = 1.25 * (high - low) / 1.35 / len(pairs) ** 0.5
        interval = [middle - 1.96 * error, middle + 1.96 * error]
        ratios[way] = {"pairs": len(pairs), "median": middle, "interval_95": interval}
    write_json(
        RESULT,
        {
            "command": "python -m tests.faults.watching",
            **describe_machine(),
            "steps_a_block": STEPS,
            "ratios": ratios,
            "seconds": {name: statistics.median(values) for name, values in found.items()},
        },
    )


def main() -> None:
    """Measure and write, unless `--redraw` is given; renew the page."""
    if sys.argv[1:] != ["--redraw"]:
        measure_all()
    content = text(json.loads(RESULT.read_text()))
    put_between(ROOT / "docs" / "watching.md", BEGIN, END, content)
    print(content)


if __name__ == "__main__":
    main()
