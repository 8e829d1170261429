"""What all beds share: they are there for the time of a `with` block, whole or not at all."""

import abc
import contextlib
from typing import TypeVar

B = TypeVar("B", bound="Bed")


class Bed(abc.ABC):
    """A context manager that is built with the block and undone after it."""

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()

    def __enter__(self: B) -> B:
        with contextlib.ExitStack() as stack:
            self._build(stack)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    @abc.abstractmethod
    def _build(self, stack: contextlib.ExitStack) -> None:
        """Builds it.

        Args:
            stack: Undoes it, also if it could not be built to the end.
        """
