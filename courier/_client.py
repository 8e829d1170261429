"""Clients that look like the object they call.

A client has no methods of its own that could hide one of the object: what acts
on a client is a function (`close`, `list_methods`, `wait_until_ready`).
"""

import concurrent.futures
import datetime as dt
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar, cast

from courier._address import split_address
from courier._connection import Connection
from courier._dispatch import LIST_METHODS
from courier._future import Callback, CallFuture
from courier._options import ClientOptions
from courier._outcomes import RemoteIterator
from courier._remote import Remote
from courier._secret import Secret
from courier._timing import DEFAULT, Timing
from courier._tls import KEEPALIVE_S, TlsCredentials
from courier.errors import RemoteError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Timeout = float | dt.timedelta | None


class _View:
    """One way to call the methods of an object; each attribute is a method."""

    __slots__ = ("__dict__", "__weakref__", "_connection")

    _connection: Connection
    #: Calls a method of this name, with these arguments.
    _call: Callable[..., Any]

    def __init__(self, connection: Connection) -> None:
        object.__setattr__(self, "_connection", connection)

    def __getattr__(self, name: str) -> "RemoteMethod":
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private and cannot be called from afar")
        connection = self._connection
        method = RemoteMethod(type(self)._call, connection, name)
        if connection.lists(name):
            # The next call finds it at once. It knows the connection only, not this view, which
            # would live until the next garbage collection.
            self.__dict__[name] = method
        elif connection.lacks(name):
            raise connection.unknown(name)
        return method

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set: a client has only the methods of its object")

    def __dir__(self) -> list[str]:
        # Not what was found before: the server may be another one by now.
        return sorted({*dir(type(self)), *self._connection.methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)._call(self._connection, "__call__", *args, **kwargs)


class RemoteMethod(functools.partial[Any]):
    """A method of a remote object, called in the way of the view it came from."""

    __slots__ = ()

    @property
    def connection(self) -> Connection:
        """What it is called by."""
        return self.args[0]  # type: ignore[no-any-return]

    @property
    def __name__(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self.connection.options.where}>"


def _call_later(connection: Connection, method: str, /, *args: Any, **kwargs: Any) -> CallFuture:
    return CallFuture(connection, connection.submit(method, args, kwargs, blocking=False), method)


class _Futures(_View):
    """`client.futures`: calls return a future at once."""

    __slots__ = ()

    _call = staticmethod(_call_later)


class _AioCall(Coroutine[Any, Any, Any]):
    """A call as a coroutine, which begins when it is awaited; `async for` reads a generator."""

    __slots__ = ("__name__", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], method: str) -> None:
        self._coroutine = coroutine
        self.__name__ = method
        # Python names it in its warning of a coroutine that was never awaited.
        cast("Any", coroutine).__qualname__ = f"client.aio.{method}"

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        items = await self._coroutine
        if not isinstance(items, RemoteIterator):
            raise TypeError(f"{self.__name__} returned {items!r}, and is no generator")
        try:
            async for item in items:
                yield item
        finally:
            items.close()


