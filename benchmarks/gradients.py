"""What averaging gradients costs a step, and in which pieces: every way in turn, in one process.

Two hosts (network namespaces of this machine, root) have a process each. It holds a copy of the
model for every way, and takes a few steps with each in an order that is drawn anew every round:
steps a second apart tell ways apart that runs of seconds, one after the other, do not.

    python -m benchmarks.gradients CASE ROUNDS FILE    one of the two, by torchrun's environment
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import limit
from common.comparison import fresh_environment, spread
from common.data import DataOptions, load_data, make_loaders
from common.ddp import average_in_bf16, warm_up
from common.errors import TrainingError
from common.figure import save_figure
from common.group import gather, process_group
from common.launch import end_process, run_rank
from common.models import ModelOptions, prepare_model
from common.ranks import Ranks, resolve
from common.record import progress_bar
from common.seeds import seed_everything
from tests.test_two_hosts import ADDRESSES, two_hosts

Hook = Callable[[dist.ProcessGroup | None, dist.GradBucket], torch.futures.Future[Tensor]]


def one_number(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP that averages a single number a step, and no gradients.

    What it costs is the wait for each other, which is left however little is sent.
    """
    if not bucket.is_last():
        return noop_hook(group, bucket)
    sent = dist.all_reduce(torch.zeros(1), group=group, async_op=True).get_future()
    return sent.then(lambda _: bucket.buffer())


ALONE = "no communication"
WAYS: dict[str, tuple[Hook | None, float | None]] = {
    ALONE: (noop_hook, None),
    "one number a step, no gradients": (one_number, None),
    "the default": (None, None),
    "bf16": (average_in_bf16, None),
    "`--bucket-mb 1`": (None, 1),
    "`--bucket-mb 100`": (None, 100),
    "bf16, `--bucket-mb 1`": (average_in_bf16, 1),
}
"""A hook in place of DDP's own, and the size of a bucket [MiB] in place of torch's 1, then 25."""

CONVNET, RESNET = "convnet, 8 px, 48 images a rank", "ResNet-18, 64 px, 32 images a rank"
WHOLE = [way for way in WAYS if "bucket" not in way]
CASES: dict[str, tuple[str, float | None, list[str]]] = {
    f"{CONVNET}, no limit": (CONVNET, None, WHOLE),  # its gradients are one bucket of 0.2 MB
    f"{RESNET}, no limit": (RESNET, None, WHOLE),
    f"{RESNET}, 1 Gbit/s": (RESNET, 1e9, list(WAYS)),
}
"""Model, the link's bandwidth each way [bit/s], and ways."""
MODELS: dict[str, tuple[ModelOptions, DataOptions, int, int, int]] = {
    CONVNET: (ModelOptions(), DataOptions(), 48, 10, 10),
    RESNET: (ModelOptions(model="resnet18"), DataOptions(image_size=64), 32, 2, 2),
}
"""Model, data, samples a rank, turns a round, and steps a turn."""


def take_turns(model_name: str, ways: list[str], rounds: int, ranks: Ranks) -> dict[str, Any]:
    """Seconds of a step with each way, by round: the mean of both ranks' own clocks."""
    torch.set_num_threads(1)
    model_options, data_options, samples, turns, steps = MODELS[model_name]
    device, order = torch.device("cpu"), torch.Generator()
    found: dict[str, list[float]] = {way: [] for way in ways}
    with process_group(ranks, device, "gloo", timeout_s=60):
        data = load_data(data_options, 0, ranks)
        batches, loader, _ = make_loaders(
            data, data_options, samples * ranks.world_size, 0, ranks, device, torch.float32, Path()
        )

        def endless() -> Iterator[Any]:
            while True:
                batches.set_epoch(batches.epoch + 1)
                yield from loader

        stream, copies = endless(), {}
        for way in ways:
            hook, bucket_mb = WAYS[way]
            seed_everything(0)
            ddp = DistributedDataParallel(
                prepare_model(model_options, data), bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=True,
            )  # fmt: skip
            if hook:
                ddp.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True)
            warm_up(ddp, loader.prepare(data.train[(0, 0)][0]), samples)
            copies[way] = ddp, optimizer

        def steps_s(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> float:
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(steps):
                images, labels = next(stream)
                cross_entropy(ddp(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return time.perf_counter() - start_s

        for number in range(rounds + 1):  # the first finds nothing in its place: not counted
            spent_s = dict.fromkeys(ways, 0.0)
            for _ in range(turns):
                for place in torch.randperm(len(ways), generator=order).tolist():
                    spent_s[ways[place]] += steps_s(*copies[ways[place]])
            for way in ways if number else ():
                found[way].append(sum(gather(spent_s[way])) / ranks.world_size / turns / steps)
    return {"step_s": found}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every case on two hosts."""
    runs: dict[str, Any] = {}
    with two_hosts() as names, progress_bar(len(CASES), 0, Ranks(), unit="case") as bar:
        for case, (_, bandwidth, _) in CASES.items():
            limit(names, bandwidth)
            processes, file = [], folder / "found.json"
            for rank, name in enumerate(names):
                environment = fresh_environment(
                    {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                     "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500",
                     "CUDA_VISIBLE_DEVICES": ""}
                )  # fmt: skip
                command = ["ip", "netns", "exec", name, sys.executable, "-P", "-m", __name__,
                           case, str(rounds), str(file)]  # fmt: skip
                processes.append(subprocess.Popen(command, env=environment, text=True,
                                                  stderr=subprocess.PIPE))  # fmt: skip
            said = [process.communicate()[1] for process in processes]
            if any(process.returncode for process in processes):
                raise TrainingError(f"{case}: {' '.join(said)[-800:]}")
            runs[case] = json.loads(file.read_text())
            bar.update()
    return {"tables": [table(runs, rounds)], "runs": runs}


def table(runs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The speed of each way over that without communication, by round."""
    rows = []
    for case, run in runs.items():
        alone = run["step_s"][ALONE]
        for way in CASES[case][2]:
            steps_s = run["step_s"][way]
            shares = [one / other for one, other in zip(alone, steps_s, strict=True)]
            rows.append([case, way, f"{1000 * statistics.median(steps_s):.1f}",
                         "1" if way == ALONE else spread(shares)])  # fmt: skip
    return {
        "title": "Two hosts with a process each take steps with every way in turn; median (least "
        f"to most) of {rounds} rounds. With no communication each takes its own.",
        "columns": ["model, link", "gradients", "a step [ms]", "speed over no communication"],
        "rows": rows,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Every round's speed over no communication, by way."""

    def plot(*panels: Any) -> None:
        for axes, (case, run) in zip(panels, result["runs"].items(), strict=True):
            alone = run["step_s"][ALONE]
            ways = CASES[case][2][1:]
            for place, way in enumerate(ways):
                shares = [a / s for a, s in zip(alone, run["step_s"][way], strict=True)]
                axes.plot(shares, [place] * len(shares), "o", alpha=0.5)
            axes.set_yticks(
                range(len(ways)), [way.replace("`", "") for way in ways], fontsize="small"
            )
            axes.invert_yaxis()
            axes.set(xlabel="speed over no communication", xlim=(0, 1.2))
            axes.set_title(case, fontsize="small")

    save_figure(path, plot, panels=len(CASES))


def main(arguments: list[str]) -> int:
    """One rank; rank 0 writes what both found."""
    case, rounds, file = arguments
    model, _, ways = CASES[case]
    ranks = resolve()

    def body() -> None:
        found = take_turns(model, ways, int(rounds), ranks)
        if ranks.is_main:
            Path(file).write_text(json.dumps(found))

    return run_rank(body, ranks)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
