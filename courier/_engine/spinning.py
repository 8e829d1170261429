"""Looking for what is about to come, for a moment, before a thread sleeps until it comes.

To sleep and to be woken by another core takes longer than a small call: some 25 µs on a virtual
machine, for either side. Who looks for about as long as that before it sleeps takes at most twice
what it takes who knows how long to look (A. Karlin et al., "Empirical studies of competitive spinning
for a shared-memory multiprocessor", SOSP 1991).
"""

import os
from collections.abc import Callable
from time import perf_counter

#: How long one looks: what sleeping and waking take, on both sides together.
_LONGEST_S = 100e-6
#: So many waits at most go by without a look, while looks were in vain.
_LONGEST_REST = 64

#: Descriptors and their events; empty if nothing has come.
Events = list[tuple[int, int]]

_let_others_run: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Decides whether it pays to look, from whether it did. For one thread at a time.

    While it does not, twice as many waits as the last time go by before the next look.
    """

    __slots__ = ("_next_rest", "_now", "_rest")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        #: Waits that still go by without a look.
        self._rest = 0
        self._next_rest = 1

    def look(self, poll: Callable[[float], Events]) -> Events:
        """Returns what `poll(0)` finds within a moment; nothing is found if it does not pay to look."""
        if self._rest:
            self._rest -= 1
            return []
        now = self._now
        until = now() + _LONGEST_S
        while True:
            found = poll(0)
            # That late, another thread had the core or the interpreter for long: only who sleeps is
            # given another core, and lets go of the interpreter.
            if now() > until:
                break
            if found:
                self._next_rest = 1
                return found
            # Where the other side has no core of its own, this is when it answers.
            _let_others_run()
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return found