async def _answer_to(
    connection: Connection, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    future = _AioFuture(connection, connection.submit(method, args, kwargs), method)
    import asyncio

    return await asyncio.wrap_future(future)


def _call_aio(connection: Connection, method: str, /, *args: Any, **kwargs: Any) -> _AioCall:
    return _AioCall(_answer_to(connection, method, args, kwargs), method)


class _Aio(_View):
    """`client.aio`: calls can be awaited; those of generators can be read by `async for`."""

    __slots__ = ()

    _call = staticmethod(_call_aio)


class _AioFuture(CallFuture):
    """What asyncio can wrap."""

    def add_done_callback(self, fn: Callback) -> None:
        # Only asyncio adds one, and it does not block: no need for another thread.
        self.hurry()
        self.note_read()
        concurrent.futures.Future.add_done_callback(self, fn)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        # The first would end the coroutine, the second look as if its task were cancelled.
        if isinstance(error, StopIteration) or type(error) is concurrent.futures.CancelledError:
            converted = RemoteError(type(error).__qualname__, str(error))
            converted.__cause__ = error.__cause__
            return converted
        return error


class Client(_View, Remote[Any]):
    """Calls the public methods of a served object as if it were here.

    `client.m(...)` blocks and returns what the method returns or raises what it
    raises; `client.futures.m(...)` returns a future at once; `client.aio.m(...)`
    is awaitable. A generator method returns an iterator over its items, which `async for` reads
    from `client.aio.m(...)`. Async methods and generators are called as others are.

    `dir(client)` lists the methods, if the server answers within half a second. A name that is no
    method raises UnknownMethodError, also an AttributeError, as soon as a connection is there; before,
    any name is taken for a method.

    Large arrays are sent from their own memory, not from a copy: change one only
    after its call has been answered.

    Connects at the first call, reconnects by itself, and may be shared between
    threads, pickled, and used after a fork. A call runs at most once; only where the server marks
    its method `courier.idempotent` it may run again, when the connection breaks.

    Every call can raise, besides what the method itself raises, the errors of
    `courier.errors`.

    Example:
        client = courier.Client("127.0.0.1:4711", secret=secret)
        total = client.add(1, 2)
    """

    __slots__ = ()

    _call = staticmethod(Connection.call)

    def __init__(
        self,
        address: str,
        *,
        secret: Secret | None = None,
        call_timeout_s: Timeout = None,
        wait_for_ready: bool = True,
        compress: bool = False,
        tls: TlsCredentials | None = None,
        keepalive_s: float = KEEPALIVE_S,
        call_timeout: Timeout = None,
        timing: Timing = DEFAULT,
        name: str = "",
        serves: str = "",
    ) -> None:
        """Makes a client; does not connect yet.

        Args:
            address: `host:port` of the server.
            secret: The secret of the server. Without secret and `tls`, only servers of the same
                user on this machine are trusted.
            call_timeout_s: Seconds (int, float or timedelta) until a call fails with
                CallTimeoutError; None and 0 mean never. Covers all items of a generator.
            wait_for_ready: Whether a call waits for a server that is not up (yet); otherwise
                it raises ServerUnreachableError.
            compress: Whether to compress (zlib) what is sent to another machine or process.
            tls: Certificates, where the server has some. They are never pickled: a pickled client
                works in processes that made credentials of the same authority.
            keepalive_s: Seconds until a connection is given up whose other machine is silent.
            call_timeout: Launchpad's name of `call_timeout_s`.
            timing: How long internals wait; for tests.
            name: What errors and `repr` call the server, like "learner[0]"; empty for its address.
            serves: The name of the served class, for `repr`.

        Raises:
            TypeError: The timeout is no number or timedelta, or is given under both names.
            ValueError: `address` is not host:port, the timeout is negative, or `keepalive_s` is
                not above 0.
        """
        split_address(address)
        if not keepalive_s > 0:
            raise ValueError(f"a connection cannot be kept alive for {keepalive_s} s")
        if call_timeout_s is not None and call_timeout is not None:
            raise TypeError("call_timeout is Launchpad's name of call_timeout_s; give one of them")
        options = ClientOptions(
            address,
            secret,
            timeout_seconds(call_timeout if call_timeout_s is None else call_timeout_s),
            wait_for_ready,
            compress,
            tls,
            keepalive_s,
            timing,
            name,
            serves,
        )
        super().__init__(Connection(options))

    @property
    def address(self) -> str:
        """Where the server listens: `host:port`."""
        return self._connection.options.address

    @functools.cached_property
    def futures(self) -> Any:
        """The same methods, each returning a `concurrent.futures.Future`."""
        return _Futures(self._connection)

    @functools.cached_property
    def aio(self) -> Any:
        """The same methods, each a coroutine, which begins when it is awaited or made a task.

        Of a generator, `async for item in client.aio.m()` reads the items.
        """
        return _Aio(self._connection)

    def __reduce__(self) -> tuple[Callable[[ClientOptions], "Client"], tuple[ClientOptions]]:
        return client_from_options, (self._connection.options,)

    def __repr__(self) -> str:
        options = self._connection.options
        what = options.name or repr(options.address)
        return f"Client({what}: {options.serves})" if options.serves else f"Client({what})"


def client_from_options(options: ClientOptions) -> Client:
    """Makes a client from what its pickle keeps."""
    return _client_of(Connection(options))


def _client_of(connection: Connection) -> Client:
    client = Client.__new__(Client)
    _View.__init__(client, connection)
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
    """Returns what stands behind a client, and behind all that is made of it.

    It lives as long as the client, a view or a method of it, or a future is used. Functions that
    take a client take it as well. For code that tells clients something and does not keep them.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        clients = weakref.WeakSet([courier.connection_of(client)])
        for connection in clients:
            courier.stop_waiting(connection)
    """
    if isinstance(client, Connection):
        return client
    if not isinstance(client, Client):
        raise TypeError(f"expected a courier client, got {type(client).__qualname__}")
    return client._connection


def credentials(client: object) -> tuple[Secret | None, TlsCredentials | None]:
    """Returns what a client proves itself with, for making other clients and for handing it on.

    Whoever has it can call all servers of the program that the client belongs to, and can pass
    for one of them: hand it on by a private channel only.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        secret, tls = courier.credentials(client)
        other = courier.Client("10.0.0.7:4711", secret=secret, tls=tls)
    """
    options = connection_of(client).options
    return options.secret, options.tls


def close(client: object, reason: str = "") -> None:
    """Closes a client: its pending calls fail with CallCancelledError, later ones too.

    Safe to call twice and from any thread.

    Args:
        client: A courier client.
        reason: What the errors say, besides which server it was; by default that it was closed.

    Example:
        client = courier.Client("127.0.0.1:4711")
        try:
            client.add(1, 2)
        finally:
            courier.close(client)
    """
    connection_of(client).close(reason)


def stop_waiting(client: object) -> None:
    """Makes a client wait for no server any more: for servers that do not come back.

    Calls that wait for one, and later ones that find none, raise ServerUnreachableError. Calls
    that a server has are not touched. Safe to call twice and from any thread.

    Example:
        courier.stop_waiting(client)  # its server does not come back
    """
    connection_of(client).stop_waiting()


def move(client: object, address: str) -> None:
    """Makes a client follow its server to another address.

    From now on `client.address` is the new one, and calls go there, or wait there until the server
    answers; those that wait already do so, too. The connection to the old address is given up:
    calls in flight, and generators that are read, raise ServerLostError at once, as when a server
    is lost. Calls to methods marked `courier.idempotent` are repeated at the new address under the
    same conditions as then: they came by a connection, and the client waits for servers.

    What was asked of the client before holds at the new address: one that was told to
    `stop_waiting` or `stop_calling`, or was closed, stays so. Clients that were made of it by
    `with_timeout` move along; pickles that were made of it before do not. To move to where the
    client is already does nothing. Safe from any thread; of two moves at a time one comes last.

    Args:
        client: A courier client.
        address: `host:port` of the server from now on.

    Raises:
        TypeError: `client` is no courier client.
        ValueError: `address` is not host:port.

    Example:
        courier.move(client, "10.0.0.7:4711")
    """
    connection = connection_of(client)
    split_address(address)
    connection.move(address)


def reconnect(client: object) -> None:
    """Gives the present connection of a client up, because its server is known to be gone.

    For who knows more than the connection shows: a machine that is cut off leaves connections that
    look alive for `keepalive_s`. Calls in flight, and generators that are read, raise
    ServerLostError at once, as when a server is lost; the next call connects again. Safe from any
    thread.

    Args:
        client: A courier client.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        courier.reconnect(client)  # the machine of its server is known to be gone
    """
    connection_of(client).reconnect()


def stop_calling(client: object) -> None:
    """Makes a client begin no more calls: for a node that is to end.

    From now on they raise CallCancelledError at once. Calls in flight, and generators that are
    read, go on to their end. A handler that answers a call of its own server may still call, in
    the thread and context it was called in, so that its answer can be finished.

    Does not imply `stop_waiting`: calls in flight may still wait for a server. Clients made of it by
    `with_timeout` begin no calls either; one that is unpickled does. Cannot be undone.
    Safe to call twice, from any thread, and from finalizers.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        courier.stop_calling(client)
    """
    connection_of(client).stop_calling()


def wait_for_futures(client: object, timeout_s: float | None = None) -> list[str]:
    """Waits until the calls have ended that `client.futures` has made so far, read or unread.

    Includes those of clients that `with_timeout` made of it. Safe from any thread.

    Args:
        client: A courier client.
        timeout_s: Seconds to wait at most; None waits for ever, 0 only looks.

    Returns:
        The server and the method of each call that has not ended.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        for item in items:
            client.futures.push(item)
        unanswered = courier.wait_for_futures(client, timeout_s=10)
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    calls = connection_of(client).open_futures()
    for call in calls:
        call.hurry()
    return [call.where for call in calls if not call.wait_until(deadline)]


def list_methods(client: object) -> list[str]:
    """Returns the names of all methods of the served object, sorted.

    Raises:
        CourierError: As any call.

    Example:
        print(courier.list_methods(client))  # ['add', 'get']
    """
    connection = connection_of(client)
    return cast("list[str]", connection.finish(connection.submit(LIST_METHODS, (), {}), "methods"))


def with_timeout(client: R, timeout_s: Timeout) -> R:
    """Returns the same client with another timeout, over the same connection.

    To make one takes microseconds: in a loop is fine. What is done to the client holds for it, too.
    It may be closed and told to `stop_calling` by itself; `move`, `reconnect` and `stop_waiting` of
    it are those of the client. Generators that it reads when it is closed go on to their end.

    Args:
        client: A courier client.
        timeout_s: As `call_timeout_s` of `Client`.

    Raises:
        TypeError: `client` is no courier client, or the timeout no number or timedelta.
        ValueError: The timeout is negative.

    Example:
        params = courier.with_timeout(learner, 2.0).params()
    """
    connection = connection_of(client)
    view = connection.with_timeout(timeout_seconds(timeout_s))
    copy = _client_of(view)
    if connection.draining:
        stop_calling(copy)
    return cast("R", copy)


def wait_until_ready(client: object, timeout_s: Timeout = None) -> None:
    """Waits until the server answers.

    Raises:
        CallTimeoutError: It did not within `timeout_s`, a number or a timedelta.
        AuthenticationError: It does not hold the secret of the client.
        CallCancelledError: The client begins no more calls (`stop_calling`).

    Example:
        courier.wait_until_ready(client, timeout_s=30)
    """
    connection = connection_of(client)
    connection.check_calling("wait_until_ready")
    options = {"wait_for_ready": True, "timeout_s": timeout_seconds(timeout_s)}
    waiting = _client_of(connection.derive(**options))
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

    Example:
        future = courier.submit(learner.step, 0.1)
        loss = future.result()
    """
    connection, name = _parts_of(method)
    future = _call_later(connection, name, *args, **kwargs)
    return cast("concurrent.futures.Future[R]", future)


async def call_aio(method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `client.m` for asyncio: what `await client.aio.m(1)` does, given `client.m` and 1.

    It exists for type checkers, which follow it from the method to its result.

    Raises:
        TypeError: `method` does not come from a courier client.

    Example:
        async def step():
            return await courier.call_aio(learner.step, 0.1)
    """
    connection, name = _parts_of(method)
    return cast("R", await _answer_to(connection, name, args, kwargs))


def _parts_of(method: Callable[..., Any]) -> tuple[Connection, str]:
    if not isinstance(method, RemoteMethod):
        raise TypeError(f"expected a method of a courier client, got {method!r}")
    return method.connection, method.__name__


def as_remote(client: T) -> Remote[T]:
    """Returns the client itself, for type checkers that take it for the object it calls.

    `learner = courier.as_remote(handle.dereference())` has `learner.futures` and `learner.aio`.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        learner = courier.as_remote(handle.dereference())
        loss = learner.futures.step(0.1)
    """
    connection_of(client)
    return cast("Remote[T]", client)
