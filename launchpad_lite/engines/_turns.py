"""Functions that run one after the other. Waiting callers hold no thread."""

import collections
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class Turns:
    """Runs functions in the order in which they come, one at a time. Thread-safe.

    One that finds no other runs in the thread of its caller. Others run in a thread that lives as
    long as there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The first one runs.
        self._runs: collections.deque[Callable[[], None]] = collections.deque()

    def run(self, function: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        """Returns what a function returns or raises, now or later.

        It has the context variables of the caller. It may not wait for others that are to run here.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # A copy: it may run while the caller's own is in use.
        context = contextvars.copy_context()

        def run() -> None:
            context.run(_settle, future, function, args)

        with self._lock:
            self._runs.append(run)
            if len(self._runs) > 1:
                return future
        run()
        if self._end_turn():
            threading.Thread(target=self._run_others, name="engine-turns", daemon=True).start()
        return future

    def _run_others(self) -> None:
        is_more = True
        while is_more:
            self._runs[0]()
            is_more = self._end_turn()

    def _end_turn(self) -> bool:
        with self._lock:
            self._runs.popleft()
            return bool(self._runs)


def _settle(
    future: "concurrent.futures.Future[Any]", function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
        future.set_exception(error)
    else:
        future.set_result(result)
