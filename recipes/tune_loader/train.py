"""Loading data fast: how many loading processes, measured on your own data.

Times a fixed number of samples with 0, 1, 2, ... loading processes until more of them bring no
gain. If there is a GPU, each number is timed with and without pinned memory. Recommends the
smallest number that no other number beats. Training recipes choose by the number of cores, or make
this measurement with `--num-workers auto`. Use it if `samples_per_s` of a training run is far below
the speed of the model alone. If the model is slower than loading, the number does not matter.

    make run RECIPE=tune_loader ARGS="--data imagefolder --data-path flower_photos"
    make image-run RECIPE=tune_loader DOCKER_ARGS=... ARGS=...     see docker/README.md
    srun -n 1 --cpus-per-task 16 python -m recipes tune_loader --data imagefolder --data-path DIR

The default (digits, which are in memory) takes about 3 s on 2 CPU cores and recommends 0.

Source: PyTorch, "torch.utils.data", Single- and Multi-process Data Loading, Memory Pinning.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from common import cli, log
from common.data.datasets import DataOptions, load_data
from common.data.loaders import make_loader
from common.data.stream import GlobalBatches
from common.data.workers import done, most_workers, recommend, sweep
from common.figure import save_figure
from common.group.devices import choose_device, device_in_words
from common.group.process_group import process_group
from common.hints import SHARED_MEMORY_HINT
from common.launch.ranks import Ranks
from common.manifest import describe_run
from common.option_rules import refuse_below
from common.output_folder import result_folder
from common.run.options import flatten
from common.run.plan import batch_size_of, refuse_size
from common.terminal import progress_bar, set_up_logs
from common.throughput import samples_per_s
from common.training import OptimizerOptions
from common.writing import write_json
from recipes.tune_loader.streams import make_item_loader, make_stream_loader

NAME = "tune_loader"


@dataclass(frozen=True)
class TuneOptions:
    """What is measured, and where the result goes."""

    output_dir: Path | None = None
    """Folder of the result. None: runs/tune_loader/UTC-TIME."""
    global_batch_size: int | None = None
    """Samples in a batch. None: as in the training recipes, 96 or less for a small data set."""
    samples: int = 4000
    """Samples timed for each setting [samples]. A smaller data set is loaded several times."""
    style: Literal["map", "stream", "items"] = "map"
    """Style of the data set. stream: the same batches from an iterable data set. items: the same
    samples without index and length. recipes/tune_loader/streams.py shows how both are sharded."""
    max_workers: int | None = None
    """Most loading processes to try [processes]. None: until two more bring no gain."""
    rounds: int = 3
    """Times that each setting is measured [rounds]; the median counts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that batches are copied to. auto: a GPU if there is one."""
    seed: int = 0
    """Seed of the order of samples and of the augmentation."""

    def __post_init__(self) -> None:
        refuse_below(self, seed=0, max_workers=0, global_batch_size=1, samples=1, rounds=1)


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    tune: TuneOptions = field(default_factory=TuneOptions)
    data: DataOptions = field(default_factory=DataOptions)

    def __post_init__(self) -> None:
        if self.data.num_workers is not None or not self.data.pin_memory:
            raise ValueError(
                "tune_loader measures --num-workers and --pin-memory: leave them out, and limit "
                "the processes that it tries with --max-workers"
            )


def measure_settings(config: Config, device: torch.device) -> tuple[dict[str, Any], str]:
    """Time every setting, and choose one.

    Returns:
        The result, with samples/s by kind of memory, processes and round; the data's fingerprint.
    """
    options = config.tune
    data = load_data(config.data, options.seed, Ranks())
    chosen_size = OptimizerOptions(global_batch_size=options.global_batch_size)
    size = batch_size_of(chosen_size, len(data.train))
    refuse_size(size, len(data.train))
    batches = GlobalBatches(len(data.train), [size], options.seed, 0)
    epoch, wanted = list(batches), -(-options.samples // size)
    timed = (epoch * -(-wanted // len(epoch)))[:wanted]
    makers = {"map": make_loader, "stream": make_stream_loader, "items": make_item_loader}
    make = makers[options.style]
    kinds = ("pinned", "pageable") if device.type == "cuda" else ("pageable",)
    found: dict[str, dict[int, list[float]]] = {kind: {} for kind in kinds}

    def measure(number: int) -> float:
        bar = progress_bar(options.rounds * len(kinds), unit="run", desc=f"{number} workers")
        for _ in range(options.rounds):
            for kind in kinds:
                load = partial(
                    make, data.train, timed, num_workers=number, pin_memory=kind == "pinned"
                )
                found[kind].setdefault(number, []).append(samples_per_s(load, device))
                bar.update()
        bar.close()
        return max(median_of(speeds)[number] for speeds in found.values())

    room, why_room = most_workers(data.train, size, 1)
    most = room if options.max_workers is None else min(room, options.max_workers)
    speeds = sweep(measure, most, len(os.sched_getaffinity(0)))
    if most == room and not done(speeds):
        log.info(f"{why_room}: no more are tried; {SHARED_MEMORY_HINT}")
    kind = max(found, key=lambda k: max(median_of(found[k]).values()))
    chosen, why = recommend(median_of(found[kind]))
    result = {
        "num_workers": chosen,
        "pin_memory": kind == "pinned",
        "why": why,
        "style": options.style,
        "global_batch_size": size,
        "samples": sum(map(len, timed)),
        "samples_per_s": found,
    }
    return result, data.fingerprint


def median_of(speeds: dict[int, list[float]]) -> dict[int, float]:
    """The median of the rounds, by number of processes."""
    return {number: statistics.median(rounds) for number, rounds in speeds.items()}


def plot(found: dict[str, Any], axes: Any) -> None:
    """Samples/s by number of processes; each round is a point."""
    for kind, speeds in found["samples_per_s"].items():
        middle = median_of(speeds)
        axes.plot([int(n) for n in middle], list(middle.values()), "o-", label=f"{kind} memory")
        for number, rounds in speeds.items():
            axes.plot([int(number)] * len(rounds), rounds, "k.", markersize=3)
    axes.axvline(found["num_workers"], color="tab:green", linestyle="--", label="recommended")
    axes.set(xlabel="loading processes", ylabel="samples/s", ylim=(0, None))
    axes.legend()


def train(config: Config, ranks: Ranks) -> None:
    """Measure in this one process, and write the result into `config.tune.output_dir`."""
    set_up_logs(ranks)
    options = config.tune
    device = choose_device(options.device, ranks)
    log.info(f"{NAME}: batches go to device {device_in_words(options.device, device)}")
    folder = result_folder(options.output_dir, NAME, "loader")
    chosen = {"output_dir": str(folder), "device": device.type}
    write_json(folder / "config.json", {**flatten(config), **chosen})
    torch.set_num_threads(1)
    with process_group(ranks, device, "auto", 600):
        found, fingerprint = measure_settings(config, device)
        write_json(folder / "manifest.json", describe_run([device], options.seed, fingerprint))
    write_json(folder / "loader.json", found)
    save_figure(folder / "loader.png", partial(plot, found))
    lines = [f"\n  {'workers':>8}  {'memory':>8}  {'samples/s':>10}  {'seconds':>8}"]
    for kind, speeds in found["samples_per_s"].items():
        for number, speed in median_of(speeds).items():
            seconds = found["samples"] / speed
            lines.append(f"  {number:>8}  {kind:>8}  {speed:>10,.0f}  {seconds:>8.2f}")
    pin = "--pin-memory" if found["pin_memory"] else "--no-pin-memory"
    advice = f"--num-workers {found['num_workers']}" + (f" {pin}" if device.type == "cuda" else "")
    lines += [f"\nrecommended: {advice} ({found['why']})", f"  {folder}/loader.json, loader.png"]
    log.info("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    cli.end_process(main())
