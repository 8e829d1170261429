"""Tasks that finalisers leave to others, because they may run in a thread that holds any lock."""

import collections
from collections.abc import Callable

from courier.threads.surviving import surviving

#: The tasks; a caller in a hurry checks this before `clear_up`.
LEFT: collections.deque[Callable[[], None]] = collections.deque()
#: Called when a task is added; they take no lock either.
wakers: list[Callable[[], None]] = []


def leave(task: Callable[[], None]) -> None:
    """Schedules a task for another thread or the next call. Takes no lock."""
    LEFT.append(task)
    for wake in wakers:
        wake()


def clear_up() -> None:
    for _ in range(len(LEFT)):  # a task may add itself again
        try:
            task = LEFT.popleft()
        except IndexError:
            return
        # The thread is not to blame for an error.
        with surviving("what a finaliser left", 0.0):
            task()
