"""What stands behind a client: its lane, its options, and what survives a fork."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from courier._abandoned import clear_up
from courier._context import is_in_call
from courier._dispatch import LIST_METHODS, describe_unknown
from courier._lane import Lane, PendingCall
from courier._local import LocalLane
from courier._options import ClientOptions
from courier._outcomes import RemoteIterator, unreadable
from courier._parcel import Parcel, unpack
from courier._pool import HandlerPool
from courier.errors import CallCancelledError, SerializationError, UnknownMethodError

#: Callbacks of futures that may run, or block, at the same time.
_CALLBACK_THREADS = 64
#: A closed client leaves no thread behind for long.
_CALLBACK_IDLE_S = 0.5
#: A completion, or a mistyped name, waits no longer for a server.
_ASK_S = 0.5
_CLOSED = "the client is closed; make a new one"


class Connection:
    """What all copies and views of one client share. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self._lane: Lane | None = None
        self._closed = False
        self._closed_since = ""
        #: Methods of which an unread failure was logged.
        self.unread = set[str]()
        #: Whether new calls are refused outside of handlers.
        self.draining = False
        self._impatient: Connection | None = None
        #: Of other clients of the same server, which follow this one when it moves.
        self._derived: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._stopped_waiting = False
        self._start_anew()
        _connections.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._callbacks = HandlerPool(
            "courier-callback", _CALLBACK_THREADS, 0, idle_s=_CALLBACK_IDLE_S
        )

    def __reduce__(self) -> tuple[type["Connection"], tuple[ClientOptions]]:
        # For methods of clients, which others may call.
        return Connection, (self.options,)

    def survive_fork(self) -> None:
        """In a forked child, forgets what belongs to the parent: the child connects again."""
        if self._lane is not None:
            self._lane.drop()
        self._lane = None
        self._start_anew()

    def lane(self) -> Lane:
        """Returns the open lane, opening it first if needed."""
        with self._lock:
            self._check_open()
            if self._lane is None:
                self._lane = LocalLane(self.options)
            return self._lane

    def _check_open(self) -> None:
        if self._closed:
            raise CallCancelledError(f"{self.options.where}: {self._closed_since}")

    def impatient(self) -> "Connection":
        """Returns a connection to the same server that waits for none; it ends with this one."""
        with self._lock:
            if self._impatient is None:
                self._impatient = Connection(self.options._replace(wait_for_ready=False))
                self._derived.add(self._impatient)
                if self._closed:
                    self._impatient.close()
            return self._impatient

    def derive(self, **changes: Any) -> "Connection":
        """Returns a connection with other options to the same server, wherever that moves."""
        with self._lock:
            if self._stopped_waiting:
                changes["wait_for_ready"] = False
            derived = Connection(self.options._replace(**changes))
            self._derived.add(derived)
            return derived

    def with_timeout(self, timeout_s: float | None) -> "Connection":
        """Returns one whose calls have another timeout, over the same lane."""
        with self._lock:
            view = _TimedView(self.options._replace(timeout_s=timeout_s), self)
            self._derived.add(view)
            return view

    def open_futures(self) -> list[PendingCall]:
        """Returns the calls that have not ended and that no thread was going to wait for."""
        with self._lock:
            lane = self._lane
            derived = list(self._derived)
        calls = [] if lane is None else lane.open_futures()
        return calls + [call for each in derived for call in each.open_futures()]

    def close(self, reason: str = "") -> None:
        with self._lock:
            lane, self._lane, self._closed = self._lane, None, True
            self._closed_since = self._closed_since or reason or _CLOSED
            impatient = self._impatient
        if lane is not None:
            lane.close(reason or "the client was closed")
        if impatient is not None:
            impatient.close(reason)

    def stop_waiting(self) -> None:
        """Makes calls fail, instead of wait, where no server answers."""
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        with self._lock:
            self.options = self.options._replace(wait_for_ready=False)
            self._stopped_waiting = True
            lane = self._lane
            derived = list(self._derived)
        if lane is not None:
            lane.stop_waiting()
        for each in derived:
            each._stop_waiting()

    def move(self, address: str) -> None:
        """Goes to the server at another address from now on, and all that derive from this do."""
        for finish in self._redirect(address):
            finish()

    def reconnect(self) -> None:
        """Gives the present connection up, as all do that derive from this."""
        for finish in self._redirect(None):
            finish()

    def _redirect(self, address: str | None) -> list[Callable[[], None]]:
        """Gives the connection up; None stays at the address, whichever that is by now."""
        # All of it under the lock, so that of two moves at a time the same one wins everywhere.
        with self._lock:
            finishes = []
            target = address or self.options.address
            if address is None or target != self.options.address:
                self.options = self.options._replace(address=target)
                if self._lane is not None:
                    finishes.append(self._lane.move(target))
            for derived in list(self._derived):
                finishes += derived._redirect(address)
            return finishes

    def stop_calling(self) -> None:
        """Makes new calls fail, except for those that a handler needs for its answer."""
        # No lock: this may run while the garbage is collected in a thread that holds it.
        self.draining = True

    @property
    def is_ending(self) -> bool:
        """Whether calls may fail from now on because it was closed, or asked to stop calling or waiting."""
        return self._closed or self.draining or self._stopped_waiting

    def check_calling(self, method: str) -> None:
        """Raises CallCancelledError if no call may begin here."""
        if self.draining and not is_in_call():
            raise CallCancelledError(
                f"{self.where(method)}: this node was asked to stop; it makes no new calls"
            )

    def unknown(self, method: str) -> UnknownMethodError:
        """Returns the error of a method that the server lacks."""
        error = UnknownMethodError(
            f"{self.options.where}: {self.options.serves or 'the server'} has "
            + describe_unknown(method, sorted(self._known_methods() or ()))
            + ("; this is a client already" if method == "dereference" else "")
        )
        error.name = method  # so that Python, which would ask the client, makes no proposal besides
        return error

    def where(self, method: str) -> str:
        """Names a method of this server, for messages."""
        return f"{self.options.where}: {method}"

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Sends a call, waits for it, and returns or raises its outcome; as `submit` and `finish`."""
        lane = self._lane
        if lane is None or self.draining or self.options.timeout_s is not None:
            return self.finish(self.submit(method, args, kwargs), method)
        clear_up()
        try:
            answer = lane.ask(method, args, kwargs)
        except SerializationError as error:
            raise _cannot_send(method, error) from error.__cause__
        if not isinstance(answer, Parcel):
            return self.finish(answer, method)
        try:
            return unpack(answer)
        except SerializationError as error:
            raise unreadable(self.where(method), error) from error.__cause__

    def submit(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, blocking: bool = True
    ) -> PendingCall:
        """Sends a call.

        Args:
            method: Which.
            args: Its arguments.
            kwargs: Its arguments.
            blocking: Whether the caller is going to wait at once.

        Raises:
            SerializationError: The arguments cannot be pickled.
            CallCancelledError: No calls may begin here.
        """
        if self.draining:
            self.check_calling(method)
        clear_up()
        try:
            return (self._lane or self.lane()).submit(
                method, args, kwargs, self.options.timeout_s, blocking=blocking
            )
        except SerializationError as error:
            raise _cannot_send(method, error) from error.__cause__

    def attempt(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        """Sends a call that may have begun elsewhere, so that only a closed client refuses it.

        Args are those of `submit`; `timeout_s` is what is left of its timeout.

        Raises:
            SerializationError: The arguments cannot be pickled.
            CallCancelledError: The client was closed.
        """
        clear_up()
        try:
            return (self._lane or self.lane()).submit(
                method, args, kwargs, timeout_s, blocking=blocking
            )
        except SerializationError as error:
            raise _cannot_send(method, error) from error.__cause__

    def forward(self, method: str, arguments: Parcel) -> PendingCall:
        """Sends a call whose arguments are packed already; no thread waits for it here.

        Raises:
            CallCancelledError: No calls may begin here.
        """
        if self.draining:
            self.check_calling(method)
        clear_up()
        return (self._lane or self.lane()).forward(method, arguments, self.options.timeout_s)

    def finish(self, pending: PendingCall, method: str) -> Any:
        """Waits for a call and returns or raises its outcome."""
        return pending.wait().result(self.options.where, method)

    def lists(self, method: str) -> bool:
        """Returns whether the server has listed a method."""
        return method in (self._known_methods() or ())

    def lacks(self, method: str) -> bool:
        """Returns whether the server is known not to have a method.

        It is asked, because it may have more than it has listed. If it has listed none, or does not
        answer soon, nothing is known.
        """
        known = self._known_methods()
        if known is None or method in known:
            return False
        asked = self._ask_methods()
        return asked is not None and method not in asked

    def methods(self) -> frozenset[str]:
        """Returns the names of methods, as far as they can be known soon. Never raises."""
        return self._ask_methods() or self._known_methods() or frozenset()

    def _known_methods(self) -> frozenset[str] | None:
        try:
            return (self._lane or self.lane()).methods
        except CallCancelledError:
            return None

    def _ask_methods(self) -> frozenset[str] | None:
        """Asks the server; None if it does not answer soon."""
        try:
            self.check_calling("methods")
            pending = self.attempt(LIST_METHODS, (), {}, _ASK_S, blocking=True)
            names = frozenset(self.finish(pending, "methods"))
            self.lane().methods = names
        except Exception:  # noqa: BLE001 - whatever it is, nothing is known
            return None
        return names

    def run_aside(self, task: Callable[[], None]) -> None:
        """Runs what may block in a thread of its own, or here if the system gives none."""
        if self._callbacks.submit(task).cancelled():
            task()


def _cannot_send(method: str, error: SerializationError) -> SerializationError:
    return SerializationError(f"the arguments of {method!r} cannot be pickled: {error}")


class _TimedView(Connection):
    """A connection under another timeout. Thread-safe.

    It has no lane of its own, so that to make one costs no handshake. What is asked of the lane
    holds for all that share it; only `close` and `stop_calling` are its own.
    """

    def __init__(self, options: ClientOptions, base: Connection) -> None:
        self._base = base
        super().__init__(options)

    def _start_anew(self) -> None:
        super()._start_anew()
        #: What fails when this is closed, because the lane continues.
        self._pending: weakref.WeakSet[PendingCall] = weakref.WeakSet()

    def lane(self) -> Lane:
        self._check_open()
        return self._base.lane()

    def _known_methods(self) -> frozenset[str] | None:
        return self._base._known_methods()

    def with_timeout(self, timeout_s: float | None) -> Connection:
        return self._base.with_timeout(timeout_s)

    def close(self, reason: str = "") -> None:
        super().close(reason)
        with self._lock:
            pending = list(self._pending)
        for call in pending:
            if not call.is_settled:
                call.cancel()

    def stop_waiting(self) -> None:
        self._base.stop_waiting()

    def move(self, address: str) -> None:
        self._base.move(address)

    def reconnect(self) -> None:
        self._base.reconnect()

    def check_calling(self, method: str) -> None:
        self._check_open()
        self._base.check_calling(method)
        super().check_calling(method)

    def submit(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, blocking: bool = True
    ) -> PendingCall:
        self.check_calling(method)
        return self._tracked(super().submit(method, args, kwargs, blocking=blocking))

    def attempt(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        return self._tracked(super().attempt(method, args, kwargs, timeout_s, blocking=blocking))

    def forward(self, method: str, arguments: Parcel) -> PendingCall:
        self.check_calling(method)
        return self._tracked(super().forward(method, arguments))

    def _tracked(self, call: PendingCall) -> PendingCall:
        with self._lock:
            self._pending.add(call)
        if self._closed and not call.is_settled:
            call.cancel()
        return call

    def finish(self, pending: PendingCall, method: str) -> Any:
        result = super().finish(pending, method)
        if self._closed and isinstance(result, RemoteIterator):
            # It may have begun just when it was to be cancelled.
            result.close()
            self._check_open()
        return result


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def _survive_fork() -> None:
    for connection in list(_connections):
        connection.survive_fork()


os.register_at_fork(after_in_child=_survive_fork)
