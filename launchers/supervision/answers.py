"""Collects what nodes answer to questions."""

import itertools
import threading
from collections.abc import Collection, Mapping
from typing import Any

from launchpad_lite.life.events import Answered

_NUMBERS = itertools.count()


class Answers:
    """The answers of nodes to questions that are open. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, dict[str, Any]] = {}

    def begin(self) -> int:
        """Returns the number of a new question, whose answers are collected from now on."""
        number = next(_NUMBERS)
        with self._changed:
            self._open[number] = {}
        return number

    def take_in(self, answered: Answered) -> None:
        """Takes an answer; nobody waits for a late one any more."""
        with self._changed:
            if (found := self._open.get(answered.number)) is not None:
                found[answered.node] = answered.value
                self._changed.notify_all()

    def note_end(self, node: str) -> None:
        """Answers for a node that has ended: also if it starts again, it does not."""
        with self._changed:
            for found in self._open.values():
                found.setdefault(node, {"error": "it has ended meanwhile"})
            self._changed.notify_all()

    def end(self, number: int, asked: Collection[str], timeout_s: float) -> Mapping[str, Any]:
        """Returns the answers of those who were asked, once all have answered, or time is over."""
        with self._changed:
            found = self._open[number]
            self._changed.wait_for(lambda: found.keys() >= set(asked), timeout_s)
            del self._open[number]
            return {node: found[node] for node in asked if node in found}
