"""Tasks and models of these tests, which worker processes import."""

import collections
import os
import time
from pathlib import Path
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


class Note(search.Task):
    """Notes that it runs, in a file that all share."""

    def __init__(self, number: int, file: Path, pause_s: float) -> None:
        self.number = number
        self._file = file
        self._pause_s = pause_s

    def run(self) -> int:
        with self._file.open("ab") as file:
            file.write(b"%d\n" % self.number)
        time.sleep(self._pause_s)
        return self.number


class Counting(search.Model):
    """Asks for so many tasks, and counts how often it is told each."""

    def __init__(self, total: int, file: Path, pause_s: float) -> None:
        self.total = total
        self._file = file
        self._pause_s = pause_s
        self._next = 0
        self.told: collections.Counter[int] = collections.Counter()

    def ask(self) -> Note | None:
        if self._next == self.total:
            return None
        self._next += 1
        return Note(self._next - 1, self._file, self._pause_s)

    def tell(self, task: Any, result: int) -> None:
        assert task.number == result
        self.told[result] += 1


def survive(params: Any) -> float:
    """Ends its worker at first; ends well where it finds what it has written."""
    mark = search.current_trial().folder / "mark"
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return 1.0
