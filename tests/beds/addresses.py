"""This machine as one that has IPv6 alone, IPv4 alone, or a kernel without IPv6."""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence

_ONLY = {
    "ipv6": "ip link set lo up && ip -4 address flush dev lo",
    "ipv4": "for each in all default lo; do echo 1 >/proc/sys/net/ipv6/conf/$each/disable_ipv6; done"
    " && ip link set lo up",
}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def with_only(family: str, command: Sequence[str]) -> list[str]:
    """A command in a network of its own, which has loopback alone, by "ipv6" or "ipv4"; as root."""
    enter = f'{_ONLY[family]} && exec "$@"'
    return ["unshare", "--net", "/bin/sh", "-c", enter, "-", *command]


def without_ipv6(command: Sequence[str]) -> list[str]:
    """A command for which the kernel has no IPv6: there are no such sockets."""
    return [sys.executable, __file__, *command]


def _refuse_ipv6() -> None:
    """Has the kernel refuse IPv6 sockets to this process and all that it starts."""
    # Load a word, jump if equal, return: instructions of the BSD packet filter.
    load, equal, end = 0x20, 0x15, 0x06
    refuse, allow = 0x50000 | errno.EAFNOSUPPORT, 0x7FFF0000
    program = [
        (load, 0, 0, 0),  # the system call
        (equal, 0, 3, _SOCKET[platform.machine()]),
        (load, 0, 0, 16),  # its first argument
        (equal, 0, 1, socket.AF_INET6),
        (end, 0, 0, refuse),
        (end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filters = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_NO_NEW_PRIVILEGES, 1, None, 0, 0), (_SET_SECCOMP, _FILTER, filters, 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "the kernel does not filter system calls")


if __name__ == "__main__":
    _refuse_ipv6()
    os.execvp(sys.argv[1], sys.argv[1:])
