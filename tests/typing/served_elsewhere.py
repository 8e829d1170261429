"""A class of another module, which nobody wrote for courier; see planted_mistakes.py."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Buffer(Generic[T]):
    """Keeps the newest items."""

    def __init__(self, size: int) -> None:
        self._items = deque[T](maxlen=size)

    def add(self, item: T, *, first: bool = False) -> int:
        """Adds an item; returns how many there are."""
        self._items.insert(0 if first else len(self._items), item)
        return len(self._items)

    def sample(self, count: int = 1) -> list[T]:
        """Returns some items, the newest last."""
        return list(self._items)[-count:]
