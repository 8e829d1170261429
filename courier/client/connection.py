"""The connection behind a client: its lane, its timeout, and whether it is closed."""

from collections.abc import Callable
from typing import Any

from courier.calls.context import is_in_call
from courier.calls.dispatch import DESCRIBE_METHOD, LIST_METHODS, describe_unknown
from courier.calls.outcomes import RemoteIterator, unreadable
from courier.calls.pending import PendingCall
from courier.client._dialing import dial
from courier.client._lane import Lane
from courier.client.local import SERVERS
from courier.client.options import ClientOptions
from courier.errors import (
    CallCancelledError,
    SerializationError,
    ServerLostError,
    UnknownMethodError,
)
from courier.threads.abandoned import LEFT, clear_up
from courier.threads.forks import survive
from courier.threads.handler_pool import HandlerPool
from courier.values.parcel import Parcel, pack, unpack
from courier.wire.channel import BrokenError
from courier.wire.frames import call_meta
from courier.wire.stream import ByteStream

#: Callbacks of futures that may run, or block, at the same time.
_CALLBACK_THREADS = 64
#: Seconds after which an idle thread for callbacks ends.
_CALLBACK_IDLE_S = 0.5
#: Seconds that completions, and checks of names, wait for a server.
_ASK_S = 0.5
#: Marks a call that begins here, with all of its timeout.
_ALL: Any = object()
_CLOSED = "the client is closed; make a new one"


