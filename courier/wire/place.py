"""The identity of this machine, and of the peer of a unix socket."""

import contextlib
import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
#: Whether unix sockets can have names that are no files, of which nothing is left.
ABSTRACT = os.name == "posix" and hasattr(socket, "SO_PEERCRED")


def host_name() -> str:
    """Returns an identity shared by all processes that can reach one another's unix sockets.

    It names the running kernel and the network namespace, to which the sockets belong. Empty where
    the system does not tell.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    return ""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Returns process and user at the other end of a unix socket, as the kernel noted them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def is_own_user(sock: socket.socket) -> bool:
    try:
        return peer_of(sock)[1] == os.geteuid()
    except OSError:
        return False


def keep_alive(sock: socket.socket, limit_s: float) -> None:
    """Makes the system close a TCP connection whose other end is silent for `limit_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 3
    pause = max(1, round(limit_s / (probes + 1)))
    for option, value in (
        ("TCP_KEEPIDLE", pause),
        ("TCP_KEEPALIVE", pause),  # its name on macOS
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", max(1, round(limit_s * 1000))),
    ):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
