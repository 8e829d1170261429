"""How code that runs in a thread is ended by force: by an exception at any step of it."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class ForcedExit(SystemExit):
    """Raised in a node that is ended by force, wherever its code is."""

    #: Ends an event loop that runs in this thread, too: see `courier._tasks.is_own_end`.
    is_forced = True


class Forcing:
    """Ends the code of one thread, once: a second exception could hit what cleans up after it.

    Thread-safe, but that `run` and `held_back` are of the thread itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The thread, while it can be ended.
        self._thread: int | None = None
        self._is_forced = False
        #: Is to be raised as soon as that can be.
        self._is_due = False

    def run(self, code: Callable[[], T]) -> T:
        """Calls something in this thread, which may be ended by force while that runs.

        Raises:
            ForcedExit: It was, perhaps before it began.
        """
        self._let(threading.get_ident())
        try:
            return code()
        finally:
            # Another thread may have its number later.
            self._hold()

    def force(self) -> None:
        """Raises ForcedExit in the thread: at its next step of Python code, or when it may be."""
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
        """Lets something be done as a whole; who is to be ended by force is so behind it.

        For short steps only: a process that was just started must be recorded. Does
        nothing in a thread that is no node's.

        Raises:
            ForcedExit: Behind it.
        """
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
    """Has the interpreter forget that threads which do not take their ForcedExit are to take one.

    Otherwise all threads look for it at each step, and in CPython 3.11 none gets past that which is
    traced, by coverage.py or a debugger. A thread that goes on in Python code takes its own all the same.
    """
    with contextlib.suppress(ForcedExit):
        _raise_in(threading.get_ident())
        while True:
            time.sleep(0)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(ForcedExit))
