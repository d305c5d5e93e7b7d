"""The port at which the ranks meet: bound before anything else, so that nobody takes it."""

import errno
import socket

from common.errors import InputError


def bind(address: str, port: int, *, several_hosts: bool) -> socket.socket:
    """Listen where the ranks will look for rank 0's store, and nowhere else.

    The store has no authentication, so it listens only on rank 0's address. There are two
    exceptions, in which it listens on all interfaces: the address is none of this host's (it is
    translated on the way), or several hosts are given a name, which each host may resolve to
    another address (Debian resolves a host's own name to loopback).

    Args:
        address: rank 0's, as the ranks are given it.
        port: 0 for any free one.
        several_hosts: ranks are on other hosts too, as far as is known.

    Raises:
        OSError: the port is in use, or the address does not resolve.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not several_hosts or address == found[0]:
        try:
            return socket.create_server((str(found[0]), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def listen(address: str, port: int, *, several_hosts: bool = False) -> socket.socket:
    """`bind` now and keep the socket, so that none can take the port before rank 0 listens.

    Raises:
        InputError: the port is in use, or the address does not resolve.
    """
    try:
        return bind(address, port, several_hosts=several_hosts)
    except socket.gaierror as error:
        raise InputError(unresolved(address, error)) from error
    except OSError as error:
        raise InputError(
            f"port {port} on {socket.gethostname()} cannot be taken ({error.strerror}): give "
            "another --master-port, or none to have a free one chosen"
        ) from error


def unresolved(address: str, error: OSError) -> str:
    """What is said of a MASTER_ADDR that no name server knows."""
    return (
        f"MASTER_ADDR {address!r} does not resolve on host {socket.gethostname()} ({error}): "
        "give rank 0's host by an address that every host knows"
    )
