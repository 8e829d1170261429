"""How type checkers see clients. Nothing here runs."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import concurrent.futures

T = TypeVar("T")


class Remote(Generic[T]):
    """The type of a client of a `T`, for annotations: `learner: courier.Remote[Learner]`.

    `client.m(...)` is what `T.m` returns, `client.futures.m(...)` a future of it, and
    `await client.aio.m(...)` that again. mypy checks names, arguments and results of all three with
    the plug-in `courier.mypy_plugin`. Other type checkers, and mypy without it, take any name and
    arguments, and results are Any: no annotation of Python can say more. What each of them checks in
    full is `courier.submit(client.m, ...)` and `courier.call_aio(client.m, ...)` where the client is
    annotated as `T` itself.

    All clients are instances of it.

    Example:
        class Actor:
            def __init__(self, learner: lp.Remote[Learner]):
                self._loss = learner.futures.step(0.1)  # a type checker knows step
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def futures(self) -> "Futures[T]":
            """The same methods, each returning a `concurrent.futures.Future`."""

        @property
        def aio(self) -> "Aio[T]":
            """The same methods, each awaitable."""

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


if TYPE_CHECKING:

    class Futures(Generic[T]):
        """`client.futures`."""

        def __getattr__(self, name: str) -> Callable[..., concurrent.futures.Future[Any]]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]: ...

    class Aio(Generic[T]):
        """`client.aio`."""

        def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]: ...
