"""What travels less is worth more on a slower network: two hosts with a limited link (root).

The hosts are network namespaces of this machine, a process each, and the link between them is held
to a bandwidth by the kernel's token bucket (tc-tbf). The alpha-beta model (a message of n bytes
takes alpha + n / bandwidth) is fitted without a limit, and drawn beside what is measured.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH",
section 3; Linux, tc-tbf(8).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.comparison import fresh_environment, in_turn, median, spread
from common.errors import TrainingError
from common.figure import save_figure
from common.models import ModelOptions, build_model
from tests.test_two_hosts import ADDRESSES, two_hosts

BANDWIDTHS = {"no limit": None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Of the link, each way [bit/s]."""
BATCH = 96
SETTINGS: dict[str, list[str]] = {
    "the default": [],
    "bf16": ["--gradient-compression", "bf16"],
    "bf16, 2 x batch": ["--gradient-compression", "bf16", "--global-batch-size", str(2 * BATCH),
                        "--accumulate", "2", "--lr", "0.2"],
}  # fmt: skip
ALONE = "no communication"
EPOCHS = 15


def run_on_both(names: Sequence[str], setting: str, folder: Path) -> dict[str, Any]:
    """Train on both hosts; the summary. With no communication each trains its half by itself.

    Raises:
        TrainingError: a run failed.
    """
    processes, environment = [], fresh_environment({"CUDA_VISIBLE_DEVICES": ""})
    for node, name in enumerate(names):
        options = ["--epochs", str(EPOCHS), "--output-dir", str(folder)]
        if setting == ALONE:
            options[-1] += str(node)
            options += ["--nproc", "1", "--global-batch-size", str(BATCH // 2)]
        else:
            options += ["--nproc", "1", "--nnodes", "2", "--node-rank", str(node),
                        "--master-addr", ADDRESSES[0], "--master-port", "29500",
                        *SETTINGS[setting]]  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "recipes", "ddp_launch"]
        processes.append(
            subprocess.Popen([*command, *options], env=environment, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )  # fmt: skip
    said = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise TrainingError(f"{setting}: {' '.join(said)[-800:]}")
    paths = [Path(f"{folder}{node}") for node in (0, 1)] if setting == ALONE else [folder]
    found = [json.loads((path / "summary.json").read_text()) for path in paths]
    summary: dict[str, Any] = found[0]
    return {**summary, "samples_per_s": sum(one["samples_per_s"] for one in found)}


def limit(names: Sequence[str], bits_per_s: float | None) -> None:
    """Hold the link to a bandwidth, each way."""
    for name in names:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
        if bits_per_s:
            rate = ["rate", f"{bits_per_s:.0f}bit", "burst", "128kb", "latency", "100ms"]
            subprocess.run([*tc, "add", "dev", "eth0", "root", "tbf", *rate], check=True)


def parameter_bytes() -> int:
    """Of the model's gradients in fp32."""
    model = build_model(ModelOptions(), 1, 10, 8)
    return sum(parameter.nbytes for parameter in model.parameters())


def step_s(
    compute_s: float, alpha_s: float, sent_bytes: float, bits_per_s: float | None, ranks: int = 2
) -> float:
    """Seconds of a step by the alpha-beta model, nothing overlapped.

    Args:
        compute_s: of a step without communication.
        alpha_s: of one message, however small; a ring all-reduce has 2 (ranks - 1) in a row.
        sent_bytes: of all gradients.
        bits_per_s: of each rank's link, each way. None: without limit.
        ranks: in the ring.
    """
    volume = 2 * (ranks - 1) / ranks * sent_bytes * 8
    return compute_s + 2 * (ranks - 1) * alpha_s + (volume / bits_per_s if bits_per_s else 0.0)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every setting at every bandwidth, in turn."""
    cases = [f"{name}: {setting}" for name in BANDWIDTHS for setting in SETTINGS]
    with two_hosts() as names:

        def one(case: str, number: int) -> dict[str, Any]:
            bandwidth, setting = case.split(": ")
            limit(names, BANDWIDTHS[bandwidth])
            run = run_on_both(names, setting, folder / f"{number} {case}".replace("/", " "))
            return {key: run[key] for key in ("samples_per_s", "train_loss", "val_accuracy")}

        runs = in_turn([f"no limit: {ALONE}", *cases], one, rounds)
    return {"tables": [measured(runs, rounds), on_paper()], "runs": runs,
            "parameter_bytes": parameter_bytes()}  # fmt: skip


def ratios(runs: dict[str, Any], case: str, other: str) -> str:
    """Samples/s over another case's of the same round: median (least to most)."""
    pairs = zip(runs[case], runs[other], strict=True)
    return spread([one["samples_per_s"] / theirs["samples_per_s"] for one, theirs in pairs])


def measured(runs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The table of what was measured."""
    alone = f"no limit: {ALONE}"
    rows = [["", ALONE, f"{median(runs[alone], 'samples_per_s'):,.0f}", "", "1", "", ""]]
    for name in BANDWIDTHS:
        default = f"{name}: {next(iter(SETTINGS))}"
        for setting in SETTINGS:
            case = f"{name}: {setting}"
            rows.append([name, setting, f"{median(runs[case], 'samples_per_s'):,.0f}",
                         "1" if case == default else ratios(runs, case, default),
                         ratios(runs, case, alone), f"{median(runs[case], 'train_loss'):.4f}",
                         f"{median(runs[case], 'val_accuracy'):.4f}"])  # fmt: skip
    return {
        "title": f"ddp_launch on two hosts with a process each, {EPOCHS} epochs of digits; median "
        f"(least to most) of {rounds} rounds in turn. With no communication each host trains half "
        "of the batch by itself.",
        "columns": ["link", "setting", "samples/s", "over the default", "over no communication",
                    "train_loss at the end", "val_accuracy"],
        "rows": rows,
    }  # fmt: skip


PAPER = {"compute_s": 256 / 3000, "alpha_s": 10e-6, "parameter_bytes": 4 * 25.6e6}
"""ResNet-50 at 256 images a GPU and 3,000 images/s; 10 us a message; fp32 gradients."""


def on_paper() -> dict[str, Any]:
    """What the model says of more GPUs than we have: a prediction, nothing of it was measured."""
    rows = []
    for bits_per_s, link in ((1e10, "10 Gbit/s"), (1e11, "100 Gbit/s"), (4e11, "400 Gbit/s")):
        for share, setting in ((1, "fp32"), (0.5, "bf16")):
            cells = []
            for gpus in (8, 64, 512):
                compute, sent = PAPER["compute_s"], PAPER["parameter_bytes"] * share
                alone = step_s(compute, PAPER["alpha_s"], sent, bits_per_s, gpus)
                # At best all of it goes on during the backward pass, two thirds of a step.
                hidden = max(compute, compute / 3 + alone - compute)
                cells.append(f"{compute / alone:.2f} to {compute / hidden:.2f}")
            rows.append([link, setting, *cells])
    return {
        "title": "**Prediction, not measured:** efficiency of ResNet-50 (102 MB of gradients, 256 "
        "images a GPU, 85 ms of computing a step) in one ring with a link of so much a GPU and 10 "
        "us a message, from nothing overlapped to all that the backward pass can hide.",
        "columns": ["link of a GPU", "gradients", "8 GPUs", "64 GPUs", "512 GPUs"],
        "rows": rows,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Efficiency by bandwidth: measured, and as the model has it from the runs without a limit."""
    runs = result["runs"]
    alone = median(runs[f"no limit: {ALONE}"], "samples_per_s")

    def plot(axes: Any) -> None:
        limits = [bits for bits in BANDWIDTHS.values() if bits]
        reach = [min(limits) * 10 ** (place / 10) for place in range(-5, 26)]
        for number, setting in enumerate(SETTINGS):
            batch = BATCH * (2 if "2 x" in setting else 1)
            compute = batch / alone
            free = batch / median(runs[f"no limit: {setting}"], "samples_per_s")
            alpha = (free - compute) / 2
            sent = result["parameter_bytes"] * (0.5 if "bf16" in setting else 1)
            predicted = [compute / step_s(compute, alpha, sent, bits) for bits in reach]
            axes.plot(reach, predicted, f"C{number}--")
            for name, bits in BANDWIDTHS.items():
                found = [r["samples_per_s"] / alone for r in runs[f"{name}: {setting}"]]
                place = bits or reach[-1]
                axes.plot([place] * len(found), found, f"C{number}o", alpha=0.5,
                          label=None if bits else setting)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks([*limits, reach[-1]], ["1 Gbit/s", "100 Mbit/s", "no limit"])
        axes.minorticks_off()
        axes.set(xlabel="link, each way (dashed: alpha-beta model)", ylim=(0, None),
                 ylabel="speed over that without communication")  # fmt: skip
        axes.legend()

    save_figure(path, plot)
