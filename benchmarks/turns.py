"""Training steps of two processes in which all variants take turns.

Each process holds a copy of the model for every variant and takes a few steps with each, in a new
random order each time. A disturbance of some seconds then slows down all variants equally, which
it would not if each variant had its own run.

    python -m benchmarks.turns PART CASE ROUNDS FILE    one of the two ranks (torchrun's variables)
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common.data.batches import DeviceBatches
from common.data.datasets import DataOptions, load_data
from common.data.loaders import rank_loaders
from common.errors import TrainingError
from common.group.collectives import gather
from common.group.process_group import process_group
from common.launch.process import end_process, run_rank
from common.launch.ranks import Ranks, resolve
from common.seeds import mixed_precision, seed_everything
from common.training.ddp import micro_batches, warm_up
from common.training.models import ModelOptions, prepare_model
from tools.fresh import fresh_environment

Hook = Callable[[dist.ProcessGroup | None, dist.GradBucket], torch.futures.Future[Tensor]]


@dataclass(frozen=True)
class Way:
    """How steps are taken."""

    hook: Hook | None = None
    """Averages gradients in place of DDP's all-reduce."""
    bucket_mb: float | None = None
    """Size of a bucket [MiB]. None: torch's, 1 for the first and 25 for the others."""
    accumulate: int = 1
    """Batches per step."""
    sent: float = 1.0
    """Share of the gradients' bytes that is sent."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model that replace those of the case."""
    precision: str = "fp32"


@dataclass(frozen=True)
class Case:
    """A model, and the ways to take steps with it: per round, each way has `turns` of `steps`."""

    model: ModelOptions
    data: DataOptions
    samples_a_rank: int
    turns: int
    steps: int
    ways: Mapping[str, Way]


def take_turns(case: Case, rounds: int, ranks: Ranks) -> dict[str, list[float]]:
    """Samples/s of both processes together for each way, one number per round."""
    torch.set_num_threads(1)
    device, order, names = torch.device("cpu"), torch.Generator(), list(case.ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    with process_group(ranks, device, "gloo", timeout_s=600):  # compiling can take minutes
        data = load_data(case.data, 0, ranks)
        streams: dict[int, Iterator[Any]] = {}
        for accumulate in {way.accumulate for way in case.ways.values()}:
            sizes = [case.samples_a_rank * accumulate] * ranks.world_size
            loader, _ = rank_loaders(
                data, case.data, sizes, 0, ranks.rank, device, torch.float32, Path()
            )
            streams[accumulate] = _endless(loader)
        copies = {}
        for name, way in case.ways.items():
            seed_everything(0)
            options = dataclasses.replace(case.model, **way.model)
            model = prepare_model(options, *data.sizes_for_model, torch.float32)
            ddp = DistributedDataParallel(
                torch.compile(model) if options.compile else model,
                bucket_cap_mb=way.bucket_mb,
                gradient_as_bucket_view=True,
            )
            if way.hook:
                ddp.register_comm_hook(None, way.hook)
            # Without communication, rank 0 must not send its BatchNorm buffers either.
            ddp.broadcast_buffers = way.hook is not noop_hook
            _, autocast, _ = mixed_precision(way.precision, device)
            warm_up(ddp, data.train[(0, 0)][0], case.samples_a_rank, autocast)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True)
            copies[name] = ddp, optimizer, autocast

        def spent_s(name: str) -> float:
            ddp, optimizer, autocast = copies[name]
            accumulate = case.ways[name].accumulate
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(case.steps):
                images, labels = next(streams[accumulate])
                for part, truth in micro_batches(ddp, (images, labels), accumulate):
                    with autocast:
                        loss = cross_entropy(ddp(part), truth)
                    (loss / accumulate).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return time.perf_counter() - start_s

        for number in range(rounds + 1):  # round 0 fills caches and is not counted
            total_s = dict.fromkeys(names, 0.0)
            for _ in range(case.turns):
                for place in torch.randperm(len(names), generator=order).tolist():
                    total_s[names[place]] += spent_s(names[place])
            for name in names if number else ():
                samples = case.turns * case.steps * case.samples_a_rank
                samples *= case.ways[name].accumulate
                found[name].append(sum(samples / each_s for each_s in gather(total_s[name])))
    return found


def _endless(loader: DeviceBatches) -> Iterator[Any]:
    while True:
        loader.keys.set_epoch(loader.keys.epoch + 1)
        yield from loader


def run_both(
    part: str, case: str, rounds: int, file: Path, address: str, hosts: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Run `take_turns` in two processes; what it returns.

    Args:
        part: the module of `benchmarks` that has the case.
        case: its name in CASES.
        rounds: as for `take_turns`.
        file: rank 0 writes the result there.
        address: of rank 0.
        hosts: network namespaces of the two processes; none: both run on this host.

    Raises:
        TrainingError: a process failed.
    """
    processes = []
    for rank in (0, 1):
        environment = fresh_environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0" if hosts else str(rank),
                "LOCAL_WORLD_SIZE": "1" if hosts else "2",
                "MASTER_ADDR": address,
                "MASTER_PORT": "29500",
                "CUDA_VISIBLE_DEVICES": "",
            }
        )
        command = ["ip", "netns", "exec", hosts[rank]] if hosts else []
        command += [sys.executable, "-P", "-m", __name__, part, case, str(rounds), str(file)]
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
        )
    said = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise TrainingError(f"{case}: {' '.join(said)[-800:]}")
    found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    """Run as one rank; rank 0 writes the result."""
    part, name, rounds, file = arguments
    case: Case = import_module(f"benchmarks.{part}").CASES[name]
    ranks = resolve()

    def body() -> None:
        found = take_turns(case, int(rounds), ranks)
        if ranks.is_main:
            Path(file).write_text(json.dumps(found))

    return run_rank(body, ranks)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
