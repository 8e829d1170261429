"""Detects that nodes of a program wait for each other in a circle, or that all wait and none computes."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection

from courier.lowlevel import surviving
from launchpad_lite.life.timing import Timing

#: With many nodes checks take processor time: so many times as much passes before the next.
_REST = 20


class DeadlockWatch:
    """Checks a program at intervals, and reports once the first deadlock, or that nothing goes on.

    It looks at a program only while the same nodes are idle, and doubles the interval while nothing
    changes: ten looks in the first two hours. It reports what two checks in a row have found.
    """

    def __init__(
        self,
        why: Callable[[], str],
        idle_nodes: Callable[[], tuple[Collection[str], bool]],
        tell: Callable[[str], object],
        timing: Timing,
    ) -> None:
        """Prepares it; `idle_nodes` returns those that use no processor, and whether all are such."""
        self._why = why
        self._idle_nodes = idle_nodes
        self._tell = tell
        self._timing = timing
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launchpad-deadlocks", daemon=True)

    def start(self) -> None:
        """Starts the checks. If the system gives no thread for them, only `why` tells deadlocks."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def end(self) -> None:
        """Ends the checks. May be repeated."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        idle: Collection[str] = ()
        found = ""
        pause_s, took_s = self._timing.deadlock_s, 0.0
        while not self._ended.wait(max(self._timing.look_s if found else pause_s, _REST * took_s)):
            began_at = time.thread_time()
            with surviving("the thread that looks for deadlocks"):
                from launchpad_lite.life.waits import (
                    DEADLOCK,
                    STALLED,
                )  # few programs live until here

                now, are_all = self._idle_nodes()
                is_same = now == idle  # a program that is starting is left alone
                pause_s = 2 * pause_s if is_same else self._timing.deadlock_s
                idle, before = now, found
                why = self._why() if is_same and idle and not self._ended.is_set() else ""
                found = "".join(re.findall(rf"\A{DEADLOCK}.*(?:\n .*)*", why))
                if not found and are_all and pause_s >= self._timing.stalled_s:
                    first, *rest = why.splitlines() or [""]
                    found = f"{STALLED}: {first}" if rest[-1:] == [STALLED] else ""
                if found and found == before:
                    self._tell(found)
                    return
            took_s = time.thread_time() - began_at
