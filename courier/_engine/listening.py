"""Binds the one address of a server that its users see."""

import socket
from collections.abc import Iterator
from typing import Any

from courier._address import join_address, resolvable
from courier.errors import AddressInUseError

BACKLOG = 1024


def listen(host: str, port: int, *, share_port: bool) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: Name or number; of several addresses IPv4 is preferred.
        port: 0 takes a free one.
        share_port: Beside a socket of the same user that reserves the port (SO_REUSEPORT).

    Raises:
        AddressInUseError: The port is taken, or the host is not of this machine.
    """
    error: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                # Clients of the server that was here before may still hold its connections.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if share_port and hasattr(socket, "SO_REUSEPORT"):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(address)
                sock.listen(BACKLOG)
            except OSError as refused:
                sock.close()
                error = refused
            else:
                return sock
    except (OSError, UnicodeError) as unknown:
        error = OSError(str(unknown))
    raise AddressInUseError(
        f"cannot listen at {join_address(host, port)}: the port is taken, or the host is not of "
        f"this machine ({error}). Use port 0 to get a free one"
    ) from error


def _addresses(host: str, port: int) -> Iterator[tuple[int, Any]]:
    """Yields families and socket addresses of a host name, IPv4 first."""
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(resolvable(host), port, type=socket.SOCK_STREAM, flags=flags)
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        yield family, address
