"""The steps of many workers; finds the lowest one in constant time."""

import bisect
import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import overload


class Steps(Sequence[int]):
    """How many steps each worker has finished: sorted, without names."""

    def __init__(self) -> None:
        self._count: collections.Counter[int] = collections.Counter()
        self._lowest = math.inf
        self._len = 0

    @property
    def lowest(self) -> float:
        """The lowest step; infinity if there is none."""
        return self._lowest

    def add(self, step: int) -> None:
        """Adds the step of one worker."""
        self._count[step] += 1
        self._len += 1
        self._lowest = min(self._lowest, step)

    def remove(self, step: int) -> None:
        """Takes away the step of one worker."""
        self._len -= 1
        self._count[step] -= 1
        if not self._count[step]:
            del self._count[step]
            if step == self._lowest:
                self._lowest = min(self._count, default=math.inf)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        for step in sorted(self._count):
            yield from itertools.repeat(step, self._count[step])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return list(self)[index]
        if not -self._len <= index < self._len:
            raise IndexError(f"{self._len} steps have no number {index}")
        steps = sorted(self._count)
        ends = list(itertools.accumulate(self._count[step] for step in steps))
        return steps[bisect.bisect_right(ends, index % self._len)]
