"""A replay buffer by hand: a list of a `multiprocessing.Manager`."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from replays import SAMPLED, SIZE, Replay, arguments, measure


class ListReplay(Replay):
    """Drops the oldest items."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def insert(self, item: dict[str, Any]) -> None:
        """Appends it."""
        self._extend([item])

    def insert_many(self, items: dict[str, Any]) -> None:
        """Appends them in one call."""
        self._extend(
            [dict(zip(items, row, strict=True)) for row in zip(*items.values(), strict=True)]
        )

    def _extend(self, items: list[dict[str, Any]]) -> None:
        self._kept.extend(items)
        if len(self._kept) > SIZE:
            del self._kept[: len(items)]

    def batches(self) -> Iterator[dict[str, Any]]:
        """Gets one item after the other."""
        size = len(self._kept)
        while True:
            places = np.random.default_rng().integers(size, size=SAMPLED)
            chosen = [self._kept[place] for place in places.tolist()]
            yield {name: np.stack([each[name] for each in chosen]) for name in chosen[0]}


def main(sampler: str, seconds: float, result: Path) -> None:
    """Measures if it is uniform."""
    assert sampler == "uniform"
    with multiprocessing.Manager() as manager:
        measure(ListReplay(manager.list()), seconds, result)


if __name__ == "__main__":
    main(*arguments())
