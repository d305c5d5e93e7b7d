"""How much watching for stop signals slows a step: `python -m tests.faults.watching`.

Two ranks train ddp_launch's model. Blocks of steps with and without `StopAgreement.after` take
turns, so that a machine whose speed drifts favours neither. The launcher's own checks of its ranks
(fifty per second) run in both cases, and are not part of the difference.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.files import write_json
from common.group.collectives import gather_numbers
from common.group.stop import StopAgreement
from common.launch.ranks import Ranks
from common.machine import describe_machine
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.training.ddp import warm_up
from common.training.models import ModelOptions, build_model
from tests.pool import Pool, in_group

RESULT = Path(__file__).parent / "results" / "watching.json"
PARTS, BLOCKS, STEPS = 6, 600, 5


def measure(_ranks: Ranks) -> dict[str, list[float]]:
    """Seconds per step of each block on the slower rank, with and without watching."""
    set_determinism(**RunOptions().determinism)
    model = build_model(ModelOptions(), 1, 10, 8).train()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))
    warm_up(ddp, images[0], len(images))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stop, step = StopAgreement(), 0
    found: dict[str, list[float]] = {"watched": [], "unwatched": []}
    for block in range(BLOCKS):
        # The order within each pair of blocks alternates, so that neither always comes first.
        watched = block % 4 in (0, 3)
        start_s = time.perf_counter()
        for _ in range(STEPS):
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if watched:
                stop.after(step)
        mine = torch.tensor((time.perf_counter() - start_s) / STEPS)
        found["watched" if watched else "unwatched"].append(float(gather_numbers(mine).max()))
    stop.release()
    return found


def main() -> None:
    """Measure and write."""
    pool = Pool(2)
    parts = [pool.run(in_group, 2, measure)[0] for _ in range(PARTS)]
    pool.close()
    found = {name: [block for part in parts for block in part[name]] for name in parts[0]}
    ratios = [a / b for a, b in zip(found["watched"], found["unwatched"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    spread = (quartiles[2] - quartiles[0]) / 1.35  # robust against outliers on a shared machine
    result: dict[str, Any] = {
        "command": "python -m tests.faults.watching",
        **describe_machine(),
        "steps_a_block": STEPS,
        "median_ratio": statistics.median(ratios),
        "standard_error_of_the_median": 1.25 * spread / len(ratios) ** 0.5,
        "quartiles_of_the_ratio": quartiles,
        "pairs": len(ratios),
        "seconds_a_step": {name: statistics.median(values) for name, values in found.items()},
    }
    RESULT.parent.mkdir(exist_ok=True)
    write_json(RESULT, result)
    error = result["standard_error_of_the_median"]
    print(f"watched over unwatched: {result['median_ratio']:.4f}, standard error {error:.4f}")


if __name__ == "__main__":
    main()
