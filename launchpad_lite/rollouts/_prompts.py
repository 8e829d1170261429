"""The order of prompts: epoch by epoch, each shuffled by a seed."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptRef:
    """One use of a prompt.

    Attributes:
        epoch: How often all were used before.
        index: Its place in the sequence.
    """

    epoch: int
    index: int


class PromptOrder:
    """Which prompts come next."""

    def __init__(
        self, count: int, *, epochs: int | None, shuffle: bool, seed: int, position: int = 0
    ) -> None:
        """Makes one.

        Args:
            count: How many prompts there are, at least one.
            epochs: How often each is used; None: without end.
            shuffle: Whether each epoch has an order of its own.
            seed: Of these orders.
            position: How many uses have begun before.
        """
        self._count = count
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self.position = position
        self._refs = self._from(position)

    def _from(self, position: int) -> Iterator[PromptRef]:
        first, done = divmod(position, self._count)
        epochs = itertools.count(first) if self._epochs is None else range(first, self._epochs)
        for epoch in epochs:
            indices: Sequence[int] = range(self._count)
            if self._shuffle:
                indices = list(indices)
                random.Random(f"{self._seed} {epoch}").shuffle(indices)  # noqa: S311 - no secret
            for index in indices[done:]:
                yield PromptRef(epoch, index)
            done = 0

    @property
    def identity(self) -> str:
        """What has to be the same for a position to mean the same."""
        order = f"seed {self._seed}" if self._shuffle else "no shuffle"
        return f"{self._count} prompts, {order}"

    def at(self, position: int) -> "PromptOrder":
        """Returns the same order after so many uses."""
        return PromptOrder(
            self._count,
            epochs=self._epochs,
            shuffle=self._shuffle,
            seed=self._seed,
            position=position,
        )

    @property
    def is_over(self) -> bool:
        """Whether none is left."""
        return self._epochs is not None and self.position >= self._count * self._epochs

    def next(self) -> PromptRef | None:
        """Returns the next one; None if none is left."""
        ref = next(self._refs, None)
        self.position += ref is not None
        return ref
