"""Network addresses as users write them: `host:port`."""

import ipaddress
from typing import Any


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        ValueError: The text is no such address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address: {address!r}; write host:port, like '127.0.0.1:4711'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolvable(host: str) -> Any:  # bytes, too, which the types of `socket` do not know
    """Returns a host as the resolver takes it without loading a codec.

    To load one in a thread, while another forks, would leave the child stuck with a lock.
    """
    return host.encode("ascii") if host.isascii() else host


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place(address: str, name: str) -> str:
    """Returns what messages call a server: its address, and before that its name if it has one."""
    return f"{name} ({address})" if name else address


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
