"""The steps of many workers; finds the lowest one in constant time."""

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any


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
        self._count[step] += 1
        self._len += 1
        self._lowest = min(self._lowest, step)

    def remove(self, step: int) -> None:
        self._len -= 1
        self._count[step] -= 1
        if not self._count[step]:
            del self._count[step]
            if step == self._lowest:
                self._lowest = min(self._count, default=math.inf)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._count.elements()))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]
