"""Timers: one thread for all of them, while there are any."""

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Protocol

from courier.threads.forks import survive
from courier.threads.locks import Condition
from courier.threads.surviving import surviving


class Timed(Protocol):
    """Something with a deadline."""

    @property
    def is_settled(self) -> bool:
        """Whether it needs no deadline any more."""

    def expire(self) -> None:
        """Is called at its deadline. Does not block."""


class _Timer:
    is_settled = False

    def __init__(self, do: Callable[[], None]) -> None:
        self.expire = do


class _Clock:
    def __init__(self) -> None:
        self._survive_fork()
        survive(self)

    def _survive_fork(self) -> None:
        self._changed = Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], Timed | None]]] = []
        self._thread: threading.Thread | None = None

    def add(self, deadline: float, find: Callable[[], Timed | None]) -> None:
        with self._changed:
            heapq.heappush(self._waiting, (deadline, next(self._numbers), find))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="courier-clock", daemon=True)
                thread.start()
                self._thread = thread  # not before: a thread that the system refused must not count
            else:
                self._changed.notify()

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
        """Makes the thread check whether any timer is left."""
        with self._changed:
            self._changed.notify()


_clock = _Clock()
look = _clock.look


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
    task = _Timer(do)
    _clock.add(deadline, lambda: task)
