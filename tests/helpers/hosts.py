"""Two hosts: network namespaces, each with its own address and loopback."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.helpers.commands import Recipe
from tests.helpers.machine import need, need_root

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "link add eth0 netns {} type veth peer name eth0 netns {}"


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two namespaces, joined by a cable between their `eth0`."""
    need_root()
    need("ip")
    names = [f"recipes-{os.getpid()}-{number}" for number in (0, 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(*CABLE.format(*names).split())
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def limit(names: Sequence[str], bits_per_s: float | None) -> None:
    """Limit the bandwidth of the link in each direction.

    The bucket is small, because tokens that collect while the ranks compute are sent at any speed:
    with 128 KiB, 113 KB took 0.3 ms at 100 Mbit/s, and not 9 ms.
    """
    for name in names:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
        if bits_per_s:
            burst = max(4096, round(bits_per_s / 8 * 130e-6))
            rate = ["rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}b", "latency", "100ms"]
            subprocess.run([*tc, "add", "dev", "eth0", "root", "tbf", *rate], check=True)


def meeting(node: int, address: str = ADDRESSES[0]) -> list[str]:
    """Options with which the launcher, or torchrun, of one of the two hosts finds the other."""
    options = f"--nnodes 2 --node-rank {node} --master-addr {address} --master-port 29500"
    return options.split()


def launched(recipe: Recipe, node: int, *options: str, address: str = ADDRESSES[0]) -> list[str]:
    """The command that starts ddp_launch by hand on one of the two hosts, as the README says."""
    return recipe.command("ddp_launch", "--nproc", "1", *meeting(node, address), *options)
