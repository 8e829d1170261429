"""Clients that look like the object they call.

A client has no methods of its own, which could hide those of the object: operations on a client are
functions (`close`, `list_methods`, `wait_until_ready`).
"""

import concurrent.futures
import datetime as dt
import functools
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from courier._timing import DEFAULT, Timing
from courier.calls.dispatch import LIST_METHODS
from courier.calls.outcomes import RemoteIterator
from courier.client.connection import Connection
from courier.client.future import CallFuture
from courier.client.options import ClientOptions
from courier.errors import RemoteError
from courier.values.shared import Shared
from courier.wire.address import split_address
from courier.wire.secret import Secret
from courier.wire.tls import KEEPALIVE_S, TlsCredentials

P = ParamSpec("P")
R = TypeVar("R")

Timeout = float | dt.timedelta | None


class Callee:
    """What `submit` and `call_aio` call: a method of a client or of a pool, or one of these itself."""

    __slots__ = ()

    def _called(self, way: "type[Futures | Aio]") -> Callable[..., Any]:
        raise NotImplementedError


class _MethodView(Generic[R]):
    """One way to call the methods of an object; each attribute is a method."""

    __slots__ = ("__dict__", "__weakref__", "_connection")

    _connection: Connection
    #: Calls a method of this name, with these arguments.
    _call: Callable[..., R]

    def __init__(self, connection: Connection) -> None:
        object.__setattr__(self, "_connection", connection)

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private and cannot be called from afar")
        connection = self._connection
        method = _RemoteMethod(type(self)._call, connection, name)
        if name in connection.lane.listed_methods():
            # Stored, so that the next call finds it at once. It refers to the connection only: with
            # this view, it would live until the next garbage collection.
            self.__dict__[name] = method
        elif connection.lacks(name):
            raise connection.unknown(name)
        return method

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set: a client has only the methods of its object")

    def __dir__(self) -> list[str]:
        # Drops stored methods: the server may be another one by now.
        return sorted({*dir(type(self)), *self._connection.methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return type(self)._call(self._connection, "__call__", *args, **kwargs)


class _RemoteMethod(functools.partial[Any], Callee):
    """A method of a remote object, called in the way of the view it came from."""

    __slots__ = ()

    def _called(self, way: "type[Futures | Aio]") -> Callable[..., Any]:
        return functools.partial(way._call, *self.args)

    @property
    def __name__(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.args[0].describe(self.__name__)[0]

    @property
    def __signature__(self) -> Any:
        """Its signature at the server; what it returns is that of this way to call."""
        import inspect

        _, signature = self.args[0].describe(self.__name__)
        if signature is None:
            raise AttributeError("the server does not tell")
        if self.func is Connection.call:
            return signature
        return signature.replace(return_annotation=inspect.signature(self.func).return_annotation)

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self.args[0].lane.options.where}>"


class Futures(_MethodView[concurrent.futures.Future[Any]]):
    """`client.futures`: calls return a future at once."""

    __slots__ = ()

    @staticmethod
    def _call(connection: Connection, method: str, /, *args: Any, **kwargs: Any) -> CallFuture:
        pending = connection.submit(method, args, kwargs, blocking=False)
        return CallFuture(connection, pending, method)


class AioCall(Coroutine[Any, Any, Any]):
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


async def answer_to(begin: "Callable[[], AioFuture]") -> Any:
    import asyncio

    future = begin()  # `lowlevel.awaited_call` looks at it
    return await asyncio.wrap_future(future)


class Aio(_MethodView[AioCall]):
    """`client.aio`: calls can be awaited; those of generators can be read by `async for`."""

    __slots__ = ()

    @staticmethod
    def _call(connection: Connection, method: str, /, *args: Any, **kwargs: Any) -> AioCall:
        def begin() -> AioFuture:
            return AioFuture(connection, connection.submit(method, args, kwargs), method)

        return AioCall(answer_to(begin), method)


class AioFuture(CallFuture):
    """A future that asyncio can wrap."""

    def _invoke_callbacks(self) -> None:
        # Only asyncio adds a callback, which does not block: it needs no other thread.
        self._run_callbacks()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        # The first would end the coroutine, the second would look like a cancelled task.
        if isinstance(error, StopIteration) or type(error) is concurrent.futures.CancelledError:
            converted = RemoteError(type(error).__qualname__, str(error))
            converted.__cause__ = error.__cause__
            return converted
        return error


class Client(_MethodView[Any], Callee):
    """Calls the public methods of a served object as if it were here.

    `client.m(...)` blocks and returns what the method returns or raises what it
    raises; `client.futures.m(...)` returns a future at once; `client.aio.m(...)`
    is awaitable. A generator method returns an iterator over its items, which `async for` reads
    from `client.aio.m(...)`. Async methods and generators are called as others are.

    `dir(client)` lists the methods, if the server answers within half a second. A name that is no
    method raises UnknownMethodError, also an AttributeError, once there is a connection; before,
    any name counts as a method.

    Large arrays are sent from their own memory, without a copy: change one only after its call was
    answered.

    Connects at the first call, reconnects by itself, and may be shared between
    threads, pickled, and used after a fork. A call runs at most once; only where the server marks
    its method `courier.idempotent` it may run again, when the connection breaks.

    Every call can raise the errors of `courier.errors`, besides those of the method itself.

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
            compress: Whether to compress (zlib) data to other machines and processes.
            tls: Certificates, where the server has some. They are never pickled: a pickled client
                works in processes that made credentials of the same authority.
            keepalive_s: Seconds until a connection to a silent machine is closed.
            call_timeout: Launchpad's name of `call_timeout_s`.
            timing: How long internals wait; for tests.
            name: The name of the server in errors and `repr`, like "learner[0]"; empty for its
                address.
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
        super().__init__(Connection.to(options))

    @property
    def address(self) -> str:
        """Where the server listens: `host:port`."""
        return self._connection.lane.options.address

    @functools.cached_property
    def futures(self) -> Futures:
        """The same methods, each returning a `concurrent.futures.Future`."""
        return Futures(self._connection)

    @functools.cached_property
    def aio(self) -> Aio:
        """The same methods, each a coroutine, which begins when it is awaited or made a task.

        Of a generator, `async for item in client.aio.m()` reads the items.
        """
        return Aio(self._connection)

    def _called(self, way: type[Futures | Aio]) -> Callable[..., Any]:
        return way(self._connection)

    def __reduce__(self) -> tuple[Callable[[ClientOptions], "Client"], tuple[ClientOptions]]:
        # Not the connection: `copy.copy` would share it, and closing the copy would close both.
        return _client_to, (self._connection.options,)

    def __repr__(self) -> str:
        options = self._connection.options
        what = options.name or repr(options.address)
        return f"Client({what}: {options.serves})" if options.serves else f"Client({what})"


def _client_to(options: ClientOptions) -> Client:
    return _client_of(Connection.to(options))


def _client_of(connection: Connection) -> Client:
    client = Client.__new__(Client)
    _MethodView.__init__(client, connection)
    return client


def timeout_seconds(timeout: Timeout) -> float | None:
    """Converts a timeout as users give it, or raises an error; None and 0 mean none."""
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
    """Returns the connection of a client, or a given one; see `courier.lowlevel.connection_of`."""
    if isinstance(client, Connection):
        return client
    if not isinstance(client, Client):
        raise TypeError(f"expected a courier client, got {type(client).__qualname__}")
    return client._connection


def close(client: object, reason: str = "") -> None:
    """Closes a client: its pending calls fail with CallCancelledError, later ones too.

    Safe to call twice and from any thread.

    Args:
        client: A courier client.
        reason: The reason in the errors, beside the server's name; by default that it was closed.

    Example:
        client = courier.Client("127.0.0.1:4711")
        try:
            client.add(1, 2)
        finally:
            courier.close(client)
    """
    connection_of(client).close(reason)


def wait_for_futures(client: object, timeout_s: float | None = None) -> list[str]:
    """Waits for the end of all calls that `client.futures` has made so far, read or unread.

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
    calls = [each for each in connection_of(client).open_calls() if each.is_shared]
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
    return cast("list[str]", connection.finish(connection.submit(LIST_METHODS, (), {})))


def with_timeout(client: R, timeout_s: Timeout) -> R:
    """Returns the same client with another timeout, over the same connection.

    Making one takes microseconds, so do it in loops, too. Operations on the client hold for it as
    well. `close` and `stop_calling` can be applied to it alone; `move`, `reconnect` and
    `stop_waiting` act on both. Generators that it reads when it is closed go on to their end.

    Args:
        client: A courier client.
        timeout_s: As `call_timeout_s` of `Client`.

    Raises:
        TypeError: `client` is no courier client, or the timeout no number or timedelta.
        ValueError: The timeout is negative.

    Example:
        params = courier.with_timeout(learner, 2.0).params()
    """
    view = connection_of(client).with_timeout(timeout_seconds(timeout_s))
    return cast("R", _client_of(view))


def wait_until_ready(client: object, timeout_s: Timeout = None) -> None:
    """Waits until the server answers.

    Raises:
        CallTimeoutError: It did not within `timeout_s`, a number or a timedelta.
        AuthenticationError: It does not hold the secret of the client.
        CallCancelledError: The client is closed, or may begin no more calls.

    Example:
        courier.wait_until_ready(client, timeout_s=30)
    """
    connection, left_s = connection_of(client), timeout_seconds(timeout_s)
    connection.check_calling("wait_until_ready")
    connection.finish(connection.submit(LIST_METHODS, (), {}, left_s=left_s, waits=True))


#: What a method may return in place of the result of its callers.
_Result = Coroutine[Any, Any, R] | concurrent.futures.Future[R] | Shared[R]


@overload
def submit(
    method: Callable[P, _Result[R]], /, *args: P.args, **kwargs: P.kwargs
) -> concurrent.futures.Future[R]: ...
@overload
def submit(
    method: Callable[P, AsyncIterator[R]], /, *args: P.args, **kwargs: P.kwargs
) -> concurrent.futures.Future[Iterator[R]]: ...
@overload
def submit(
    method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> concurrent.futures.Future[R]: ...
def submit(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls `client.m` without waiting: `submit(client.m, 1)` is `client.futures.m(1)`.

    Type checkers follow it from the method to the future, also where the method is async. Methods
    of pools, and clients themselves, can be called as well.

    Raises:
        TypeError: `method` does not come from a courier client.

    Example:
        future = courier.submit(learner.step, 0.1)
        loss = future.result()
    """
    return _callee(method)._called(Futures)(*args, **kwargs)


@overload
def call_aio(
    method: Callable[P, _Result[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...
@overload
def call_aio(  # type: ignore[overload-overlap] # an iterator is also some result
    method: Callable[P, Iterator[R] | AsyncIterator[R]], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterable[R]: ...
@overload
def call_aio(
    method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...
def call_aio(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns a coroutine that calls `client.m`, as `client.aio.m(...)` does.

    The call begins when it is awaited or made a task. Of a generator, `async for item in
    courier.call_aio(client.m, 1)` reads the items. Type checkers follow it, and it takes the same
    methods, as `submit`.

    Raises:
        TypeError: `method` does not come from a courier client.

    Example:
        async def step():
            return await courier.call_aio(learner.step, 0.1)
    """
    return _callee(method)._called(Aio)(*args, **kwargs)


def _callee(method: object) -> Callee:
    if not isinstance(method, Callee):
        raise TypeError(f"expected a method of a courier client, got {method!r}")
    return method
