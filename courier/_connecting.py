"""How one connects by TCP."""

import errno
import socket

from courier._address import resolvable


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Does what `socket.create_connection` does, but connects nobody to themselves.

    Who tries a port of this machine where nobody listens may be given that very port for their own
    end, and TCP then takes them for each other: https://www.rfc-editor.org/rfc/rfc9293#section-3.5

    Raises:
        OSError: Nobody answers.
        UnicodeError: The host has no proper name.
    """
    sock = socket.create_connection((resolvable(host), port), timeout_s)
    try:
        is_itself = sock.getsockname() == sock.getpeername()
    except OSError:
        is_itself = False  # the other end has gone already, as whoever reads will see
    if is_itself:
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    return sock
