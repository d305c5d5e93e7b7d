"""Check the network before a long run: do all ranks meet, how fast is it, do the clocks agree?

Every rank joins the group as it would for training. Then all ranks sum tensors of growing size,
rank 0 exchanges a tensor with every other host, and clocks are compared. Use it on a new cluster,
after a change of its network, or to find the slow node. It does not measure training speed.

    make run RECIPE=check_network                              one machine
    make slurm-check ARGS="--partition=gpu"                    two nodes of a Slurm cluster
    srun python -m recipes check_network                       every task of an allocation

The default takes about 5 s on 2 CPU cores.

Source: NCCL tests, "Performance reported by NCCL tests" (algorithm and bus bandwidth).
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_STARTED_S = time.monotonic()

if not __package__:  # started as a file: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from common import cli, log
from common.errors import PeerError, TrainingError
from common.group.collectives import agreed, broadcast, gather
from common.group.devices import choose_backend, choose_device, device_in_words, synchronize
from common.group.interfaces import interface_towards
from common.group.process_group import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.manifest import describe_run
from common.output_folder import result_folder
from common.run.options import flatten
from common.terminal import set_up_logs
from common.writing import write_json
from recipes.check_network.clocks import clock_offset_s
from recipes.check_network.report import report

NAME = "check_network"


@dataclass(frozen=True)
class CheckOptions:
    """What is measured, and where the result is written."""

    output_dir: Path | None = None
    """Folder for the result. None: runs/check_network/UTC-TIME."""
    largest: int = 64
    """Size of the largest tensor [MiB]."""
    rounds: int = 5
    """Measurements per tensor; the median counts."""
    max_skew_s: float = 1.0
    """Largest allowed difference between clocks [s]. Larger ones mix up the order of the logs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. auto: a GPU where there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the process group. auto: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 60.0
    """Time after which a rank gives up waiting for the other ranks [s]."""

    def __post_init__(self) -> None:
        for name in ("largest", "rounds", "max_skew_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0")


@dataclass(frozen=True)
class Config:
    """All options; a group means the same in every recipe."""

    check: CheckOptions = field(default_factory=CheckOptions)


def median_s(operation: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Median time of `operation` [s], after one warm-up round. Every rank calls it."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        synchronize(device)
        start_s = time.perf_counter()
        operation()
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def all_reduce_speeds(options: CheckOptions, device: torch.device) -> list[dict[str, float]]:
    """Time and bandwidth of a sum over all ranks, for tensors of growing size.

    The bus bandwidth is what each rank's link carries with the best possible algorithm for n ranks:
    2 (n - 1) / n times the bytes, divided by the time.
    """
    world_size, found = dist.get_world_size(), []
    for size in sorted({2**20, 8 * 2**20, options.largest * 2**20}):
        tensor = torch.zeros(size // 4, device=device)
        seconds = median_s(lambda t=tensor: dist.all_reduce(t), options.rounds, device)  # type: ignore[misc]
        bus = size * 2 * (world_size - 1) / world_size / seconds
        found.append({"bytes": size, "seconds": seconds, "bus_bytes_per_s": bus})
    return found


def link_speed(peer: int, options: CheckOptions, device: torch.device) -> float:
    """Bandwidth from rank 0 to `peer` and back [bytes/s]. Every rank calls it."""
    if dist.get_backend() == "gloo":  # it sends between CPUs only
        device = torch.device("cpu")
    tensor = torch.zeros(options.largest * 2**18, device=device)
    rank = dist.get_rank()

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        elif rank == peer:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    seconds = median_s(there_and_back, options.rounds, device)
    return 2 * tensor.nbytes / broadcast(seconds)


def train(config: Config, ranks: Ranks) -> None:
    """Check as one rank; rank 0 writes the result into `config.check.output_dir`.

    Raises:
        InputError: the ranks do not meet, or the folder cannot be used.
        TrainingError: the clocks are too far apart.
    """
    options = config.check
    set_up_logs(ranks)
    device = choose_device(options.device, ranks)
    log.info(
        f"{NAME}: world_size {ranks.world_size} (launcher: {ranks.launcher}), "
        f"device {device_in_words(options.device, device)}"
    )
    with process_group(ranks, device, options.backend, options.timeout_s):
        met_s = max(gather(time.monotonic() - _STARTED_S))
        with agreed():
            folder = result_folder(options.output_dir, NAME, "network") if ranks.is_main else None
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(ranks.master_addr)
        hosts = gather((socket.gethostname(), interface, str(device)))
        first_of = {host: rank for rank, (host, _, _) in reversed(list(enumerate(hosts)))}
        speeds = all_reduce_speeds(options, device)
        links = {}
        for host, rank in first_of.items():
            if rank != 0:
                offset_s, bound_s = clock_offset_s(rank)
                links[host] = {
                    "bytes_per_s": link_speed(rank, options, device),
                    "clock_ahead_s": offset_s,
                    "within_s": bound_s,
                }
        manifest = describe_run([device], 0, "none")
        backend = choose_backend(options.backend, device)
    found = {
        "met_after_s": met_s,
        "backend": backend,
        "ranks": hosts,
        "all_reduce": speeds,
        "links_of_rank_0": links,
    }
    if folder:
        chosen = {"output_dir": str(folder), "device": device.type, "backend": backend}
        write_json(folder / "config.json", {**flatten(config), **chosen})
        write_json(folder / "manifest.json", manifest)
        write_json(folder / "network.json", found)
        log.info(report(found))
        log.info(f"  {folder}/network.json")
    for host, link in links.items():
        if abs(link["clock_ahead_s"]) - link["within_s"] <= options.max_skew_s:
            continue
        if not ranks.is_main:
            raise PeerError("the clocks are too far apart: see rank 0")
        raise TrainingError(
            f"the clock of {host} differs by {link['clock_ahead_s']:+.3f} s from the clock of "
            f"{hosts[0][0]}: let both use one time server (chronyc tracking), or give a larger "
            "--max-skew-s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    end_process(main())
