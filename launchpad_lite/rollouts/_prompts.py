"""The order of prompts: epoch by epoch, each shuffled by a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptRef:
    """One use of a prompt: the one with this index, after all were used `epoch` times."""

    epoch: int
    index: int


@dataclass
class PromptOrder:
    """Which prompts come next."""

    #: How many prompts there are, and how often each is used; None: without end.
    count: int
    epochs: int | None
    shuffle: bool
    seed: int
    #: How many uses have begun.
    position: int = 0
    _epoch: int = field(default=-1, init=False)
    _indices: Sequence[int] = field(default=(), init=False)

    @property
    def identity(self) -> str:
        """What has to be the same for a position to mean the same."""
        order = f"seed {self.seed}" if self.shuffle else "no shuffle"
        return f"{self.count} prompts, {order}"

    @property
    def is_over(self) -> bool:
        return self.epochs is not None and self.position >= self.count * self.epochs

    def next(self) -> PromptRef | None:
        """Returns the next one; None if none is left."""
        if self.is_over:
            return None
        epoch, place = divmod(self.position, self.count)
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, range(self.count)
            if self.shuffle:
                self._indices = list(self._indices)
                random.Random(f"{self.seed} {epoch}").shuffle(self._indices)  # noqa: S311 - no secret
        self.position += 1
        return PromptRef(epoch, self._indices[place])
