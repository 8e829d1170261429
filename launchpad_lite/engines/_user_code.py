"""Errors of the user's code that an event loop, a future or a generator would take for signals."""

import concurrent.futures
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.engines._store import MissingError
from launchpad_lite.engines.errors import OrderError, SpillError, TaskError

#: Gets what was called and the result; returns that, or raises what is wrong with it.
Check = Callable[[str, Any], Any]

#: They would mean that an iterator is at its end, or that no caller waits any more.
_SIGNALS = StopIteration, StopAsyncIteration, concurrent.futures.CancelledError

#: The folders of code that is not the user's.
_INSTALLED = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)


def run_user_code(
    node: str, job: object, method: str, *args: Any, check: Check | None = None
) -> Any:
    """Returns what a method of the user returns. A `StopIteration` or `SystemExit` is a RuntimeError."""
    what = f"{node}: {method}"
    try:
        result = getattr(job, method)(*args)
        return result if check is None else check(what, result)
    except BaseException as error:
        is_ordinary = isinstance(error, Exception) and not isinstance(error, _SIGNALS)
        if is_ordinary or getattr(error, "is_forced", False):
            raise
        raise RuntimeError(f"{what} raised {_said(error)}") from error


class Named:
    """Gives errors of the user's code, in a `with` block, the name of what was computed.

    `SpillError` and `OrderError` keep their type, `MissingError` passes, all others become a `TaskError`.
    It is no generator with `contextmanager`: that would let a StopIteration pass.
    """

    def __init__(self, place: str, kinds: Any = BaseException) -> None:
        #: The worker, and what it computes.
        self._place = place
        #: Errors that are those of the user's code; in a worker all are.
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SpillError | OrderError):
            raise type(error)(f"{self._place}: {error}") from error
        if isinstance(error, self._kinds) and not isinstance(error, MissingError):
            raise TaskError(f"{self._place}: {_said(error)}{_user_line(error)}") from error


def _said(error: BaseException) -> str:
    # Its __str__ may raise anything.
    return f"{type(error).__name__}: {courier.ExceptionReport.text_of(error).message}"


def _user_line(error: BaseException | None) -> str:
    """Returns which line of the user has raised an error, or its cause; empty if none has."""
    while error is not None:
        for at in reversed(traceback.extract_tb(error.__traceback__)):
            if not at.filename.startswith(_INSTALLED) and "-packages/" not in at.filename:
                return f" ({at.filename}:{at.lineno} in {at.name}: {at.line})"
        error = error.__cause__
    return ""
