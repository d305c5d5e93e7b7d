"""Memory, time and bytes sent per step of DDP, ZeRO-2 and ZeRO-3 over 1, 2 and 4 ranks."""

import json
import os
import shlex
import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common import cli
from common.errors import STATUS_FINISHED, InputError
from common.figure import save_figure
from common.group.collectives import gather_to_rank_0
from common.group.devices import choose_device, synchronize
from common.group.process_group import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks, resolve
from common.run.plan import batch_size_of
from common.snapshots.shards import local_part
from common.terminal import mebibytes
from common.writing import write_json
from recipes.fsdp.memory import KINDS, HeapGrowth, count, held, saved
from recipes.fsdp.model import Transformer
from recipes.fsdp.parallel import ParallelOptions, make_adamw, make_mesh, parallelise
from recipes.fsdp.text import VOCABULARY
from recipes.fsdp.train import NAME, Config
from tools.comparison import in_turn, median
from tools.fresh import run_fresh

DEFAULTS = "--layers 8 --width 512 --heads 8 --global-batch-size 4 --precision fp32"
PROCESSES = (1, 2, 4)
STEPS = 5
KEPT = {"DDP": "", "ZeRO-2": "--no-reshard-after-forward", "ZeRO-3": "--reshard-after-forward"}
"""Options of the recipe; DDP is not one of its ways, and is built here."""
SENT = {"DDP": 2, "ZeRO-2": 2, "ZeRO-3": 3}
"""ZeRO, section 7: sizes of the model that a rank sends per step, times (ranks - 1) / ranks."""


def paper(way: str, ranks: int) -> float:
    """Share of one rank's parameters, gradients and optimizer state: ZeRO, section 5, in fp32."""
    return {"DDP": 1.0, "ZeRO-2": (1 + 3 / ranks) / 4, "ZeRO-3": 1 / ranks}[way]


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Some steps each, in processes of its own; the same global batch on every number of ranks.

    Raises:
        InputError: bf16, in which DDP would keep other things than FSDP2.
    """
    given = [*DEFAULTS.split(), *arguments]  # the last of two counts
    _, config = cli.parse(NAME, Config, given)
    if config.run.precision not in ("fp32", "fp64"):
        raise InputError("the comparison takes --precision fp32 or fp64")
    device = choose_device(config.run.device, Ranks())
    most = torch.cuda.device_count() if device.type == "cuda" else max(PROCESSES)
    variants = [f"{way} on {n}" for n in PROCESSES if n <= most for way in KEPT if n > 1]
    variants = ["DDP on 1", *variants]

    def run(name: str, number: int) -> dict[str, Any]:
        way, ranks = name.split(" on ")
        file = folder / f"{name}{number}.json"
        torchrun = ["--standalone", "--nproc-per-node", ranks, "-m", "recipes.fsdp.compare"]
        options = [*given, *shlex.split(KEPT[way])]
        run_fresh("torch.distributed.run", [*torchrun, file, way, *options])
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    runs = in_turn(variants, run, rounds)
    first = runs["DDP on 1"][0]
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    whole = sum(first[kind] for kind in KINDS[:3])
    batch_size = batch_size_of(config.optimizer)
    memory, speed = [], []
    for name, found in runs.items():
        way, ranks = name.split(" on ")[0], int(name.split(" on ")[1])
        last = found[-1]
        model_bytes = sum(last[kind] for kind in KINDS[:4])
        options = ParallelOptions(reshard_after_forward=way != "ZeRO-2")
        sizes = (1, 1, 1) if way == "DDP" else (1, ranks, 1)
        samples, context = batch_size // ranks, config.text.context
        said = count(sizes, options, config.model, samples, context, dtype, dtype)
        if way == "DDP":  # its gradients stay in buckets, and it gathers nothing
            said["peak"] = sum(said[kind] for kind in KINDS if kind != "gathered")
        memory.append(
            [
                name,
                *(mebibytes(last[kind]) for kind in KINDS[:4]),
                f"{model_bytes / whole:.2f}",
                f"{paper(way, ranks):.2f}",
                mebibytes(last["activations"]),
                mebibytes(median(found, "peak")),
                mebibytes(said["peak"]),
            ]
        )
        formula = SENT[way] * (ranks - 1) / ranks
        sent = median(found, "sent") / first["parameters"] if device.type == "cpu" else None
        speed.append(
            [
                name,
                f"{median(found, 'step_s'):.2f}",
                mebibytes(median(found, "sent")) if sent is not None else "not counted",
                f"{sent:.2f}" if sent is not None else "not counted",
                f"{formula:.2f}",
            ]
        )
    numbers = first["parameters"] // dtype.itemsize
    title = (
        f"A transformer of {numbers / 1e6:.1f} million parameters, {dtype}, global batch "
        f"{batch_size} x {config.text.context} tokens: memory of the rank that needs most. "
        "`gathered`: whole parameters that a rank still holds after its forward pass. `peak`: most "
        "at once, from the allocator. `counted`: the peak that `--dry-run` counts."
    )
    columns = [
        "ranks",
        *KINDS[:4],
        "these four, of one rank's",
        "ZeRO paper",
        "activations",
        "peak",
        "counted",
    ]
    tables = [{"title": title, "columns": columns, "rows": memory}]
    title = (
        f"Time per step, median of {STEPS} steps and {rounds} rounds in turn; bytes that a rank "
        "sends per step, from the kernel's counters of its TCP connections."
    )
    columns = ["ranks", "s/step", "sent", "sizes of the model", "ZeRO paper, with a ring"]
    tables.append({"title": title, "columns": columns, "rows": speed})
    return {"tables": tables, "runs": runs}


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Both tables as one, without the parts of the memory. See tools.bench.on_page."""
    memory, speed = result["tables"]
    shown = {
        "model state": (memory, "these four, of one rank's"),
        "by the paper": (memory, "ZeRO paper"),
        "peak": (memory, "peak"),
        "counted": (memory, "counted"),
        "s/step": (speed, "s/step"),
        "sent [model sizes]": (speed, "sizes of the model"),
        "by the paper (ring)": (speed, "ZeRO paper, with a ring"),
    }
    rows = [[row[0]] for row in memory["rows"]]
    for table, column in shown.values():
        place = table["columns"].index(column)
        for row, measured in zip(rows, table["rows"], strict=True):
            row.append(measured[place])
    title = f"{memory['title'].partition(':')[0]}: the rank that needs most."
    return [{"title": title, "columns": ["ranks", *shown], "rows": rows}]


