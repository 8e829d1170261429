"""What replicas get as input: a pipeline each, or one for all replicas of a worker."""

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launchpad_lite.replicas import _nests
from launchpad_lite.replicas.errors import InputSplitError

#: Batches that a worker keeps for replicas that have not fetched theirs.
_KEPT = 4

#: Of a pipeline: its generation, how many runs are around its run, and its number.
Key = tuple[int, int, int]


def split_leading(batch: Any, parts: int) -> list[Any]:
    """Returns a batch in equal parts along the first dimension of each leaf.

    Raises:
        InputSplitError: It cannot be divided evenly, or a leaf has no dimension.
    """
    for path, leaf in _nests.leaves(batch):
        where = f"{path} of the batch" if path else "the batch"
        if not _nests.kind(leaf) or not getattr(leaf, "shape", ()):
            raise InputSplitError(
                f"{where} has no first dimension to divide among {parts} replicas: it is "
                f"{type(leaf).__name__}; give input_split_fn="
            )
        if leaf.shape[0] % parts:
            raise InputSplitError(
                f"{where} has {leaf.shape[0]} examples, which {parts} replicas cannot share evenly; "
                "drop the rest, choose another batch size, or give input_split_fn="
            )

    def part(index: int) -> Any:
        def cut(leaf: Any) -> Any:
            length = leaf.shape[0] // parts
            return leaf[index * length : (index + 1) * length]

        return _nests.rebuilt(batch, cut)

    return [part(index) for index in range(parts)]


def examples_in(batch: Any) -> int:
    """Returns how many examples a batch has: the length of its first leaf."""
    for _, leaf in _nests.leaves(batch):
        shape = getattr(leaf, "shape", ())
        return int(shape[0]) if shape else 1
    return 0


def opened(input_fn: Callable[..., Any], index: int, step: int) -> Callable[[], Any]:
    """Opens a pipeline where a training goes on.

    Args:
        input_fn: As users write it: of the index, or of the index and the first step.
        index: Of the replica or the worker.
        step: How many steps were made before. A pipeline that does not begin there by itself has
            as many batches dropped.

    Returns:
        What returns the next batch, or raises StopIteration.

    Raises:
        TypeError: It returns something else than an iterable or a callable.
    """
    takes_step = "step" in inspect.signature(input_fn).parameters
    pipeline = input_fn(index, step=step) if takes_step else input_fn(index)
    if hasattr(pipeline, "__iter__") or hasattr(pipeline, "__next__"):
        iterator: Iterator[Any] = iter(pipeline)
        if not takes_step:
            next(itertools.islice(iterator, step, step), None)
        return iterator.__next__
    if not callable(pipeline):
        raise TypeError(
            f"input_fn returned {type(pipeline).__name__}: it returns an iterable of batches, or a "
            "callable that returns the next one"
        )
    next_batch: Callable[[], Any] = pipeline
    return next_batch


class SharedPipeline:
    """A pipeline of which each replica of a worker gets a part. Thread-safe."""

    def __init__(
        self,
        next_batch: Callable[[], Any],
        parts: int,
        split: Callable[[Any, int], Sequence[Any]],
    ) -> None:
        """Makes one.

        Args:
            next_batch: Returns the next batch, or raises StopIteration.
            parts: How many replicas there are.
            split: Divides a batch.
        """
        self._next_batch = next_batch
        self._parts = parts
        self._split = split
        self._lock = threading.Lock()
        self._batches: dict[int, Sequence[Any]] = {}
        self._end: int | None = None

    def take(self, position: int, part: int) -> tuple[bool, Any]:
        """Returns whether there is a batch at a position, and a part of it.

        Raises:
            InputSplitError: A batch cannot be divided.
        """
        with self._lock:
            while position not in self._batches and self._end is None:
                self._fetch()
            if position not in self._batches:
                return False, None
            return True, self._batches[position][part]

    def _fetch(self) -> None:
        position = max(self._batches, default=-1) + 1
        try:
            parts = list(self._split(self._next_batch(), self._parts))
        except StopIteration:
            self._end = position
            return
        if len(parts) != self._parts:
            raise InputSplitError(
                f"input_split_fn returned {len(parts)} parts for {self._parts} replicas"
            )
        self._batches[position] = parts
        self._batches.pop(position - _KEPT, None)


class Inputs:
    """The input of one replica, batch by batch."""

    def __init__(self, take: Callable[[], tuple[bool, Any]]) -> None:
        """Makes it.

        Args:
            take: Returns whether there is another batch, and the batch.
        """
        self._take = take
        self._next: tuple[bool, Any] | None = None

    def has_next(self) -> bool:
        """Returns whether there is another batch, which is fetched if there is."""
        if self._next is None:
            self._next = self._take()
        return self._next[0]

    def next(self) -> Any:
        """Returns the next batch; after `has_next`."""
        (_, batch), self._next = self._next or self._take(), None
        return batch


def from_pipeline(next_batch: Callable[[], Any]) -> Inputs:
    """Returns the input of a replica with a pipeline of its own."""

    def take() -> tuple[bool, Any]:
        try:
            return True, next_batch()
        except StopIteration:
            return False, None

    return Inputs(take)
