"""Polls for a moment (spins) before a thread sleeps until data comes.

Sleeping and being woken by another core takes longer than a small call: some 25 µs on a virtual
machine, on either side. A thread that spins for about that time before it sleeps takes at most
twice the time of the best choice (A. Karlin et al., "Empirical studies of competitive spinning for
a shared-memory multiprocessor", SOSP 1991).
"""

import os
from collections.abc import Callable
from time import perf_counter

#: How long it spins: the time of sleeping and waking, on both sides together.
_LONGEST_S = 100e-6
#: After spinning was in vain, at most so many waits go by without it.
_LONGEST_REST = 64

#: Descriptors and their events; empty if nothing has come.
Events = list[tuple[int, int]]

_let_others_run: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Decides whether to spin, more rarely after each time in vain. For one thread at a time."""

    __slots__ = ("_next_rest", "_now", "_rest")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        #: Waits that still go by without spinning.
        self._rest = 0
        self._next_rest = 1

    def look(self, poll: Callable[[float], Events]) -> Events:
        """Returns the events that `poll(0)` finds within a moment; none if it does not spin."""
        if self._rest:
            self._rest -= 1
            return []
        now = self._now
        until = now() + _LONGEST_S
        while True:
            found = poll(0)
            # So late, another thread had the core or the interpreter for long: only a sleeping
            # thread gets another core, and releases the interpreter.
            if now() > until:
                break
            if found:
                self._next_rest = 1
                return found
            # Lets the other side run and answer if it shares this core.
            _let_others_run()
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return found
