"""The network interface that leads to the other ranks."""

import fcntl
import os
import socket
import struct

from common.launch.ranks import Ranks


def choose_interface(ranks: Ranks) -> None:
    """Let gloo use the interface that leads to rank 0, unless the user has chosen one.

    By itself gloo listens on the address of the host name, which Debian maps to 127.0.1.1, where no
    other host can reach it. NCCL chooses by itself among all interfaces.
    """
    if ranks.several_hosts and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_towards(ranks.master_addr)
        if name == "lo":  # rank 0 is on this host: take the interface that leads outside
            others = interface_names()
            name = others[0] if len(others) == 1 else interface_towards("192.0.2.1")
        if name and name != "lo":
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_names() -> list[str]:
    """The interfaces of this host, without the loopback."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def interface_towards(address: str) -> str | None:
    """Name of the interface that this host uses to reach `address`; None if unknown."""
    siocgifaddr = 0x8915
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # chooses a route, sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    if fcntl.ioctl(probe.fileno(), siocgifaddr, request)[20:24] == own:
                        return name
                except OSError:
                    continue  # an interface with no IPv4 address
    except OSError:
        pass  # an IPv6-only or unknown address: leave the choice to gloo
    return None
