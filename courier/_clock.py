"""What is to be done when a time has come; one thread for all of it, while there is any."""

import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Protocol

from courier._surviving import surviving


class Timed(Protocol):
    """Something whose time may be over."""

    @property
    def is_settled(self) -> bool:
        """Whether it does not matter any more."""

    def expire(self) -> None:
        """Is called when its time is over. Does not block."""


class _Task:
    """A function to call once."""

    is_settled = False

    def __init__(self, do: Callable[[], None]) -> None:
        self.expire = do


class _Clock:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], Timed | None]]] = []
        self._thread: threading.Thread | None = None

    def add(self, deadline: float, find: Callable[[], Timed | None]) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="courier-clock", daemon=True)
                thread.start()
                self._thread = thread  # not before: one that the system refused must not count
            else:
                self._changed.notify()
            heapq.heappush(self._waiting, (deadline, next(self._numbers), find))

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting:
                    first = self._waiting[0][2]()
                    if first is not None and not first.is_settled:
                        break
                    heapq.heappop(self._waiting)
                if not self._waiting:
                    self._thread = None
                    return
                left = self._waiting[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                timed = heapq.heappop(self._waiting)[2]()
            if timed is not None:
                with surviving("the clock of courier calls"):
                    timed.expire()

    def look(self) -> None:
        with self._changed:
            self._changed.notify()


_clock = _Clock()


def require_running_clock() -> None:
    """Raises an error if time stands still: no limit of time would ever be over."""
    if type(time.monotonic) is not BuiltinFunctionType and time.monotonic() == time.monotonic():
        raise RuntimeError(
            f"{time.monotonic.__module__} has stopped time.monotonic(), and nothing would ever time out. "
            "Leave our packages their time: freeze_time(..., ignore=['courier', 'launchers', 'launchpad_lite'])"
        )


def expire_at(deadline: float, timed: Timed) -> None:
    """Calls `expire` of something at a monotonic time, if it still exists then."""
    _clock.add(deadline, weakref.ref(timed))


def call_at(deadline: float, do: Callable[[], None]) -> None:
    """Calls a function that does not block, at a monotonic time."""
    task = _Task(do)
    _clock.add(deadline, lambda: task)


def look() -> None:
    """Makes the thread check whether anything is left to wait for."""
    _clock.look()


def _survive_fork() -> None:
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_survive_fork)
