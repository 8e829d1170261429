"""Functions of the script that run first in each process of its programs."""

import inspect
import pickle
from collections.abc import Callable
from typing import TypeVar

from courier import dumps
from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.arguments import name_of

F = TypeVar("F", bound=Callable[[], object])

_functions: dict[str, Callable[[], object]] = {}
received = b""  # the functions of the script, in a process that launches for it


def set_up(function: F) -> F:
    """Registers a function to call first in each process of all later launches; returns it.

    For set-up of a process: event loops, logging, seeds, threads of BLAS. It runs before the
    imports of a node; `lp.current_node()` works. Several run in order; one of the same name
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
