"""Clients that belong together, and what happens to all of them, later ones included."""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping

import courier


class Clients:
    """The clients of one node, or those that a launching process made of a program. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: What stands behind each, with the address that it is to have: it may be on its way there
        #: in another thread.
        self._clients: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._done: list[Callable[[object], None]] = []
        #: Addresses whose servers have ended.
        self._ended: set[str] = set()
        #: Where servers are now by where they were: followed once, not from entry to entry, because
        #: another server may have an address that one has left.
        self._moved: dict[str, str] = {}

    def keep(self, client: courier.Client) -> None:
        """Adds a client; what was done to the others is done to it, too."""
        connection = courier.connection_of(client)
        with self._lock:
            self._clients[connection] = self._moved.get(client.address, client.address)
            done = list(self._done)
        self._follow(connection)
        for do in done:
            do(connection)

    def do(self, what: Callable[[object], None]) -> None:
        """Does something to all clients and, as soon as they come, to later ones."""
        with self._lock:
            if what not in self._done:
                self._done.append(what)
            clients = list(self._clients)
        for client in clients:
            what(client)

    def begin_as(self, others: "Clients") -> None:
        """Applies to clients that are new here what is known of servers."""
        with others._lock:
            moved, ended = dict(others._moved), set(others._ended)
        self.note_moved(moved)
        self.note_ended(ended)  # after that: an address to which a server moved has not ended

    def wait_for_futures(self, timeout_s: float | None) -> list[str]:
        """Waits for calls that no thread waits for; returns server and method of those without an answer."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            clients = list(self._clients)
        unanswered = []
        for client in clients:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            unanswered += courier.wait_for_futures(client, left_s)
        return unanswered

    def close(self, reason: str) -> None:
        """Fails all calls, those that wait and those to come; their errors tell the reason."""
        self.do(functools.partial(courier.close, reason=reason))

    def note_ended(self, endpoints: Collection[str]) -> None:
        """Makes calls fail, instead of wait, to servers that do not come back."""
        with self._lock:
            self._ended |= set(endpoints)
        self.do(self._stop_waiting_if_ended)

    def _stop_waiting_if_ended(self, client: object) -> None:
        with self._lock:
            has_ended = self._clients.get(client) in self._ended
        if has_ended:
            courier.stop_waiting(client)

    def note_lost(self, endpoints: Collection[str]) -> None:
        """Fails calls in flight to servers whose host is lost; they may come back elsewhere."""
        with self._lock:
            clients = [client for client, now in self._clients.items() if now in endpoints]
        for client in clients:
            courier.reconnect(client)

    def note_moved(self, moves: Mapping[str, str]) -> None:
        """Makes clients follow servers that have moved; also later clients that are made of old addresses.

        An address that moved is not one that ended any more, nor is the one it moved to. A client
        that waits no more stays so.

        Args:
            moves: New `host:port` by old one. They happen at once: two servers may swap places.

        Raises:
            ValueError: A new address is not host:port.
        """
        arrived = set(moves.values())
        with self._lock:
            self._ended -= arrived.union(moves)
            moved = {first: moves.get(now, now) for first, now in self._moved.items()}
            moved.update(moves)
            # An address to which a server moved is its own, even if another server left it before.
            self._moved = {first: now for first, now in moved.items() if first not in arrived}
            clients = []
            for client, address in list(self._clients.items()):
                if address in moves:
                    self._clients[client] = moves[address]
                    clients.append(client)
        for client in clients:
            self._follow(client)

    def _follow(self, client: object) -> None:
        # Not under the lock, because calls that fail thereby may make clients. So two threads may
        # do this at a time, and the last of them must find all done.
        address = ""
        while address != (wanted := self._clients[client]):
            address = wanted
            courier.move(client, address)