class Connection:
    """The state that all copies and views of one client share. Thread-safe.

    A client that `with_timeout` makes shares the lane of the first, its base, so it needs no
    handshake. Operations on the lane hold for all; only `close` and `stop_calling` are its own.
    """

    def __init__(
        self, lane: Lane, timeout_s: float | None, base: "Connection | None" = None
    ) -> None:
        self.lane = lane
        self.timeout_s = timeout_s
        self._base = base
        #: Arguments by name that its calls have besides their own.
        self.more: dict[str, Any] = {}
        #: Why it is closed; empty if it is not.
        self._closed_since = ""
        #: Whether a call must check more than the lane before it begins.
        self._is_limited = timeout_s is not None or base is not None or lane.options.compress
        #: Methods of which an unread failure was logged.
        self.unread = set[str]()
        #: Whether new calls are refused outside of handlers.
        self.draining = False
        self._survive_fork()
        survive(self)

    @classmethod
    def to(cls, options: ClientOptions) -> "Connection":
        return cls(Lane(options), options.timeout_s)

    def _survive_fork(self) -> None:
        self._callbacks = HandlerPool(
            "courier-callback", _CALLBACK_THREADS, 0, idle_s=_CALLBACK_IDLE_S
        )

    @property
    def options(self) -> ClientOptions:
        return self.lane.options._replace(timeout_s=self.timeout_s)

    def __reduce__(self) -> tuple[Callable[[ClientOptions], "Connection"], tuple[ClientOptions]]:
        # For methods of clients
        return Connection.to, (self.options,)

    def with_timeout(self, timeout_s: float | None) -> "Connection":
        view = Connection(self.lane, timeout_s, self._base or self)
        view.more = self.more
        if self.draining:
            view.stop_calling()
        return view

    def open_calls(self) -> list[PendingCall]:
        calls = [call for call in self.lane.open_calls() if not call.is_settled]
        return calls if self._base is None else [call for call in calls if call.owner is self]

    def close(self, reason: str = "") -> None:
        self._closed_since = self._closed_since or reason or _CLOSED
        self._is_limited = True
        if self._base is None:
            self.lane.close(reason or "the client was closed")
            return
        for call in self.open_calls():
            call.cancel()

    def stop_calling(self) -> None:
        """Makes new calls fail, except those that a handler needs for its answer."""
        self.draining = self._is_limited = True

    @property
    def is_ending(self) -> bool:
        """Whether calls may fail because of `close`, `stop_calling` or `stop_waiting`."""
        return bool(self._closed_since) or self.draining or self.lane.stopped_waiting

    def _check_open(self) -> None:
        for each in (self, self._base):
            if each is not None and each._closed_since:
                raise CallCancelledError(f"{self.lane.options.where}: {each._closed_since}")

    def check_calling(self, method: str) -> None:
        self._check_open()
        draining = self.draining or (self._base is not None and self._base.draining)
        if draining and not is_in_call():
            raise CallCancelledError(
                f"{self.where(method)}: this node was asked to stop; it makes no new calls"
            )

    def where(self, method: str) -> str:
        return f"{self.lane.options.where}: {method}"

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Sends a call, waits for it, and returns or raises its outcome; as `submit` and `finish`."""
        lane = self.lane
        if self._is_limited or lane.options.address in SERVERS:
            return self.finish(self.submit(method, args, kwargs))
        if LEFT:
            clear_up()
        try:
            answer = lane.ask(method, pack((args, kwargs)))
        except SerializationError as error:
            raise _cannot_send(method, error) from error.__cause__
        if not isinstance(answer, Parcel):
            return self.finish(answer)
        try:
            return unpack(answer)
        except SerializationError as error:
            raise unreadable(self.where(method), error) from error.__cause__

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        blocking: bool = True,
        left_s: float | None = _ALL,
        waits: bool | None = None,
    ) -> PendingCall:
        """Sends a call; `blocking`: the caller waits at once.

        `left_s` is the rest of the timeout of a call that has begun elsewhere, which only a closed
        client refuses. `waits`: for a server that is not there; by default as the client does.
        """
        if left_s is not _ALL:
            self._check_open()
        else:
            left_s = self.timeout_s
            if self.draining or self._closed_since or self._base is not None:
                self.check_calling(method)
                if self.more and method != LIST_METHODS:
                    kwargs = {**kwargs, **self.more}
        if LEFT:
            clear_up()
        try:
            call = self.lane.submit(method, args, kwargs, left_s, blocking=blocking, waits=waits)
        except SerializationError as error:
            raise _cannot_send(method, error) from error.__cause__
        return call if self._base is None else self._owned(call)

    def forward(self, method: str, arguments: Parcel) -> PendingCall:
        """Sends a call whose arguments are packed already; no thread waits for it here."""
        self.check_calling(method)
        clear_up()
        call = self.lane.send(method, arguments, self.timeout_s, blocking=False)
        return call if self._base is None else self._owned(call)

    def open_stream(self, method: str, args: tuple[Any, ...]) -> ByteStream:
        """Calls a method by a connection of its own; see `lowlevel.open_stream`."""
        self.check_calling(method)
        channel = dial(self.lane.options, self.timeout_s, over_grpc=True).channel
        kind, meta = call_meta(method, None)
        try:
            channel.send(kind, 1, pack((args, self.more)), meta)
        except BrokenError as error:
            raise ServerLostError(f"{self.where(method)}: {error}") from error
        return ByteStream(channel.carrier)

    def _owned(self, call: PendingCall) -> PendingCall:
        """Notes that this ends the call when it is closed, because the lane continues."""
        call.owner = self
        if self._closed_since and not call.is_settled:
            call.cancel()
        return call

    def finish(self, pending: PendingCall) -> Any:
        result = pending.wait().result(pending)
        if self._closed_since and isinstance(result, RemoteIterator):
            # It may have begun just at its cancellation.
            result.close()
            self._check_open()
        return result

    def run_aside(self, task: Callable[[], None]) -> None:
        """Runs a function that may block in another thread, or here if the system gives none."""
        if self._callbacks.submit(task).cancelled():
            task()

    def lacks(self, method: str, waits: bool | None = None) -> bool:
        """Returns whether the server certainly lacks a method.

        It is asked, because it may have more than it has listed. If it has listed none, or does not
        answer soon, the result is False.
        """
        known = self.lane.listed_methods()
        if not known or method in known:
            return False
        asked = self._ask_methods(waits)
        return asked is not None and method not in asked

    def methods(self, waits: bool | None = None) -> frozenset[str]:
        """Returns the names of methods, if the server answers soon. Never raises."""
        return self._ask_methods(waits) or self.lane.listed_methods()

    def describe(self, method: str) -> tuple[Any, Any]:
        return self._ask(DESCRIBE_METHOD, method) or (None, None)

    def _ask_methods(self, waits: bool | None) -> frozenset[str] | None:
        names = self._ask(LIST_METHODS, waits=waits)
        if names is None:
            return None
        self.lane.methods = frozenset(names)
        return self.lane.methods

    def _ask(self, question: str, *args: str, waits: bool | None = None) -> Any:
        """Asks the server; None if it does not answer soon."""
        try:
            self.check_calling(question)
            return self.finish(self.submit(question, args, {}, left_s=_ASK_S, waits=waits))
        except Exception:  # noqa: BLE001 - after any error, nothing is known
            return None

    def unknown(self, method: str) -> UnknownMethodError:
        options = self.lane.options
        error = UnknownMethodError(
            f"{options.where}: {options.serves or 'the server'} has "
            + describe_unknown(method, sorted(self.lane.listed_methods()))
            + ("; this is a client already" if method == "dereference" else "")
        )
        error.name = method  # so that Python does not ask the client for similar names
        return error


def _cannot_send(method: str, error: SerializationError) -> SerializationError:
    return SerializationError(f"the arguments of {method!r} cannot be pickled: {error}")
