"""The port where the ranks meet: taken before they start, so that no other program takes it."""

import errno
import socket

from common.errors import InputError


def bind(address: str, port: int, *, several_hosts: bool) -> socket.socket:
    """Listen on rank 0's address only, because the store there has no authentication.

    With ranks on several hosts, it has to listen on all interfaces in two cases: this host does not
    have the address (it is translated on the way), or the ranks are given a name, which each host
    may resolve to another address (Debian resolves a host's own name to loopback).

    Args:
        address: of rank 0, as the ranks are given it.
        port: 0 for any free port.
        several_hosts: whether some ranks are on other hosts.

    Raises:
        OSError: the port is in use, or the address does not resolve.
        InputError: all ranks are on this host, which does not have the address.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not several_hosts or address == found[0]:
        try:
            return socket.create_server((str(found[0]), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            if not several_hosts:
                raise InputError(
                    f"MASTER_ADDR {address!r} is no address of this host ({socket.gethostname()}), "
                    "on which all ranks are: leave it out (unset MASTER_ADDR)"
                ) from error
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def listen(address: str, port: int, *, several_hosts: bool = False) -> socket.socket:
    """Like `bind`, for a launcher.

    Raises:
        InputError: the port is in use, or the address does not resolve, or as `bind`.
    """
    try:
        return bind(address, port, several_hosts=several_hosts)
    except socket.gaierror as error:
        raise InputError(unresolved(address, error)) from error
    except OSError as error:
        raise InputError(
            f"port {port} on {socket.gethostname()} cannot be taken ({error.strerror}): give "
            "another --master-port, or leave it out to get a free port"
        ) from error


def unresolved(address: str, error: OSError) -> str:
    """The message for a MASTER_ADDR that does not resolve."""
    return (
        f"MASTER_ADDR {address!r} does not resolve on host {socket.gethostname()} ({error}): "
        "give an address of rank 0's host that every host can resolve"
    )
