"""Clients that look like the object they call.

A client has no methods of its own that could hide one of the object: what acts
on a client is a function (`close`, `list_methods`, `wait_until_ready`).
"""

import asyncio
import concurrent.futures
import datetime as dt
import logging
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, cast

from courier._address import split_address
from courier._dispatch import LIST_METHODS
from courier._lane import (
    Lane,
    LaneOptions,
    PendingCall,
    Streams,
    iterate,
    open_lane,
    value_of,
)
from courier._parcel import pack
from courier._pool import HandlerPool
from courier._secret import Secret
from courier.errors import (
    CallCancelledError,
    RemoteError,
    SerializationError,
)

P = ParamSpec("P")
R = TypeVar("R")

_Callback = Callable[[concurrent.futures.Future[Any]], object]

_log = logging.getLogger(__name__)

#: Callbacks of futures that may run, or block, at the same time.
_CALLBACK_THREADS = 64
#: A closed client leaves no thread behind for long.
_CALLBACK_IDLE_S = 0.5

Timeout = float | dt.timedelta | None


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client was made; everything that its pickle keeps."""

    address: str
    secret: Secret | None
    timeout_s: float | None
    wait_for_ready: bool
    compress: bool


class Connection:
    """What all copies and views of one client share. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self._lane: Lane | None = None
        self._closed = False
        self._start_anew()
        _connections.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._callbacks = HandlerPool(
            "courier-callback", _CALLBACK_THREADS, 0, idle_s=_CALLBACK_IDLE_S
        )

    def survive_fork(self) -> None:
        """Forgets, in a forked child, what belongs to the parent: the child connects anew."""
        if self._lane is not None:
            # Kept: what is half of a parent's connection had better not be torn down.
            _lanes_of_parents.append(self._lane)
        self._lane = None
        self._start_anew()

    def lane(self) -> Lane:
        """Returns the open lane, opening it first if needed."""
        with self._lock:
            if self._closed:
                raise CallCancelledError(
                    f"the client of {self.options.address} is closed; make a new one"
                )
            if self._lane is None:
                options = self.options
                self._lane = open_lane(
                    LaneOptions(
                        options.address, options.secret, options.wait_for_ready, options.compress
                    )
                )
            return self._lane

    def close(self) -> None:
        with self._lock:
            lane, self._lane, self._closed = self._lane, None, True
        if lane is not None:
            lane.close()

    def stop_waiting(self) -> None:
        """Has calls fail, instead of wait, where no server answers."""
        with self._lock:
            self.options = replace(self.options, wait_for_ready=False)
            lane = self._lane
        if lane is not None:
            lane.stop_waiting()

    def where(self, method: str) -> str:
        """Names a method of this server, for messages."""
        return f"{self.options.address}: {method}"

    def submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall:
        """Sends a call."""
        try:
            arguments = pack((args, kwargs))
        except SerializationError as error:
            raise SerializationError(
                f"the arguments of {method!r} cannot be pickled: {error}"
            ) from error.__cause__
        return self.lane().submit(method, arguments, self.options.timeout_s)

    def finish(self, pending: PendingCall, method: str) -> Any:
        """Waits for a call and returns or raises its outcome."""
        reply = pending.wait()
        if isinstance(reply, Streams):
            return RemoteIterator(iterate(reply.stream, self.where(method)), reply.stream.close)
        return value_of(reply, self.where(method))

    def run_aside(self, task: Callable[[], None]) -> None:
        """Runs what may block in a thread of its own."""
        self._callbacks.submit(task)


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_lanes_of_parents: list[Lane] = []


def _survive_fork() -> None:
    for connection in list(_connections):
        connection.survive_fork()


os.register_at_fork(after_in_child=_survive_fork)


class RemoteIterator(Iterator[Any]):
    """The items of a remote generator, one by one, as they come.

    The generator runs ahead of its reader by what fits into the connection.
    Not thread-safe. Ends the generator when closed or no longer referenced.
    """

    def __init__(self, items: Iterator[Any], close: Callable[[], None]) -> None:
        self._items = items
        self._close = close

    def __next__(self) -> Any:
        return next(self._items)

    def close(self) -> None:
        """Ends the generator early."""
        self._close()

    def __del__(self) -> None:
        self._close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        end = object()
        try:
            while (item := await asyncio.to_thread(next, self._items, end)) is not end:
                yield item
        finally:
            # Also wakes the thread that waits for an item when this task was cancelled.
            self._close()


