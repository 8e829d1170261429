"""Marks of methods: they may run twice, or answer a gRPC service of their own."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F")
M = TypeVar("M", bound=Callable[..., Any])

_IDEMPOTENT = "__courier_idempotent__"
_SERVICE = "__courier_grpc_service__"


def idempotent(method: F) -> F:
    """Marks a method as harmless to run twice, so that clients repeat its lost calls.

    A call to it that meets a broken connection is sent again, at most three times and within the
    call's timeout, once a server answers. Only then is it a ServerLostError. A method that is not
    marked runs at most once per call. Clients learn the marks when they connect.

    Works on methods, above or below `staticmethod` and `classmethod`, and on all that `Server.bind`
    takes. A method that overrides a marked one is not marked. Thread-safe.

    Example:
        class Store:
            @courier.idempotent
            def get(self, key: str) -> bytes: ...

    Args:
        method: The method.

    Returns:
        `method` itself; a wrapper of it where it cannot be marked itself (a bound method, a
        builtin), so that nothing else gets the mark.

    Raises:
        TypeError: `method` cannot be called, or is a generator function, whose items cannot be sent
            again, because it is not known which have arrived.
    """
    function: Any = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    if not callable(function):
        raise TypeError(f"only what can be called is idempotent, not {method!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{function!r} is a generator; items that have arrived cannot be taken back, so its "
            "calls are not repeated. Return a list, or leave it unmarked"
        )
    try:
        setattr(function, _IDEMPOTENT, True)
    except (AttributeError, TypeError):
        wrapper = functools.partial(cast("Callable[..., Any]", method))
        setattr(wrapper, _IDEMPOTENT, True)
        return cast("F", wrapper)
    return method


def is_idempotent(method: Callable[..., Any]) -> bool:
    # The `__call__` of a function that is served itself.
    owner = method.__self__ if isinstance(method, types.MethodWrapperType) else method
    return _mark_of(owner, _IDEMPOTENT) is True


def _mark_of(owner: object, name: str) -> object:
    """Returns a mark, if it can be read. Check its type: some objects have every attribute."""
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - it is code of users
        return None


class _GrpcPaths(list[str]):
    """The paths of the gRPC calls that a method answers."""


def grpc_service(name: str, *methods: str) -> Callable[[M], M]:
    """Makes a method answer a gRPC service with messages of its own, for other languages.

    The method takes the name of the called method and the bytes of the request, and returns the
    bytes of the reply: it parses and serialises messages itself. Its server answers unary calls of
    the service at its port. They come from clients that have proved the secret: each has opened a
    session by `courier.v1.Courier/Hello` and seals its requests, as the head of
    `protos/courier/v1/courier.proto` says. A request has 2 MiB at most. If the method raises, the
    call fails with the status UNKNOWN, and the name and text of the exception. Thread-safe.

    Example:
        class Counter:
            @courier.grpc_service("counter.v1.Counter", "Add", "Reset")
            async def answer(self, method: str, request: bytes) -> bytes: ...

    Args:
        name: Of the service, with its package.
        *methods: The names of its methods.

    Raises:
        ValueError: A name is empty or has a slash.
    """
    if not methods or any(not each or "/" in each for each in (name, *methods)):
        raise ValueError(f"not names of a gRPC service and its methods: {name!r}, {methods!r}")

    def mark(method: M) -> M:
        setattr(method, _SERVICE, _GrpcPaths(f"/{name}/{each}" for each in methods))
        return method

    return mark


def grpc_paths(method: Callable[..., Any]) -> list[str]:
    paths = _mark_of(method, _SERVICE)
    return paths if isinstance(paths, _GrpcPaths) else []
