"""The cost of averaging gradients on slow and fast links, and the gain of sending less.

Two hosts (network namespaces of this machine, needs root) run one process each. The kernel's token
bucket (tc-tbf) limits the bandwidth of the link between them. The figure also shows the alpha-beta
model (a message of n bytes takes alpha + n / bandwidth), fitted to the runs without a limit.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH",
section 3; Linux, tc-tbf(8).
"""

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from benchmarks.turns import Case, Way, run_both
from common.data.datasets import DataOptions
from common.figure import save_figure
from common.terminal import progress_bar
from common.training.ddp import average_in_bf16
from common.training.models import ModelOptions, build_model
from tests.helpers.hosts import ADDRESSES, limit, two_hosts
from tools.comparison import ratios, run_recipe, spread


def one_number(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP that averages one number per step, and no gradients.

    Its cost is the time that the ranks wait for each other, however little they send.
    """
    if not bucket.is_last():
        return noop_hook(group, bucket)
    sent = dist.all_reduce(torch.zeros(1), group=group, async_op=True).get_future()
    return sent.then(lambda _: bucket.buffer())


DEFAULT, BF16, BF16_2 = "the default", "bf16", "bf16, 2 x batch"
ALONE, ALONE_2 = "no communication", "no communication, 2 x batch"
WAYS = {
    ALONE: Way(noop_hook, sent=0.0),
    "one number, no gradients": Way(one_number, sent=0.0),
    DEFAULT: Way(),
    BF16: Way(average_in_bf16, sent=0.5),
    BF16_2: Way(average_in_bf16, accumulate=2, sent=0.5),
    ALONE_2: Way(noop_hook, accumulate=2, sent=0.0),
    "buckets of 1 MiB": Way(bucket_mb=1),
    "buckets of 100 MiB": Way(bucket_mb=100),
}
CONVNET, RESNET = "convnet, 8 px, 48 images a rank", "ResNet-18, 64 px, 32 images a rank"
CASES = {
    CONVNET: Case(  # its gradients are one bucket
        ModelOptions(),
        DataOptions(),
        48,
        turns=6,
        steps=10,
        ways={name: way for name, way in WAYS.items() if not way.bucket_mb},
    ),
    RESNET: Case(
        ModelOptions(model="resnet18"),
        DataOptions(image_size=64),
        32,
        turns=2,
        steps=2,
        ways={name: way for name, way in WAYS.items() if way.accumulate == 1},
    ),
}
LINKS = {"no limit": None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Bandwidth in each direction [bit/s]."""
TRIED = {CONVNET: ("no limit", "1 Gbit/s", "100 Mbit/s"), RESNET: ("no limit", "1 Gbit/s")}
BATCH = 96
LOSSES = {
    DEFAULT: ["--global-batch-size", str(BATCH)],
    BF16: ["--global-batch-size", str(BATCH), "--gradient-compression", "bf16"],
    BF16_2: [
        "--global-batch-size",
        str(2 * BATCH),
        "--gradient-compression",
        "bf16",
        "--accumulate",
        "2",
        "--lr",
        "0.2",
    ],
}
"""The convnet's ways as options of ddp_launch, to see their effect on the loss."""
EPOCHS = 15


def parameter_bytes(case: Case) -> int:
    """Size of the model's gradients in fp32 [bytes]."""
    model = build_model(case.model, 1, 10, case.data.image_size or 8)
    return sum(parameter.nbytes for parameter in model.parameters())


def step_s(compute_s: float, alpha_s: float, sent_bytes: float, bits_per_s: float | None) -> float:
    """Seconds of a step of two ranks by the alpha-beta model, without overlap.

    Args:
        compute_s: a step without communication.
        alpha_s: one message, however small; a ring all-reduce has two in a row.
        sent_bytes: all gradients.
        bits_per_s: each rank's link, in each direction. None: no limit.
    """
    return compute_s + 2 * alpha_s + (8 * sent_bytes / bits_per_s if bits_per_s else 0.0)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every way on every link, and the final loss of a whole run with each."""
    runs: dict[str, dict[str, Any]] = {name: {} for name in CASES}
    pairs = [(name, link) for name, links in TRIED.items() for link in links]
    total = len(pairs) + len(LOSSES)
    with two_hosts() as hosts, progress_bar(total, unit="run") as bar:
        for name, link in pairs:
            limit(hosts, LINKS[link])
            runs[name][link] = run_both(
                "network", name, rounds, folder / "found.json", ADDRESSES[0], hosts
            )
            bar.update()
        losses = {}
        for way, options in LOSSES.items():
            found = run_recipe(
                "ddp_launch",
                ["--nproc", "2", "--epochs", str(EPOCHS), *options],
                folder / way,
                {"CUDA_VISIBLE_DEVICES": ""},
            )
            losses[way] = {key: found[key] for key in ("steps", "train_loss", "val_accuracy")}
            bar.update()
    sizes = {name: parameter_bytes(case) for name, case in CASES.items()}
    return {
        "tables": [measured(runs, rounds), at_the_end(losses)],
        "runs": runs,
        "losses": losses,
        "parameter_bytes": sizes,
    }


def alone(way: str) -> str:
    """The way without communication that `way` is compared with."""
    return ALONE if WAYS[way].accumulate == 1 else ALONE_2


def measured(runs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The table of speeds."""
    rows = [
        [
            name,
            link,
            way,
            f"{statistics.median(run[way]):,.0f}",
            "1" if way == DEFAULT else spread(ratios(run[way], run[DEFAULT])),
            "1" if way == alone(way) else spread(ratios(run[way], run[alone(way)])),
        ]
        for name, links in runs.items()
        for link, run in links.items()
        for way in run
    ]
    return {
        "title": "Two hosts with a process each take steps with every way in turn; median (least "
        f"to most) of {rounds} rounds. With no communication each takes its own.",
        "columns": [
            "model",
            "link",
            "gradients",
            "samples/s",
            "over the default",
            "over no communication",
        ],
        "rows": rows,
    }


def at_the_end(losses: dict[str, Any]) -> dict[str, Any]:
    """The table of losses."""
    return {
        "title": f"What it does to the loss: {EPOCHS} epochs of ddp_launch on 2 processes.",
        "columns": ["gradients", "steps", "train_loss at the end", "val_accuracy"],
        "rows": [
            [way, str(end["steps"]), f"{end['train_loss']:.4f}", f"{end['val_accuracy']:.4f}"]
            for way, end in losses.items()
        ],
    }


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each model and link, and the losses."""
    shown = (BF16, BF16_2, ALONE)
    rows, rounds = [], 0
    for name, links in result["runs"].items():
        for link, run in links.items():
            speed, rounds = f"{statistics.median(run[DEFAULT]):,.0f}", len(run[DEFAULT])
            cells = [spread(ratios(run[way], run[DEFAULT])) if way in run else "" for way in shown]
            rows.append([f"{name.split(',')[0]}, {link}", speed, *cells])
    speeds = {
        "title": f"Two hosts with one process each ({CONVNET}; {RESNET}): samples/s over the "
        f"default's, median (least to most) of {rounds} rounds.",
        "columns": ["model, link", "the default [samples/s]", *shown],
        "rows": rows,
    }
    return [speeds, at_the_end(result["losses"])]


def draw(result: dict[str, Any], path: Path) -> None:
    """Efficiency by bandwidth: measured, and predicted from the runs without a limit."""

    def plot(*panels: Any) -> None:
        for axes, (name, case) in zip(panels, CASES.items(), strict=True):
            plot_case(axes, case, result["runs"][name], result["parameter_bytes"][name])
            axes.set_title(name)

    def plot_case(axes: Any, case: Case, links: dict[str, Any], gradient_bytes: int) -> None:
        limits = [bits for link in links if (bits := LINKS[link])]
        reach = [min(limits) * 10 ** (place / 10) for place in range(-5, 26)]
        ways = [way for way in case.ways if way != alone(way)]
        for number, way in enumerate(ways):
            samples = case.samples_a_rank * WAYS[way].accumulate * 2
            alone_s, free_s = (
                samples / statistics.median(links["no limit"][name]) for name in (alone(way), way)
            )
            alpha_s, sent = (free_s - alone_s) / 2, gradient_bytes * WAYS[way].sent
            predicted = [alone_s / step_s(alone_s, alpha_s, sent, bits) for bits in reach]
            axes.plot(reach, predicted, f"C{number}--")
            for link, run in links.items():
                shares = ratios(run[way], run[alone(way)])
                place = [LINKS[link] or reach[-1]] * len(shares)
                label = None if LINKS[link] else way.replace("`", "")
                axes.plot(place, shares, f"C{number}o", alpha=0.5, label=label)
        axes.set_xscale("log")
        axes.set_xticks([*limits, reach[-1]], [*list(links)[1:], "no limit"])
        axes.minorticks_off()
        axes.set(
            xlabel="link, each way (dashed: alpha-beta model)",
            ylim=(0, None),
            ylabel="speed over that without communication",
        )
        axes.legend()

    save_figure(path, plot, panels=len(CASES))
