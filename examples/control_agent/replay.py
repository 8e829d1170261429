"""A replay buffer in numpy, which keeps acting and learning in balance."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Columns by name, of shape (number, ...).
Transitions = Mapping[str, "np.ndarray[Any, Any]"]


class Replay:
    """Keeps the newest transitions. The side that is ahead waits. Thread-safe.

    Args:
        capacity: Transitions that are kept.
        min_size: Transitions without which nothing is sampled.
        samples_per_insert: How often each is sampled, on average.
        slack: Samples that the ratio may be ahead or behind.
        seed: Of the choice.
    """

    def __init__(
        self, capacity: int, min_size: int, samples_per_insert: float, slack: float, seed: int
    ) -> None:
        self._capacity = capacity
        self._min_size = min_size
        self._ratio = samples_per_insert
        self._slack = slack
        self._rng = np.random.default_rng(seed)
        self._columns: dict[str, np.ndarray[Any, Any]] = {}
        self._inserts = self._samples = 0
        self._changed = threading.Condition()

    def insert(self, transitions: Transitions, timeout_s: float | None = None) -> bool:
        """Adds transitions unless learning is behind; then it waits.

        Args:
            transitions: At most as many as the capacity.
            timeout_s: How long.

        Returns:
            Whether they were added in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._may_insert, timeout_s):
                return False
            number = len(next(iter(transitions.values())))
            places = np.arange(self._inserts, self._inserts + number) % self._capacity
            for name, values in transitions.items():
                if name not in self._columns:
                    shape = (self._capacity, *values.shape[1:])
                    self._columns[name] = np.zeros(shape, values.dtype)
                self._columns[name][places] = values
            self._inserts += number
            self._changed.notify_all()
            return True

    def sample(self, number: int, timeout_s: float | None = None) -> Transitions | None:
        """Returns transitions at random unless acting is behind; then it waits.

        Args:
            number: How many.
            timeout_s: How long.

        Returns:
            Those, or None when the time is over.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_sample(number), timeout_s):
                return None
            chosen = self._rng.integers(min(self._inserts, self._capacity), size=number)
            self._samples += number
            self._changed.notify_all()
            return {name: values[chosen] for name, values in self._columns.items()}

    def counts(self) -> tuple[int, int]:
        """Returns how many transitions were inserted, and how many sampled."""
        with self._changed:
            return self._inserts, self._samples

    def _ahead(self) -> float:
        """Returns how many samples learning is ahead of acting."""
        return self._samples - self._ratio * (self._inserts - self._min_size)

    def _may_insert(self) -> bool:
        return self._inserts < self._min_size or self._ahead() >= -self._slack

    def _may_sample(self, number: int) -> bool:
        return self._inserts >= self._min_size and self._ahead() + number <= self._slack
