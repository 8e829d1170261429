"""Finds the addresses at which others reach a host; only a try shows them.

A host may have several network cards, container bridges with the same address on all hosts, and
names that no other host resolves. So each opens a port that sends a random word. Who gets it has
reached the host.
"""

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from courier.lowlevel import bound

#: The word tells the hosts of one launch apart; it is no secret.
WORD_BYTES = 16
#: Seconds after which silent addresses are given up, if each host was reached by another one.
_SOON_S = 1.0


@dataclass(frozen=True)
class Target:
    """A host, its addresses, the likeliest first, and the port where it sends its word, in hex."""

    name: str
    addresses: Sequence[str]
    port: int
    word: str


def candidate_addresses() -> list[str]:
    """Returns the IP addresses of this machine that others may reach.

    The address by which an ssh session came in is the first, because the name of this machine led there.
    Then IPv4 comes before IPv6. IPv6 addresses that are valid for one network card only are left out.
    """
    cards: Mapping[str, Any] = {}
    with contextlib.suppress(OSError):  # a sandbox
        cards = psutil.net_if_stats()
    found = [
        address.address
        for card, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if (card not in cards or cards[card].isup) and _is_candidate(address)
    ]
    # "client client-port server server-port", as sshd writes it.
    came_in = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return sorted(dict.fromkeys(found), key=lambda each: ([each] != came_in, ":" in each))


def _is_candidate(address: Any) -> bool:
    if address.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    number = ipaddress.ip_address(address.address)
    return not number.is_loopback and not (number.version == 6 and number.is_link_local)


class ProbeServer:
    """Sends this host's word to any peer."""

    def __init__(self, word: str) -> None:
        self._word = bytes.fromhex(word)
        # All interfaces, because the probe is to find the right address.
        self._socket = bound("::", 0, backlog=256)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Sends the word to all peers that wait."""
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                with visitor, contextlib.suppress(OSError):
                    visitor.setblocking(False)
                    visitor.send(self._word)

    def close(self) -> None:
        self._socket.close()


class _Attempt(NamedTuple):
    """A connection to an address of a host, which is being made."""

    target: Target
    address: str
    socket: socket.socket


def _attempts(targets: Iterable[Target]) -> Iterator[_Attempt]:
    """Begins to connect to all addresses; yields several attempts for a name with several numbers."""
    for target, address in ((each, way) for each in targets for way in each.addresses):
        try:
            found = socket.getaddrinfo(address.encode(), target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # a name that is unknown here
            continue
        for family, _, _, _, number in found:
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:  # there is no IPv6 here
                    raise
                continue
            sock.setblocking(False)
            if sock.connect_ex(number) in (0, errno.EINPROGRESS):
                yield _Attempt(target, address, sock)
            else:  # no way leads there
                sock.close()


def reach(
    targets: Sequence[Target],
    probe_server: ProbeServer | None,
    timeout_s: float,
    *,
    soon_s: float = _SOON_S,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[str]]:
    """Tries all addresses of all hosts at once; returns those that answered, by host.

    The others try `probe_server` meanwhile. TCP sends a lost first packet again after one second.
    """
    began_at = clock()
    reached: dict[str, set[str]] = {target.name: set() for target in targets}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        if probe_server is not None:
            selector.register(probe_server, selectors.EVENT_READ, None)
        open_attempts = 0
        for attempt in _attempts(targets):
            stack.enter_context(attempt.socket)
            selector.register(attempt.socket, selectors.EVENT_READ, attempt)
            open_attempts += 1
        while open_attempts:
            limit_s = min(soon_s, timeout_s) if all(reached.values()) else timeout_s
            left = began_at + limit_s - clock()
            for key, _ in selector.select(max(left, 0.0)):
                if key.data is None:
                    assert probe_server is not None
                    probe_server.answer()
                    continue
                target, address, sock = key.data
                with contextlib.suppress(OSError):  # it is refused
                    if sock.recv(WORD_BYTES) == bytes.fromhex(target.word):
                        reached[target.name].add(address)
                selector.unregister(sock)
                open_attempts -= 1
            if left <= 0.0:
                break  # checked last: answers that have come count, even if this process stood still
    return {
        target.name: [each for each in target.addresses if each in reached[target.name]]
        for target in targets
    }
