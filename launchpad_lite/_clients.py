"""Clients that belong together, and what happens to all of them, later ones included."""

import threading
import weakref
from collections.abc import Callable, Collection

import courier


class Clients:
    """The clients of one node, or those that a launching process made of a program. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: weakref.WeakSet[courier.Client] = weakref.WeakSet()
        self._done: list[Callable[[courier.Client], None]] = []
        #: Where nobody answers any more.
        self._ended: set[str] = set()

    def keep(self, client: courier.Client) -> None:
        """Adds a client; what was done to the others is done to it, too."""
        with self._lock:
            self._clients.add(client)
            done = list(self._done)
        for do in done:
            do(client)

    def do(self, what: Callable[[courier.Client], None]) -> None:
        """Does something to all clients and, as soon as they come, to later ones."""
        with self._lock:
            if what not in self._done:
                self._done.append(what)
            clients = list(self._clients)
        for client in clients:
            what(client)

    def close(self) -> None:
        """Fails all calls, those that wait and those to come."""
        self.do(courier.close)

    def note_ended(self, endpoints: Collection[str]) -> None:
        """Has calls fail, instead of wait, to servers that do not come back."""
        with self._lock:
            self._ended |= set(endpoints)
        self.do(self._stop_waiting_if_ended)

    def _stop_waiting_if_ended(self, client: courier.Client) -> None:
        if client.address in self._ended:
            courier.stop_waiting(client)
