"""Threads that run handlers: a fixed number, a bounded queue, and an end."""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_IDLE_S = 10.0


class HandlerPool(concurrent.futures.ThreadPoolExecutor):
    """At most `size` tasks at a time; more wait, up to `queue_size`.

    The standard executor does not fit: its queue has no end, and interpreter
    exit waits for its threads even after a server was stopped with a deadline.
    It is the base class only since grpc asks for its type; no state of it is used.

    Threads are daemons, start when needed and leave when idle. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        size: int,
        queue_size: int,
        overflow: "HandlerPool | None" = None,
    ) -> None:
        """Makes a pool without threads.

        Args:
            name: Prefix of thread names.
            size: Greatest number of threads, at least 1.
            queue_size: How many tasks may wait for a thread.
            overflow: Runs what does not fit, with `overflowing()` true; None means that the
                queue has no limit.
        """
        self._name = name
        self._size = size
        self._queue_size = queue_size
        self._overflow = overflow
        self._changed = threading.Condition()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._started = 0
        self._stopped = False

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[R]":
        """Runs `fn` in a thread of the pool, or in the overflow pool when the queue is full."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        task = _Task(future, fn, args, kwargs)
        with self._changed:
            if self._overflow is None or len(self._tasks) < self._queue_size or self._idle:
                if self._stopped:
                    future.cancel()
                    return future
                self._tasks.append(task)
                if self._idle >= len(self._tasks):
                    self._changed.notify()
                elif len(self._threads) < self._size:
                    self._start_thread()
                return future
        return self._overflow.submit(_run_overflowing, fn, args, kwargs)

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._started}")
        thread.daemon = True
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()
            # A task holds the arguments of its call, which may be large.
            del task

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            try:
                leave_at = time.monotonic() + _IDLE_S
                while not self._tasks:
                    left = leave_at - time.monotonic()
                    if self._stopped or left <= 0:
                        self._threads.discard(threading.current_thread())
                        return None
                    self._changed.wait(left)
                return self._tasks.popleft()
            finally:
                self._idle -= 1

    def stop(self, timeout_s: float) -> list[str]:
        """Takes no more tasks, drops those that wait, and waits for those that run.

        Returns:
            Names of the threads that still run after `timeout_s` seconds.
        """
        with self._changed:
            self._stopped = True
            self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        give_up_at = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """As `concurrent.futures.Executor.shutdown`."""
        self.stop(1e9 if wait else 0.0)


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

    def __call__(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(*self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


_overflow_mark = threading.local()


def overflowing() -> bool:
    """Tells a task whether it runs in an overflow pool, since the proper one was full."""
    return bool(getattr(_overflow_mark, "on", False))


def _run_overflowing(fn: Callable[..., R], args: Any, kwargs: Any) -> R:
    _overflow_mark.on = True
    try:
        return fn(*args, **kwargs)
    finally:
        _overflow_mark.on = False
