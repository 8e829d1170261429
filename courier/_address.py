"""Network addresses as users write them: `host:port`."""

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        ValueError: The text is no such address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address: {address!r}; write host:port, like '127.0.0.1:4711'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tells whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
