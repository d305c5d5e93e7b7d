"""How much watching itself slows a run's steps: `python -m tests.faults.watching_compute`.

Two ranks train a copy of ddp_launch's model whose computing time is measured, and one that is not,
in blocks that take turns (as in `watching`). All the while a thread looks at the rank, as in a run.
It would disturb both copies equally, so one look of it is timed by itself; there is one per second,
and every 15 s one that also puts off faulthandler's stack.
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

from common.files import write_json
from common.group.collectives import gather_numbers
from common.launch.ranks import Ranks
from common.machine import describe_machine
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.training.ddp import warm_up
from common.training.models import ModelOptions, build_model
from common.watch.record import Watch, stop
from common.watch.stragglers import ComputeTime
from tests.pool import Pool, in_group

RESULT = Path(__file__).parent / "results" / "watching_compute.json"
PARTS, BLOCKS, STEPS = 6, 600, 5


def measure(ranks: Ranks, folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each block on the slower rank, and seconds per look."""
    set_determinism(**RunOptions().determinism)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))
    clock, copies = ComputeTime(torch.device("cpu")), []
    for watched in (False, True):
        model = build_model(ModelOptions(), 1, 10, 8).train()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        warm_up(ddp, images[0], len(images))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        copies.append((ddp, optimizer))
        if watched:
            clock.follow(ddp, optimizer)
    progress = SimpleNamespace(step=0)
    watch = Watch(folder, ranks.rank, {"world_size": 2}, 60.0, lambda: progress.step)
    found: dict[str, list[float]] = {"watched": [], "unwatched": [], "look": []}
    for block in range(BLOCKS):
        # The order within each pair of blocks alternates, so that neither always comes first.
        watched = block % 4 in (0, 3)
        ddp, optimizer = copies[watched]
        start_s = time.perf_counter()
        for _ in range(STEPS):
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if watched:
                clock.end_step()
                if progress.step % 10 == 0:
                    clock.halves()
                clock.start()
        mine = torch.tensor((time.perf_counter() - start_s) / STEPS)
        found["watched" if watched else "unwatched"].append(float(gather_numbers(mine).max()))
    for _ in range(20):
        progress.step += 1
        start_s = time.perf_counter()
        os.fstat(watch._stacks.fileno())
        watch._look(asked=False)
        found["look"].append(time.perf_counter() - start_s)
    stop()
    return found


def main() -> None:
    """Measure and write."""
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        parts = [pool.run(in_group, 2, measure, Path(folder))[0] for _ in range(PARTS)]
    pool.close()
    found = {name: [block for part in parts for block in part[name]] for name in parts[0]}
    ratios = [a / b for a, b in zip(found["watched"], found["unwatched"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    error = 1.25 * (quartiles[2] - quartiles[0]) / 1.35 / len(ratios) ** 0.5
    middle = statistics.median(ratios)
    write_json(
        RESULT,
        {
            "command": "python -m tests.faults.watching_compute",
            **describe_machine(),
            "steps_a_block": STEPS,
            "pairs": len(ratios),
            "median_ratio": middle,
            "interval_95": [middle - 1.96 * error, middle + 1.96 * error],
            "seconds": {name: statistics.median(values) for name, values in found.items()},
        },
    )
    print(f"watched over unwatched: {middle:.4f}, 95 % +- {1.96 * error:.4f}")


if __name__ == "__main__":
    main()