class CallFuture(concurrent.futures.Future[Any]):
    """A call in flight. `cancel()` reaches the handler, as `current_call().cancelled`.

    Callbacks may block, and call the same server: they run in threads of their own.
    """

    def __init__(self, connection: Connection, pending: PendingCall, method: str) -> None:
        super().__init__()
        self._connection = connection
        self._method = method
        #: The call, until it has ended or was cancelled: taking it out is atomic.
        self._pending = [pending]
        pending.when_done(self._settle)

    def add_done_callback(self, fn: _Callback) -> None:
        """As `concurrent.futures.Future.add_done_callback`."""
        super().add_done_callback(lambda _: _call_or_defer(fn, self))

    def cancel(self) -> bool:
        """Gives the call up. Returns False if its answer is already here."""
        if not super().cancel():
            return False
        try:
            pending = self._pending.pop()
        except IndexError:
            return True  # cancelled before
        # Those who wait for several futures hear of a cancellation only now.
        self.set_running_or_notify_cancel()
        pending.cancel()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """As `concurrent.futures.Future.result`; a cancelled call is a CallCancelledError."""
        try:
            return super().result(timeout)
        except concurrent.futures.CancelledError:
            if not self.cancelled():
                raise  # by the method, or by closing the client
            raise self._cancellation() from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`."""
        try:
            return super().exception(timeout)
        except concurrent.futures.CancelledError:
            raise self._cancellation() from None

    def _cancellation(self) -> CallCancelledError:
        return CallCancelledError(f"{self._connection.where(self._method)}: the call was cancelled")

    def _settle(self, pending: PendingCall) -> None:
        # This thread brings the answers of all calls; a callback must not hold it up.
        callbacks: list[_Callback] = []
        _deferring.callbacks = callbacks
        try:
            self._take_outcome(pending)
        finally:
            _deferring.callbacks = None
        if callbacks:
            self._connection.run_aside(lambda: _run_callbacks(callbacks, self))

    def _take_outcome(self, pending: PendingCall) -> None:
        try:
            try:
                result = self._connection.finish(pending, self._method)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                self.set_exception(error)
            else:
                self.set_result(result)
        except concurrent.futures.InvalidStateError:
            return  # cancelled in the meantime
        # The answer's raw bytes are not needed as long as the future is.
        self._pending.clear()


_deferring = threading.local()


def _call_or_defer(callback: _Callback, future: CallFuture) -> None:
    callbacks: list[_Callback] | None = getattr(_deferring, "callbacks", None)
    if callbacks is None:
        callback(future)
    else:
        callbacks.append(callback)


def _run_callbacks(callbacks: list[_Callback], future: CallFuture) -> None:
    for callback in callbacks:
        try:
            callback(future)
        except Exception:  # noqa: BLE001 - as the standard library: logged, others still run
            _log.exception("a callback of %r failed", future)


class _View:
    """One way to call the methods of an object; each attribute is a method."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> "RemoteMethod":
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private and cannot be called from afar")
        return RemoteMethod(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)


class RemoteMethod:
    """A method of a remote object, called in the way of the view it came from."""

    __slots__ = ("__name__", "_view")

    def __init__(self, view: _View, name: str) -> None:
        self._view = view
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._view._call(self.__name__, args, kwargs)

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._view._connection.options.address}>"


class _Futures(_View):
    """`client.futures`: calls return a future at once."""

    __slots__ = ()

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        pending = self._connection.submit(method, args, kwargs)
        return CallFuture(self._connection, pending, method)


class _Aio(_View):
    """`client.aio`: calls are awaitable; a generator is an async iterator once awaited."""

    __slots__ = ()

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pending = self._connection.submit(method, args, kwargs)
        future = _AioFuture(self._connection, pending, method)
        return await asyncio.wrap_future(future)


class _AioFuture(CallFuture):
    """What asyncio can wrap."""

    def add_done_callback(self, fn: _Callback) -> None:
        # Only asyncio adds one, and it does not block: no need for another thread.
        concurrent.futures.Future.add_done_callback(self, fn)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        # The first would end the coroutine, the second look as if its task were cancelled.
        if isinstance(error, StopIteration) or type(error) is concurrent.futures.CancelledError:
            converted = RemoteError(type(error).__qualname__, str(error))
            converted.__cause__ = error.__cause__
            return converted
        return error


class Client(_View):
    """Calls the public methods of a served object as if it were here.

    `client.m(...)` blocks and returns what the method returns or raises what it
    raises; `client.futures.m(...)` returns a future at once; `client.aio.m(...)`
    is awaitable. A generator method returns an iterator over its items.

    Large arrays are sent from their own memory, not from a copy: change one only
    after its call has been answered.

    Connects at the first call, reconnects by itself, and may be shared between
    threads, pickled, and used after a fork. A call runs at most once.

    Every call can raise, besides what the method itself raises, the errors of
    `courier.errors`.

    Example:
        client = courier.Client("127.0.0.1:4711", secret=secret)
        total = client.add(1, 2)
    """

    __slots__ = ("__weakref__",)

    def __init__(
        self,
        address: str,
        *,
        secret: Secret | None = None,
        call_timeout: Timeout = None,
        wait_for_ready: bool = True,
        compress: bool = False,
    ) -> None:
        """Makes a client; does not connect yet.

        Args:
            address: `host:port` of the server.
            secret: The secret of the server, if it has one.
            call_timeout: Seconds (int, float or timedelta) until a call fails with
                CallTimeoutError; None and 0 mean never. Covers all items of a generator.
            wait_for_ready: Whether a call waits for a server that is not up (yet); otherwise
                it raises ServerUnreachableError.
            compress: Whether to compress (gzip) what is sent.

        Raises:
            ValueError: `address` is not host:port, or the timeout is negative.
        """
        split_address(address)
        options = ClientOptions(
            address, secret, timeout_seconds(call_timeout), wait_for_ready, compress
        )
        super().__init__(Connection(options))

    @property
    def address(self) -> str:
        """Where the server listens: `host:port`."""
        return self._connection.options.address

    @property
    def futures(self) -> Any:
        """The same methods, each returning a `concurrent.futures.Future`."""
        return _Futures(self._connection)

    @property
    def aio(self) -> Any:
        """The same methods, each awaitable."""
        return _Aio(self._connection)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._connection.finish(self._connection.submit(method, args, kwargs), method)

    def __reduce__(self) -> tuple[Callable[[ClientOptions], "Client"], tuple[ClientOptions]]:
        return client_from_options, (self._connection.options,)

    def __repr__(self) -> str:
        return f"courier.Client({self.address!r})"


def client_from_options(options: ClientOptions) -> Client:
    """Makes a client from what its pickle keeps."""
    client = Client.__new__(Client)
    _View.__init__(client, Connection(options))
    return client


def timeout_seconds(timeout: Timeout) -> float | None:
    """Converts a timeout as users give it; None and 0 mean none.

    Raises:
        TypeError: Not a number or timedelta.
        ValueError: Negative.
    """
    if timeout is None:
        return None
    if isinstance(timeout, dt.timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"a timeout is a number of seconds or a timedelta, not {timeout!r}")
    if timeout < 0 or timeout != timeout:
        raise ValueError(f"a timeout cannot be {timeout} s")
    return None if timeout in (0, math.inf) else float(timeout)


def connection_of(client: object) -> Connection:
    """Returns what stands behind a client.

    Raises:
        TypeError: `client` is no courier client.
    """
    if not isinstance(client, Client):
        raise TypeError(f"expected a courier client, got {type(client).__qualname__}")
    return client._connection


def close(client: object) -> None:
    """Closes a client: its pending calls fail with CallCancelledError, later ones too.

    Safe to call twice and from any thread.
    """
    connection_of(client).close()


def stop_waiting(client: object) -> None:
    """Has a client wait for no server any more: for when those it calls do not come back.

    Calls that wait for one, and later ones that find none, raise ServerUnreachableError. Calls
    that a server has are not touched. Safe to call twice and from any thread.
    """
    connection_of(client).stop_waiting()


def list_methods(client: object) -> list[str]:
    """Returns the names of all methods of the served object, sorted.

    Raises:
        CourierError: As any call.
    """
    connection = connection_of(client)
    return cast("list[str]", connection.finish(connection.submit(LIST_METHODS, (), {}), "methods"))


def with_timeout(client: R, call_timeout: Timeout) -> R:
    """Returns a client of the same server with another timeout."""
    options = replace(connection_of(client).options, timeout_s=timeout_seconds(call_timeout))
    return cast("R", client_from_options(options))


def wait_until_ready(client: object, timeout: Timeout = None) -> None:
    """Waits until the server answers.

    Raises:
        CallTimeoutError: It did not within `timeout`.
        AuthenticationError: It does not hold the secret of the client.
    """
    options = replace(
        connection_of(client).options, wait_for_ready=True, timeout_s=timeout_seconds(timeout)
    )
    waiting = client_from_options(options)
    try:
        list_methods(waiting)
    finally:
        close(waiting)


def submit(
    method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> "concurrent.futures.Future[R]":
    """Calls `client.m` without waiting: `submit(client.m, 1)` is `client.futures.m(1)`.

    It exists for type checkers, which follow it from the method to the future.

    Raises:
        TypeError: `method` does not come from a courier client.
    """
    if not isinstance(method, RemoteMethod):
        raise TypeError(f"expected a method of a courier client, got {method!r}")
    view = method._view
    future = _Futures(view._connection)._call(method.__name__, args, kwargs)
    return cast("concurrent.futures.Future[R]", future)
