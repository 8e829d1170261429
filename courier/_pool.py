"""Threads that run handlers: a fixed number, a bounded queue, and an end."""

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_IDLE_S = 10.0

_log = logging.getLogger(__name__)


class HandlerPool:
    """At most `size` tasks at a time; more wait, up to `queue_size`.

    The standard executor does not fit: its queue has no end, and interpreter
    exit waits for its threads even after a server was stopped with a deadline.

    Threads are daemons, start when needed and leave when idle. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        size: int,
        queue_size: int,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Makes a pool without threads.

        Args:
            name: Prefix of thread names.
            size: Greatest number of threads, at least 1.
            queue_size: How many tasks may wait for a thread; for `try_submit`.
            idle_s: Seconds after which a thread without work leaves.
        """
        self._name = name
        self._size = size
        self._queue_size = queue_size
        self._idle_s = idle_s
        # Taken directly where no thread is to be notified: a Condition costs several times as much.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: collections.deque[_Task] = collections.deque()
        self._threads: set[threading.Thread] = set()
        #: Threads that run a task now; the others look for one, or are about to.
        self._busy: set[threading.Thread] = set()
        #: Idents of other threads that run a task in place of ours.
        self._lent_threads: list[int] = []
        #: Tasks that have ended.
        self._ended = 0
        self._started = 0
        #: Whether the system gave no thread when one was wanted last; that is logged once.
        self._is_short = False
        self._stopped = False

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[R]":
        """Runs `fn` in a thread of the pool, however long the queue is.

        For the next step of what was let in before.

        Returns:
            Its outcome; cancelled if it will not run: the pool was stopped, or has no thread and
            can start none.
        """
        with self._changed:
            return self._put(fn, args, kwargs)

    def try_submit(self, fn: Callable[[], R]) -> "concurrent.futures.Future[R] | None":
        """Runs `fn` in a thread of the pool; returns None if there is no room, nor a thread."""
        with self._changed:
            if self._is_full():
                return None
            future = self._put(fn, (), {})
            return future if self._stopped or not future.cancelled() else None

    def enter(self) -> bool:
        """Counts the calling thread as one of the pool, if that is free; then `leave` it.

        Returns:
            False if all are busy, or tasks wait: those come first.
        """
        with self._lock:
            if (
                self._tasks
                or self._stopped
                or len(self._busy) + len(self._lent_threads) >= self._size
            ):
                return False
            self._lent_threads.append(get_ident())
            return True

    def leave(self) -> None:
        """Undoes `enter`."""
        with self._lock:
            self._lent_threads.remove(get_ident())
            self._ended += 1
            if self._tasks or self._stopped:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._busy) + len(self._lent_threads) < self._size

    def _is_full(self) -> bool:
        running = len(self._busy) + len(self._lent_threads)
        return running + len(self._tasks) >= self._size + self._queue_size

    def _put(
        self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "concurrent.futures.Future[R]":
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        if self._stopped:
            future.cancel()
            return future
        self._tasks.append(_Task(future, fn, args, kwargs))
        if len(self._threads) - len(self._busy) >= len(self._tasks):
            self._changed.notify()
        elif len(self._threads) < self._size and not self._start_thread() and not self._threads:
            self._tasks.pop()
            future.cancel()
        return future

    def _start_thread(self) -> bool:
        """Starts a thread; returns False if the system gives none. Those that are there go on."""
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
            task()
            # A task holds the arguments of its call, which may be large.
            del task
            with self._changed:
                self._busy.discard(threading.current_thread())
                self._ended += 1

    def _next(self) -> "_Task | None":
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
        """Whether tasks wait for a thread; an estimate."""
        return bool(self._tasks)

    def load(self) -> tuple[bool, int]:
        """Returns whether tasks wait because all threads are taken, and how many tasks have ended."""
        with self._lock:
            return bool(self._tasks) and not self._has_room(), self._ended

    def busy_threads(self) -> set[int]:
        """Returns the idents of the threads that run a task now."""
        with self._lock:
            return {each.ident for each in self._busy if each.ident is not None}.union(
                self._lent_threads
            )

    @property
    def is_idle(self) -> bool:
        """Whether no task runs or waits."""
        with self._changed:
            return not (self._tasks or self._busy or self._lent_threads)

    def stop(self, timeout_s: float) -> list[str]:
        """Takes no more tasks, cancels those that wait, and waits for those that run.

        Returns:
            Names of the threads that still run a task after `timeout_s` seconds.
        """
        with self._changed:
            self._stopped = True
            dropped = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for task in dropped:
            task.cancel()
        give_up_at = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        with self._changed:
            while self._lent_threads and (left := give_up_at - time.monotonic()) > 0:
                self._changed.wait(left)
            names = [thread.name for thread in self._busy]
            return sorted([*names, *[f"{self._name}-guest"] * len(self._lent_threads)])


class _Task:
    """A function to run and the future that wants its result."""

    __slots__ = ("_args", "_fn", "_future", "_kwargs")

    def __init__(
        self,
        future: "concurrent.futures.Future[Any]",
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._future, self._fn, self._args, self._kwargs = future, fn, args, kwargs

    def cancel(self) -> None:
        """Cancels the future: there will be no result."""
        self._future.cancel()

    def __call__(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(*self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - the future gets it
            self._future.set_exception(error)
        else:
            self._future.set_result(result)
