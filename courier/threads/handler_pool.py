"""Threads that run handlers: a fixed number, a bounded queue, and an end."""

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from courier.threads.locks import Condition, RLock

R = TypeVar("R")

#: A function to run, and the future that wants its result.
_Task = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]

_IDLE_S = 10.0

_log = logging.getLogger(__name__)


class HandlerPool:
    """Runs at most `size` tasks at a time; more wait, up to `queue_size`.

    The standard executor does not fit: its queue has no end, and interpreter
    exit waits for its threads even after a server was stopped with a deadline.

    Threads are daemons, start when needed and leave when idle. Thread-safe.
    """

    def __init__(self, name: str, size: int, queue_size: int, idle_s: float = _IDLE_S) -> None:
        """Makes a pool without threads, which leave after `idle_s` seconds without work."""
        self._name = name
        self._size = size
        self._queue_size = queue_size
        self._idle_s = idle_s
        # Taken directly where no thread is notified, because a Condition costs several times as
        # much.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._tasks: collections.deque[_Task] = collections.deque()
        self._threads: set[threading.Thread] = set()
        #: Threads that run a task now; the others look for one, or will.
        self._busy: set[threading.Thread] = set()
        #: Idents of other threads that run a task in place of ours.
        self._lent_threads: list[int] = []
        self._ended = 0
        self._started = 0
        #: Whether the system refused the last thread; that is logged once.
        self._is_short = False
        self._stopped = False

    def submit(self, fn: Callable[[], R]) -> "concurrent.futures.Future[R]":
        """Runs the next step of an accepted call in a thread, however long the queue is.

        The outcome is cancelled if the pool was stopped, or has no thread and can start none.
        """
        with self._changed:
            return self._put(fn)

    def try_submit(self, fn: Callable[[], R]) -> "concurrent.futures.Future[R] | None":
        """Runs `fn` in a thread of the pool; returns None if there is no room, nor a thread."""
        with self._changed:
            running = len(self._busy) + len(self._lent_threads)
            if running + len(self._tasks) >= self._size + self._queue_size:
                return None
            future = self._put(fn)
            return future if self._stopped or not future.cancelled() else None

    def enter(self) -> bool:
        """Counts this thread as one of the pool until `leave`; False if all are taken."""
        with self._lock:
            if self._tasks or self._stopped or not self._has_room():
                return False
            self._lent_threads.append(get_ident())
            return True

    def leave(self) -> None:
        with self._lock:
            self._lent_threads.remove(get_ident())
            self._ended += 1
            if self._tasks or self._stopped:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._busy) + len(self._lent_threads) < self._size

    def _put(self, fn: Callable[[], R]) -> "concurrent.futures.Future[R]":
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        if self._stopped:
            future.cancel()
            return future
        self._tasks.append((future, fn))
        if len(self._threads) - len(self._busy) >= len(self._tasks):
            self._changed.notify()
        elif len(self._threads) < self._size and not self._start_thread() and not self._threads:
            self._tasks.pop()
            future.cancel()
        return future

    def _start_thread(self) -> bool:
        """Starts a thread; returns False if the system gives none. Existing threads go on."""
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._started}")
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError as error:
            if not self._is_short:
                self._is_short = True
                _log.warning(
                    "%d threads of %s, not more: %s", len(self._threads), self._name, error
                )
            return False
        self._is_short = False
        # Not before: a thread that the system refused must not count.
        self._threads.add(thread)
        return True

    def _work(self) -> None:
        while (task := self._next()) is not None:
            _run(*task)
            # A task holds the arguments of its call, which may be large.
            del task
            with self._changed:
                self._busy.discard(threading.current_thread())
                self._ended += 1

    def _next(self) -> _Task | None:
        with self._changed:
            leave_at = time.monotonic() + self._idle_s
            while not self._tasks or not self._has_room():
                left = leave_at - time.monotonic()
                if self._stopped or (left <= 0 and not self._tasks):
                    self._threads.discard(threading.current_thread())
                    return None
                self._changed.wait(max(left, 0.0) if not self._tasks else None)
            self._busy.add(threading.current_thread())
            return self._tasks.popleft()

    @property
    def has_waiting(self) -> bool:
        return bool(self._tasks)

    def load(self) -> tuple[bool, int]:
        """Returns whether tasks wait because all threads are busy, and how many have ended."""
        with self._lock:
            return bool(self._tasks) and not self._has_room(), self._ended

    def busy_threads(self) -> set[int]:
        with self._lock:
            return {each.ident for each in self._busy if each.ident is not None}.union(
                self._lent_threads
            )

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not (self._tasks or self._busy or self._lent_threads)

    def stop(self, timeout_s: float) -> list[str]:
        """Refuses tasks, cancels waiting ones; returns names of threads that run one at the end."""
        with self._changed:
            self._stopped = True
            dropped = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for future, _ in dropped:
            future.cancel()
        give_up_at = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        with self._changed:
            while self._lent_threads and (left := give_up_at - time.monotonic()) > 0:
                self._changed.wait(left)
            names = [thread.name for thread in self._busy]
            return sorted([*names, *[f"{self._name}-guest"] * len(self._lent_threads)])


def _run(future: "concurrent.futures.Future[Any]", fn: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001 - the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)
