"""Ends code in a thread by force: by an exception at any step."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class ForcedExit(SystemExit):
    """Raised at any point in the code of a node that is ended by force."""

    #: Ends an event loop that runs in this thread, too: see `courier.lowlevel.Tasks.run`.
    is_forced = True


class Forcing:
    """Ends the code of one thread, once: a second exception could hit its clean-up.

    Thread-safe, except `run` and `held_back`, which are for the thread itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # the thread, while it can be ended
        self._is_forced = False
        #: The exception to raise as soon as possible.
        self._is_due = False

    def run(self, code: Callable[[], T]) -> T:
        """Calls a function in this thread, which may be ended by force meanwhile, or before."""
        self._let(threading.get_ident())
        try:
            return code()
        finally:
            # Another thread may get its number later.
            self._hold()

    def force(self) -> None:
        """Raises ForcedExit in the thread: at its next step of Python code, or when allowed."""
        with self._lock:
            if self._is_forced:
                return
            self._is_forced = True
            if self._thread is None:
                self._is_due = True
                return
            _raise_in(self._thread)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Delays the forced end of this thread until the end of a block, which must be short."""
        thread = self._thread
        if thread != threading.get_ident():
            yield
            return
        self._hold()
        try:
            yield
        finally:
            self._let(thread)

    def _hold(self) -> None:
        with self._lock:
            self._thread = None

    def _let(self, thread: int) -> None:
        with self._lock:
            if not self._is_due:
                self._thread = thread
                return
            self._is_due = False
        raise ForcedExit


def settle() -> None:
    """Clears the pending ForcedExit of threads that do not take theirs.

    Otherwise all threads check for it at each step, and in CPython 3.11 traced threads
    (coverage.py, debuggers) hang there. A thread that goes on in Python code still takes its own.
    """
    with contextlib.suppress(ForcedExit):
        _raise_in(threading.get_ident())
        while True:
            time.sleep(0)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(ForcedExit))
