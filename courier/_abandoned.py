"""What finalisers leave to be done: they may run anywhere, also in a thread that holds any lock."""

import collections
from collections.abc import Callable

from courier._surviving import surviving

_left: collections.deque[Callable[[], None]] = collections.deque()
#: Called when something is left; they take no lock either.
wakers: list[Callable[[], None]] = []


def leave(task: Callable[[], None]) -> None:
    """Schedules a task for another thread or the next call. Takes no lock."""
    _left.append(task)
    for wake in wakers:
        wake()


def clear_up() -> None:
    """Does what was left."""
    for _ in range(len(_left)):  # a task may leave itself again
        try:
            task = _left.popleft()
        except IndexError:
            return
        # The thread that clears up has nothing to do with it.
        with surviving("what a finaliser left", 0.0):
            task()
