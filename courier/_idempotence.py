"""Methods that are harmless when they run twice."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F")

_MARK = "__courier_idempotent__"


def idempotent(method: F) -> F:
    """Marks a method as harmless to run twice, so that clients repeat its lost calls.

    A call to it that meets a broken connection is sent again, at most three times and within the
    call's timeout, once a server answers. Only then is it a ServerLostError. A method that is not
    marked runs at most once per call. Clients learn the marks when they connect.

    Works on methods, above or below `staticmethod` and `classmethod`, and on whatever
    `Server.bind` takes. What overrides a marked method in a subclass is not marked by that.
    Thread-safe.

    Example:
        class Store:
            @courier.idempotent
            def get(self, key: str) -> bytes: ...

    Args:
        method: What to mark.

    Returns:
        `method` itself; a wrapper of it where it cannot be marked itself (a bound method, a
        builtin), so that the mark is on nothing else.

    Raises:
        TypeError: `method` cannot be called, or is a generator function: which of its items
            have arrived is not known, so they cannot be sent again.
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
        setattr(function, _MARK, True)
    except (AttributeError, TypeError):
        wrapper = functools.partial(cast("Callable[..., Any]", method))
        setattr(wrapper, _MARK, True)
        return cast("F", wrapper)
    return method


def is_idempotent(method: Callable[..., Any]) -> bool:
    """Returns whether a served method carries the mark."""
    # The `__call__` of a function that is served itself.
    owner = method.__self__ if isinstance(method, types.MethodWrapperType) else method
    try:
        # Compared, because some objects have every attribute that they are asked for.
        return getattr(owner, _MARK, False) is True
    except Exception:  # noqa: BLE001 - what does not say that it is harmless is not
        return False
