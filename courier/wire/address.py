"""Network addresses as users write them, `host:port`, and sockets that connect or listen there."""

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

#: An IPv6 address stands in brackets, for its colons.
_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})")
_IN_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
#: The machine does not have this address, or no addresses of its kind.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`; the host is without brackets then.

    Raises:
        ValueError: The text is no such address.

    Example:
        host, port = lowlevel.split_address("[fd00::1]:4711")
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ValueError(
            f"not an address: {address!r}; write host:port, like '127.0.0.1:4711' or '[::1]:4711'"
        )
    return found[1] or found[2], int(found[3])


def resolvable(host: str) -> Any:  # bytes, too, which the types of `socket` do not know
    """Returns a host in the form that the resolver takes without loading a codec.

    If one thread loads a codec while another forks, the child is stuck with its lock.
    """
    return host.encode("ascii") if host.isascii() else host


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, or `[host]:port` for the number of an IPv6 address.

    Example:
        endpoint = lowlevel.join_address("fd00::1", 4711)
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback() -> str:
    """Returns the number by which this machine reaches itself: 127.0.0.1, or ::1 where there is no IPv4.

    Example:
        with courier.Server(Counter(), host=lowlevel.loopback(), secret=secret) as server:
            print(server.address)
    """
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError), bound(host, 0):
            return host
    return "127.0.0.1"  # using it tells what is wrong


def bound(host: str, port: int, *options: int, backlog: int | None = None) -> socket.socket:
    """Returns a TCP socket that is bound to an address of this machine.

    Args:
        host: Name or number; of several addresses IPv4 is preferred. `::` is all interfaces, by IPv6
            and IPv4, as far as this machine has them.
        port: 0 takes a free one.
        options: Of sockets (SOL_SOCKET), to be switched on before.
        backlog: Connections that may wait to be accepted; None: it does not listen.

    Raises:
        OSError: The port is taken, or the host is not of this machine.
        UnicodeError: The host has no proper name.
    """
    found = [
        (family, number)
        for each in ((host, "0.0.0.0") if host == "::" else (host,))  # noqa: S104 - asked for
        for family, _, _, _, number in socket.getaddrinfo(
            resolvable(each), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    ]
    if host != "::":
        found.sort(key=lambda each: each[0] != socket.AF_INET)
    for family, number in found[:-1]:
        try:
            return _bound(family, number, options, backlog)
        except OSError as error:
            # A port that is taken is no reason to listen at another address.
            if error.errno not in _NOT_HERE:
                raise
    return _bound(*found[-1], options, backlog)


def _bound(family: int, number: Any, options: Iterable[int], backlog: int | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        if number[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(number)
        if backlog is not None:
            sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects to the first address of a host that answers, but never to its own port.

    The resolver says which address is tried first, and each has its share of the time: one that
    does not answer, as IPv6 behind some firewalls, leaves enough for the next. A client that tries
    a free port of this machine may get that port for its own end, and TCP then connects it to
    itself: https://www.rfc-editor.org/rfc/rfc9293#section-3.5

    Raises OSError, and UnicodeError if the host has no proper name.
    """
    found = socket.getaddrinfo(resolvable(host), port, type=socket.SOCK_STREAM)
    share_s = timeout_s / len(found)
    while True:
        try:
            # With the zone of an address, as in fe80::1%eth0.
            number, _ = socket.getnameinfo(found.pop(0)[4], _IN_NUMBERS)
            sock = socket.create_connection((resolvable(number), port), share_s)
        except OSError:
            if not found:
                raise
        else:
            break
    sock.settimeout(timeout_s)
    try:
        is_itself = sock.getsockname() == sock.getpeername()
    except OSError:
        is_itself = False  # the peer is gone already; the next read shows it
    if is_itself:
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no server listens there")
    return sock
