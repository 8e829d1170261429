"""How one connects by TCP."""

import errno
import socket

from courier._address import resolvable


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects as `socket.create_connection` does, but never to its own port.

    A client that tries a port of this machine on which no server listens may be given that very port for its own
    end, and TCP then takes them for each other: https://www.rfc-editor.org/rfc/rfc9293#section-3.5

    Raises:
        OSError: No server answers.
        UnicodeError: The host has no proper name.
    """
    sock = socket.create_connection((resolvable(host), port), timeout_s)
    try:
        is_itself = sock.getsockname() == sock.getpeername()
    except OSError:
        is_itself = False  # the peer is gone already, as the next read will show
    if is_itself:
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no server listens there")
    return sock
