"""Groups of clients, and operations on all of them, also on later ones."""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping

import courier
from courier import lowlevel


class Clients:
    """The clients of one node, or of a program in its launching process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The connection of each, with its intended address: another thread may just be moving it.
        self._clients: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._done: list[Callable[[object], None]] = []
        self._ended: set[str] = set()  # addresses whose servers have ended
        #: New addresses of servers by old ones. Follow only one entry, because another server may
        #: have an address that one has left.
        self._moved: dict[str, str] = {}

    def keep(self, client: "courier.Client") -> None:
        """Adds a client, and applies all earlier operations to it."""
        connection = lowlevel.connection_of(client)
        with self._lock:
            self._clients[connection] = self._moved.get(client.address, client.address)
            done = list(self._done)
        self._follow(connection)
        for do in done:
            do(connection)

    def do(self, what: Callable[[object], None]) -> None:
        """Applies an operation to all clients, and later to new ones."""
        with self._lock:
            if what not in self._done:
                self._done.append(what)
            clients = list(self._clients)
        for client in clients:
            what(client)

    def begin_as(self, others: "Clients") -> None:
        """Applies known moves and ends of servers to new clients."""
        with others._lock:
            moved, ended = dict(others._moved), set(others._ended)
        self.note_moved(moved)
        self.note_ended(ended)  # after that: an address to which a server moved has not ended

    def wait_for_futures(self, timeout_s: float | None) -> list[str]:
        """Waits for calls without a waiting thread; returns server and method of each that is open."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            clients = list(self._clients)
        unanswered = []
        for client in clients:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            unanswered += courier.wait_for_futures(client, left_s)
        return unanswered

    def close(self, reason: str) -> None:
        """Fails all calls, waiting and future ones; their errors give the reason."""
        self.do(functools.partial(courier.close, reason=reason))

    def note_ended(self, endpoints: Collection[str]) -> None:
        """Makes calls to servers that do not come back fail instead of wait."""
        with self._lock:
            self._ended |= set(endpoints)
        self.do(self._stop_waiting_if_ended)

    def _stop_waiting_if_ended(self, client: object) -> None:
        with self._lock:
            has_ended = self._clients.get(client) in self._ended
        if has_ended:
            lowlevel.stop_waiting(client)

    def note_lost(self, endpoints: Collection[str]) -> None:
        """Fails calls in flight to servers whose host is lost; they may come back elsewhere."""
        with self._lock:
            clients = [client for client, now in self._clients.items() if now in endpoints]
        for client in clients:
            lowlevel.reconnect(client)

    def note_moved(self, moves: Mapping[str, str]) -> None:
        """Moves clients to new addresses of servers, also later clients with old addresses.

        Old and new addresses do not count as ended any more. A client that stopped waiting stays
        so. All `moves`, new `host:port` by old one, happen at once: two servers may swap places.
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
        # Not under the lock, because calls that this makes fail may make clients. So two threads
        # may do this at a time, and the last of them must find all done.
        address = ""
        while address != (wanted := self._clients[client]):
            address = wanted
            lowlevel.move(client, address)
