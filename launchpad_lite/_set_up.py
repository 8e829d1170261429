"""Functions of the script that run first in each process of its programs."""

import inspect
import pickle
from collections.abc import Callable
from typing import TypeVar

from courier._parcel import dumps
from launchpad_lite.errors import LaunchError
from launchpad_lite.nodes.base import name_of

F = TypeVar("F", bound=Callable[[], object])

_functions: dict[str, Callable[[], object]] = {}
#: Those of the script, in a process that launches for it.
received = b""


def set_up(function: F) -> F:
    """Has a function called first in each process of all programs that are launched later; returns it.

    For what belongs to a process: event loops, logging, seeds, threads of BLAS. It runs before what a
    node uses is imported; `lp.current_node()` is there. Several run in order; one of the same name
    replaces the first. With threads, each launch calls it. If it raises, the node or launch fails.

    Raises:
        TypeError: It cannot be called, or is async.

    Example:
        @lp.set_up
        def seeded():
            random.seed(lp.current_node().seed)
    """
    if inspect.iscoroutinefunction(function) or not callable(function):
        raise TypeError(f"set_up takes a function that is not async, not {function!r}")
    name = name_of(function)
    _functions[f"{name} {len(_functions)}" if name == "<lambda>" else name] = function
    return function


def pickled() -> bytes:
    """Returns the functions, for other processes."""
    try:
        return dumps(_functions) if _functions or not received else received
    except Exception as error:
        raise LaunchError(f"lp.set_up({', '.join(_functions)}): {error}") from error


def call(data: bytes | None = None) -> None:
    """Calls functions that were pickled; None: those of this process."""
    for name, function in (_functions if data is None else pickle.loads(data)).items():
        try:
            function()
        except Exception as error:
            raise LaunchError(f"lp.set_up({name}): {type(error).__name__}: {error}") from error
