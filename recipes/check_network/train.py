"""The network between the ranks, before a long run is wasted: who meets, how fast, whose clock.

Every rank joins the group as it would for training; then all sum tensors of growing size, rank 0
exchanges one with every other host, and clocks are compared. Use it on a new cluster, after a
change of its network, or to find the slow node; it says nothing of how fast a model trains.

    make run RECIPE=check_network                              one machine
    make slurm-check ARGS="--partition=gpu"                    two nodes of a Slurm cluster
    srun python -m recipes check_network                       every task of an allocation

The default takes about 5 s on 2 CPU cores.

Source: NCCL tests, "Performance reported by NCCL tests" (algorithm and bus bandwidth); Mills 1991,
"Internet Time Synchronization: the Network Time Protocol" (the offset of two clocks).
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

from common import cli
from common.errors import PeerError, TrainingError
from common.files import mebibytes, write_json
from common.group.collectives import agreed, broadcast, gather
from common.group.devices import choose_device, synchronize
from common.group.interfaces import interface_towards
from common.group.rendezvous import process_group
from common.launch.process import end_process
from common.launch.ranks import Ranks
from common.run.folder import result_folder
from common.run.logs import device_in_words, log, set_up_logs
from common.run.manifest import describe_run
from common.run.options import flatten

NAME = "check_network"


@dataclass(frozen=True)
class CheckOptions:
    """What is measured, and where the result goes."""

    output_dir: Path | None = None
    """Folder of the result. None: runs/check_network/UTC-TIME."""
    largest: int = 64
    """The largest tensor that is sent [MiB]."""
    rounds: int = 5
    """How often each is sent; the median counts."""
    max_skew_s: float = 1.0
    """Clocks further apart than this are a failure [s]: logs could not be put in order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the tensors are. auto takes a GPU where there is one, and says which."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 60.0
    """Time after which a rank gives up waiting for the other ranks [s]."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name in ("largest", "rounds", "max_skew_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0")


@dataclass(frozen=True)
class Config:
    """All options; those of a group mean the same in every recipe."""

    check: CheckOptions = field(default_factory=CheckOptions)


def median_s(operation: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Seconds that `operation`, which every rank calls, takes; one round more goes before."""
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

    The bus bandwidth is what each rank's link must carry if the algorithm is the best there is:
    2 (n - 1) / n times the bytes, over the time.
    """
    world_size, found = dist.get_world_size(), []
    for size in sorted({2**20, 8 * 2**20, options.largest * 2**20}):
        tensor = torch.zeros(size // 4, device=device)
        seconds = median_s(lambda t=tensor: dist.all_reduce(t), options.rounds, device)  # type: ignore[misc]
        bus = size * 2 * (world_size - 1) / world_size / seconds
        found.append({"bytes": size, "seconds": seconds, "bus_bytes_per_s": bus})
    return found


def link_speed(peer: int, options: CheckOptions, device: torch.device) -> float:
    """Bytes a second from rank 0 to `peer` and back; every rank calls it."""
    if dist.get_backend() == "gloo":  # which sends between CPUs only
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


def clock_offset_s(peer: int) -> tuple[float, float]:
    """How far the clock of `peer` is ahead of rank 0's [s], and half the round trip that bounds it.

    Of several exchanges the quickest counts: the least time for the two ways to differ.
    """
    rank, clock = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    best = (0.0, float("inf"))
    for _ in range(20):
        if rank == 0:
            sent_s = time.time()
            dist.send(clock, peer)
            dist.recv(clock, peer)
            back_s = time.time()
            offset_s, bound_s = clock.item() - (sent_s + back_s) / 2, (back_s - sent_s) / 2
            best = min(best, (offset_s, bound_s), key=lambda found: found[1])
        elif rank == peer:
            dist.recv(clock, 0)
            clock.fill_(time.time())
            dist.send(clock, 0)
    return broadcast(best)


def train(config: Config, ranks: Ranks) -> None:
    """Check as one rank; rank 0 writes the result into `config.check.output_dir`.

    Raises:
        InputError: from `process_group`, where ranks do not meet.
        TrainingError: clocks too far apart.
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
        backend = dist.get_backend()
    found = {
        "met_after_s": met_s,
        "backend": backend,
        "ranks": hosts,
        "all_reduce": speeds,
        "links_of_rank_0": links,
    }
    if folder:
        write_json(folder / "config.json", flatten(config))
        write_json(folder / "manifest.json", manifest)
        write_json(folder / "network.json", found)
        log.info(report(found))
        log.info(f"  {folder}/network.json")
    late = {
        host: link
        for host, link in links.items()
        if abs(link["clock_ahead_s"]) - link["within_s"] > options.max_skew_s
    }
    if late and not ranks.is_main:
        raise PeerError("the clocks are apart, as rank 0 says")
    if late:
        host, link = max(late.items(), key=lambda item: abs(item[1]["clock_ahead_s"]))
        raise TrainingError(
            f"the clock of {host} is {link['clock_ahead_s']:+.3f} s from that of {hosts[0][0]}: "
            "have both take their time from one server (chronyc tracking), or allow it with "
            "--max-skew-s"
        )


def report(found: dict[str, Any]) -> str:
    """What a person reads."""
    lines = [f"\nall ranks met {found['met_after_s']:.1f} s after they were started\n"]
    lines += [f"  {'rank':>4}  {'host':<16}  {'interface':<10}  device"]
    for rank, (host, interface, device) in enumerate(found["ranks"]):
        lines.append(f"  {rank:>4}  {host:<16}  {interface or '?':<10}  {device}")
    lines += [f"\n  {'all-reduce':>10}  {'ms':>8}  {'bus MiB/s':>10}"]
    for row in found["all_reduce"]:
        lines.append(
            f"  {mebibytes(row['bytes']):>10}  {row['seconds'] * 1e3:>8.2f}  "
            f"{row['bus_bytes_per_s'] / 2**20:>10,.0f}"
        )
    if found["links_of_rank_0"]:
        lines += [f"\n  {'rank 0 to':<16}  {'MiB/s':>8}  {'its clock is ahead by':>22}"]
        for host, link in found["links_of_rank_0"].items():
            clock = f"{link['clock_ahead_s'] * 1e3:.3f} ± {link['within_s'] * 1e3:.3f} ms"
            lines.append(f"  {host:<16}  {link['bytes_per_s'] / 2**20:>8,.0f}  {clock:>22}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit status."""
    return cli.run(NAME, Config, train, arguments)


if __name__ == "__main__":
    end_process(main())