def main() -> None:
    """Measure as one rank: FILE WAY [options of the recipe]. Rank 0 writes FILE."""
    file, way = Path(sys.argv[1]), sys.argv[2]
    _, config = cli.parse(NAME, Config, sys.argv[3:])
    ranks = resolve()
    torch.set_num_threads(config.run.cpu_threads)
    device = choose_device(config.run.device, ranks)
    with process_group(ranks, device, config.run.backend, config.run.timeout_s):
        found = train(way, config, ranks, device)
        every = gather_to_rank_0(found)
    if ranks.is_main:  # seconds are about the same on all ranks
        write_json(file, {key: max(one[key] for one in every) for key in found})


def train(way: str, config: Config, ranks: Ranks, device: torch.device) -> dict[str, float]:
    """Some steps: bytes by kind, seconds per step, and bytes that this rank sends per step."""
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    with torch.device("meta"):
        model = Transformer(config.model, VOCABULARY, config.parallel.recompute).to(dtype)
    if way != "DDP":
        mesh = make_mesh(device, (1, ranks.world_size, 1))
        parallelise(model, mesh, config.parallel)
    model.to_empty(device=device)
    for parameter in model.parameters():
        local_part(parameter)[0].normal_(0, 0.02)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if way == "DDP" else model
    optimizer = make_adamw(model, config.optimizer.lr, config.optimizer.weight_decay)
    samples = batch_size_of(config.optimizer, parts=ranks.world_size) // ranks.world_size
    tokens = torch.randint(0, VOCABULARY, (samples, config.text.context), device=device)

    def forward() -> torch.Tensor:
        return cross_entropy(ddp(tokens).transpose(1, 2), tokens)

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)

    finish(forward())  # DDP's buckets and FSDP2's buffers exist from now on
    kept, loss = saved(model, forward)
    whole = [p.nbytes for p in model.parameters() if not isinstance(p, DTensor)]
    loss.backward()
    found = {**held(model, optimizer), "activations": kept}
    found["gathered"] = sum(whole) if way != "DDP" else 0
    optimizer.step()
    optimizer.zero_grad()
    with HeapGrowth() as step:
        finish(forward())
    found["peak"] = found["parameters"] + found["optimizer"] + step.bytes
    if way == "DDP":  # its buckets hold the gradients between two steps, too
        found["peak"] += found["gradients"]
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(device)
    seconds, sent = [], 0
    for _ in range(STEPS):
        dist.barrier()
        before, start_s = sent_bytes(), time.perf_counter()
        finish(forward())
        seconds.append(time.perf_counter() - start_s)
        sent += sent_bytes() - before
    return {**found, "step_s": statistics.median(seconds), "sent": sent / STEPS}


def sent_bytes() -> int:
    """Bytes that this process has sent over its TCP connections so far.

    Source: Linux, include/uapi/linux/tcp.h, struct tcp_info, tcpi_bytes_sent.
    """
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed, or no TCP connection
            if not descriptor.readlink().name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            total += struct.unpack_from("=Q", info, 200)[0]
    return total


def draw(result: dict[str, Any], path: Path) -> None:
    """What a rank holds, by kind, beside the paper's formula; and seconds and bytes per step."""

    def plot(left: Any, right: Any) -> None:
        runs, names = result["runs"], list(result["runs"])
        first = runs["DDP on 1"][-1]
        whole = sum(first[kind] for kind in KINDS[:3]) / 2**20
        bottom = [0.0] * len(names)
        for kind in KINDS:
            sizes = [runs[name][-1][kind] / 2**20 for name in names]
            left.bar(names, sizes, bottom=bottom, label=kind)
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        shares = [paper(name.split(" on ")[0], int(name.split(" on ")[1])) for name in names]
        left.plot(names, [share * whole for share in shares], "k_", ms=28, label="ZeRO paper")
        peaks = [median(runs[name], "peak") / 2**20 for name in names]
        left.plot(names, peaks, "kx", label="peak of all tensors")
        left.set(ylabel="memory of a rank [MiB]", title="memory (the paper: without activations)")
        right.bar(names, [median(runs[name], "step_s") for name in names], color="lightgrey")
        right.set(ylabel="time of a step [s] (bars)", title="time and traffic")
        other = right.twinx()
        sent = [median(runs[name], "sent") / first["parameters"] for name in names]
        other.plot(names, sent, "ko", label="sent, counted")
        formula = [
            SENT[name.split(" on ")[0]] * (1 - 1 / int(name.split(" on ")[1])) for name in names
        ]
        other.plot(names, formula, "k_", ms=28, label="sent, ZeRO paper")
        other.set(ylabel="sent by a rank per step [sizes of the model]", ylim=(0, None))
        for axes in (left, other):
            axes.legend(fontsize=8)
        for axes in (left, right):
            axes.tick_params(axis="x", rotation=45)

    save_figure(path, plot, panels=2)


if __name__ == "__main__":
    main()
    end_process(STATUS_FINISHED)
