"""Tasks and models of these tests, which worker processes import."""

import time
from typing import Any

from launchpad_lite import search

#: So that nothing takes long when somebody is lost.
QUICK = search.Timing(lease_s=1.0, beat_s=0.2, silence_s=1.0, patience_s=1.0, poll_s=1.0)


def square(x: int) -> int:
    return x * x


def fail(x: Any) -> None:
    raise KeyError(x)


def climb(x: float, steps: int = 1000, pause_s: float = 0.01) -> float:
    """Reports its steps; takes long, unless it is stopped."""
    for step in range(steps):
        search.report(x + step)
        time.sleep(pause_s)
    return x


class Tasks(search.Model):
    """Asks for given tasks, and keeps what becomes of them."""

    def __init__(self, *tasks: Any) -> None:
        self.left = list(tasks)
        self.results: list[Any] = []
        self.early: list[float | None] = []

    def ask(self) -> Any:
        return self.left.pop(0) if self.left else None

    def tell(self, task: Any, result: Any) -> None:
        self.results.append(result)

    def stopped(self, task: Any, value: float | None) -> None:
        self.early.append(value)


def squares(count: int) -> Tasks:
    return Tasks(*[search.Call(square, x) for x in range(count)])
