"""DataParallel beside DistributedDataParallel: the same training on the same devices."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import cli
from common.figure import save_figure
from common.group.devices import choose_devices
from common.reading import read_metrics
from common.run.options import flatten
from common.terminal import mebibytes
from recipes.dp_resnet50.train import NAME, Config
from tools.comparison import in_turn, median, run_recipe, visible_devices


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Train by both, two epochs each unless `--max-steps` says otherwise."""
    arguments = ["--max-steps", "28", *arguments]  # the last of two counts
    _, config = cli.parse(NAME, Config, arguments)
    devices = choose_devices(config.parallel.device_ids, config.run.device)
    shared = as_arguments(config, leave_out={"device_ids", "output_dir", "resume"})
    gpus = [str(device.index) for device in devices if device.type == "cuda"]
    subset = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if gpus else {}
    ddp = [*shared, "--nproc", str(len(devices))]

    def run(name: str, n: int) -> dict[str, Any]:
        own = folder / f"{name}{n}"
        if name == "DataParallel":
            found = run_recipe(NAME, arguments, own)
        else:
            found = run_recipe("ddp_launch", ddp, own, subset)
        return {**found, "utilization": utilization(own)}

    runs = in_turn(["DataParallel", "DistributedDataParallel"], run, rounds)
    speed = {name: median(found, "samples_per_s") for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        rows.append(
            [
                name,
                found[-1]["world_size"],
                f"{speed[name]:,.0f}",
                f"{speed[name] / speed['DistributedDataParallel']:.2f}",
                ", ".join(map(mebibytes, found[-1]["peak_memory_bytes"])),
                found[-1]["utilization"],
            ]
        )
    alone = "" if len(devices) > 1 else ": one device, on which DataParallel replicates nothing"
    title = (
        f"`{config.model.model}` on {', '.join(map(str, devices))}{alone}; "
        f"median of {rounds} runs in turn."
    )
    columns = [
        "parallelised by",
        "processes",
        "samples/s",
        "speed ratio to DDP",
        "peak memory of each device",
        "utilisation of the GPUs",
    ]
    return {"tables": [{"title": title, "columns": columns, "rows": rows}], "runs": runs}


def utilization(folder: Path) -> str:
    """The mean of a run's log lines."""
    name = "gpu_utilization_percent"
    found = [line[name] for line in read_metrics(folder) if name in line]
    return f"{fmean(found):.0f} %" if found else "not sampled"


def as_arguments(config: Any, leave_out: set[str]) -> list[str]:
    """The command line that gives `config`, for another recipe with the same groups."""
    arguments = []
    for name, value in flatten(config).items():
        option = name.replace("_", "-")
        if name in leave_out or value is None:
            continue
        if isinstance(value, list | tuple):
            arguments += [f"--{option}", *map(str, value)]
        elif isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed, and the memory of each device."""

    def plot(left: Any, right: Any) -> None:
        for place, (name, runs) in enumerate(result["runs"].items()):
            speeds = [run["samples_per_s"] for run in runs]
            left.plot([place] * len(speeds), speeds, "o", label=name)
            peaks = [peak / 2**20 for peak in runs[-1]["peak_memory_bytes"]]
            places = [device + 0.4 * place for device in range(len(peaks))]
            right.bar(places, peaks, width=0.35, label=name)
        left.set(xticks=[], ylabel="samples/s", ylim=(0, None), title="speed, every run")
        right.set(xlabel="device", ylabel="peak memory [MiB]", title="memory")
        left.legend()
        right.legend()

    save_figure(path, plot, panels=2)
