"""Which addresses of a host others can reach: known only after a try.

A host may have several network cards, bridges of containers that all hosts give the same number,
and names that no other host resolves. So each host opens one port that tells a random word to
any peer, and all others try each of its addresses. A host that gets the word has reached it.
"""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from launchers.host.timing import DEFAULT, Timing

#: Tells apart the hosts of one launch; it guards nothing.
WORD_BYTES = 16
_ANY = "0.0.0.0"  # noqa: S104 - which address is the right one is what is to be found out


@dataclass(frozen=True)
class Target:
    """A host to be reached.

    Attributes:
        name: The host.
        addresses: Its addresses, the likeliest first.
        port: Where it says its word.
        word: What it says, as hexadecimal digits.
    """

    name: str
    addresses: tuple[str, ...]
    port: int
    word: str


def candidate_addresses() -> list[str]:
    """Returns the numbers of this machine's network cards that others may reach, IPv4 only.

    The one by which an ssh session came in is the first.
    """
    found = [
        address.address
        for card, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family == socket.AF_INET
        and not address.address.startswith("127.")
        and _is_up(card)
    ]
    # "client client-port server server-port", as sshd says it.
    session = os.environ.get("SSH_CONNECTION", "").split()
    first = [session[2]] if len(session) == 4 and session[2] in found else []
    return list(dict.fromkeys([*first, *found]))


def _is_up(card: str) -> bool:
    with contextlib.suppress(OSError, KeyError):
        return bool(psutil.net_if_stats()[card].isup)
    return True


class Doorbell:
    """Sends this host's word to any peer."""

    def __init__(self, word: str) -> None:
        """Listens on all interfaces.

        Raises:
            OSError: No port is free.
        """
        self._word = bytes.fromhex(word)
        self._socket = socket.create_server((_ANY, 0), backlog=256)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Returns the descriptor to wait at."""
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
        """Listens no more."""
        self._socket.close()


class _Attempt:
    """One connection to one address of one host."""

    def __init__(self, target: Target, address: str) -> None:
        self.target = target
        self.address = address
        self._received = b""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.failed = True
        with contextlib.suppress(OSError):  # no way there, or a name that is unknown here
            code = self.socket.connect_ex((address, target.port))
            self.failed = code not in (0, errno.EINPROGRESS)

    def go_on(self) -> bool | None:
        """Returns whether the host has answered; None: not yet."""
        try:
            data = self.socket.recv(WORD_BYTES - len(self._received))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._received += data
        if data and len(self._received) < WORD_BYTES:
            return None
        return self._received == bytes.fromhex(self.target.word)


def reach(
    targets: Sequence[Target],
    doorbell: Doorbell | None,
    timeout_s: float,
    *,
    timing: Timing = DEFAULT,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[str]]:
    """Tries all addresses of all hosts at once; returns those that answered, by host.

    Args:
        targets: The others.
        doorbell: Of this host; the others try it at the same time.
        timeout_s: Seconds after which hosts that are silent are given up. TCP sends a first packet
            that was lost again after one second.
        timing: How long other addresses of a host are tried once one has answered.
        clock: Returns seconds.
    """
    began_at = clock()
    reached: dict[str, set[str]] = {target.name: set() for target in targets}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        if doorbell is not None:
            selector.register(doorbell, selectors.EVENT_READ, None)
        open_attempts = 0
        for attempt in _attempts(targets):
            stack.callback(attempt.socket.close)
            if not attempt.failed:
                selector.register(attempt.socket, selectors.EVENT_READ, attempt)
                open_attempts += 1
        while open_attempts:
            limit_s = min(timing.soon_s, timeout_s) if all(reached.values()) else timeout_s
            left = began_at + limit_s - clock()
            for key, _ in selector.select(max(left, 0.0)):
                if key.data is None:
                    assert doorbell is not None
                    doorbell.answer()
                    continue
                answered = key.data.go_on()
                if answered is not None:
                    selector.unregister(key.fileobj)
                    open_attempts -= 1
                if answered:
                    reached[key.data.target.name].add(key.data.address)
            if left <= 0.0:
                break  # not before: what has come counts, even if this process stood still
    return {
        target.name: [each for each in target.addresses if each in reached[target.name]]
        for target in targets
    }


def _attempts(targets: Sequence[Target]) -> Iterator[_Attempt]:
    for target in targets:
        for address in target.addresses:
            yield _Attempt(target, address)
