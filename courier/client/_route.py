"""The way of a client to its server: inside this process, if the server is here; else by a lane."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from courier.calls.pending import PendingCall
from courier.client._lane import Lane
from courier.client.local import SERVERS, InProcess, LocalCall, server_at
from courier.client.options import ClientOptions
from courier.values.parcel import Parcel, compressed, pack, unpack, unshared


class Route(Lane):
    """Carries the calls of a client, and of its copies with other timeouts. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        #: Whether calls fail, instead of waiting, where no server answers, as `stop_waiting` asks.
        self.stopped_waiting = False
        self._calls: weakref.WeakSet[LocalCall] = weakref.WeakSet()
        #: Routes to the same server with other options; they follow this one when it moves.
        self._derived: weakref.WeakSet[Route] = weakref.WeakSet()

    def derive(self, **changes: Any) -> "Route":
        """Returns a route with other options to the same server, also after moves."""
        with self._lock:
            if self.stopped_waiting:
                changes["wait_for_ready"] = False
            derived = Route(self.options._replace(**changes))
            self._derived.add(derived)
            return derived

    def listed_methods(self) -> frozenset[str]:
        """Returns the methods that the server listed last; empty if none. They may have changed."""
        if self.methods is None and (server := server_at(self.options)) is not None:
            self.methods = frozenset(server.dispatcher.listed_names()) or None
        return self.methods or frozenset()

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        """Sends a call; `blocking`: the caller waits at once. May raise SerializationError."""
        while SERVERS and not self._closed:
            options = self.options
            server = server_at(options)
            if server is None or server.in_process is InProcess.WIRE:
                break
            call = LocalCall(options.where, server, method, timeout_s)
            with self._lock:
                if self.options.address != options.address:
                    continue  # moved meanwhile
                self._calls.add(call)
            if call.begin(args, kwargs, blocking=blocking):
                return call
            break
        arguments = pack((args, kwargs))
        if self.options.compress:
            arguments = compressed(arguments)
        return self.send(method, arguments, timeout_s, blocking=blocking)

    def forward(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        """As `submit`, with packed arguments, for a caller that does not wait."""
        if server_at(self.options) is not None:
            args, kwargs = unpack(unshared(arguments))
            return self.submit(method, args, kwargs, timeout_s, blocking=False)
        if self.options.compress:
            arguments = compressed(arguments)
        return self.send(method, arguments, timeout_s, blocking=False)

    def _survive_fork(self) -> None:
        self._calls = weakref.WeakSet()  # their threads are not here
        super()._survive_fork()

    def open_futures(self) -> list[PendingCall]:
        with self._lock:
            derived, local = list(self._derived), list(self._calls)
        calls = super().open_futures()
        calls += [call for call in local if call.is_shared and not call.is_settled]
        for each in derived:
            calls += each.open_futures()
        return calls

    def stop_waiting(self) -> None:
        with self._lock:
            self.stopped_waiting = True
            derived = list(self._derived)
        super().stop_waiting()
        for each in derived:
            each.stop_waiting()

    def move(self, address: str | None) -> None:
        """Sends calls to another address from now on, also waiting ones.

        None stays at the present address. Closes the connection: its calls raise ServerLostError.
        """
        # Without locks, because callers whose calls end here may call again.
        for finish in self._move(address):
            finish()

    def _move(self, address: str | None) -> list[Callable[[], object]]:
        # All under the lock, so that of two concurrent moves the same one wins everywhere.
        with self._lock:
            finishes: list[Callable[[], object]] = []
            target = address or self.options.address
            if address is None or target != self.options.address:
                reason = f"the server moved to {target}"
                finishes += [functools.partial(call.lose, reason) for call in self._calls]
                self._calls.clear()
                finishes.append(self.leave_for(target))
            for derived in list(self._derived):
                finishes += derived._move(address)
            return finishes

    def close(self, reason: str) -> None:
        """Fails all pending calls with CallCancelledError, and frees its resources."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel(reason)
        super().close(reason)
