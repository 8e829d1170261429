"""Locks that no exception of a signal handler leaves locked.

Where a finaliser may take a lock, which Python runs in any thread between any two steps, it is an `RLock`:
the thread may hold it already. It closes streams, as a generator does that is dropped while it reads one,
and cancels calls.
"""

import operator
import sys
import threading
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 14) and not TYPE_CHECKING:

    class Lock:
        """A lock for `with`, and for `Condition`.

        Since 3.14 Python looks for signals after `__enter__` and before it notes that there is something to
        leave (https://github.com/python/cpython/issues/148874): a Ctrl-C at that point leaves a lock of
        `threading` locked for ever. It does not look after a step of a loop.
        """

        # To leave is a function in C, which no signal interrupts.
        __slots__ = ("__exit__", "_lock", "_steps", "acquire", "release")

        def __init__(self, lock: Any = None) -> None:
            """Makes a lock, or takes one that `threading` made."""
            self._lock = threading.Lock() if lock is None else lock
            self.acquire = self._lock.acquire
            self.release = self._lock.release
            self.__exit__ = self._lock.__exit__
            self._steps = iter(self.acquire, None)  # each acquires it

        def __enter__(self) -> None:
            for _ in self._steps:
                return

        def __getattr__(self, name: str) -> Any:
            return getattr(self._lock, name)  # what conditions look for

    def RLock() -> Lock:  # noqa: N802 - as that of `threading`
        return Lock(threading.RLock())

else:
    from threading import Lock, RLock


class Condition(threading.Condition):
    """A condition on one of these locks; that of `threading` enters and leaves by functions of Python.

    A signal handler that raises as such a function begins leaves the lock locked, on all Pythons.
    """

    def __init__(self, lock: Any = None) -> None:
        """Makes one on a lock of this module; None: on a new one that its thread may take again."""
        super().__init__(RLock() if lock is None else lock)

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


class Event(threading.Event):
    """An event on such a condition."""

    def __init__(self) -> None:
        self._cond = Condition()
        self._flag = False


__all__ = ["Condition", "Event", "Lock", "RLock"]
