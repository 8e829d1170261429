"""Methods that answer gRPC services of their own, beside `courier.v1.Courier`, at the same port."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__courier_grpc_service__"


class _Service(NamedTuple):
    name: str
    methods: tuple[str, ...]


def grpc_service(name: str, *methods: str) -> Callable[[F], F]:
    """Has a method answer a gRPC service: for clients in other languages, with messages of its own.

    The method takes the name of what is called and the bytes of the request, and returns the bytes
    of the reply: it parses and serialises messages itself. Its server answers unary calls of the
    service at its port. They come from clients that have proved the secret: each has opened a
    session by `courier.v1.Courier/Hello` and seals its requests, as the head of
    `protos/courier/v1/courier.proto` says. A request has 2 MiB at most. If the method raises, the
    call fails with the status UNKNOWN, and the name and text of the exception. Thread-safe.

    Example:
        class Counter:
            @courier.grpc_service("counter.v1.Counter", "Add", "Reset")
            async def answer(self, method: str, request: bytes) -> bytes: ...

    Args:
        name: Of the service, with its package.
        *methods: What can be called.

    Raises:
        ValueError: A name is empty or has a slash.
    """
    if not methods or any(not each or "/" in each for each in (name, *methods)):
        raise ValueError(f"not names of a gRPC service and its methods: {name!r}, {methods!r}")

    def mark(method: F) -> F:
        setattr(method, _MARK, _Service(name, methods))
        return method

    return mark


def grpc_paths(method: Callable[..., Any]) -> list[str]:
    """Returns how gRPC calls what a served method answers; mostly nothing."""
    try:
        service = getattr(method, _MARK, None)
    except Exception:  # noqa: BLE001 - what does not say that it answers a service does not
        return []
    # Some objects have every attribute that they are asked for.
    if not isinstance(service, _Service):
        return []
    return [f"/{service.name}/{each}" for each in service.methods]
