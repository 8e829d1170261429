"""The graph of a dataset: operations on partitions. Pure; runs nothing.

An operation is *narrow* if each of its partitions comes from one partition of its parent; a chain of
these runs as one task, item by item. A *wide* one (`Shuffled`) needs all partitions of its parents,
and so divides the graph into stages.
"""

import bisect
import functools
import itertools
import operator
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launchpad_lite.engines._hashing import stable_hash
from launchpad_lite.engines.errors import OrderError
from launchpad_lite.parts.arguments import name_of

#: Identities of operations: unique, also among all processes that use the same workers.
_numbers = itertools.count(uuid.uuid4().int)

#: Iterators in iterators: each takes some of the C stack, which Python does not watch.
_MOST_NESTED = 100
#: Items that go through a longer chain at a time.
_AT_ONCE = 16
#: Names of operations in the title of a stage.
_MOST_NAMES = 8

#: Bytes of a text file that are read at once.
_PIECE_BYTES = 1 << 20
#: Types of keys that have a total order.
_ORDERED = frozenset([str, bytes, int, bool])

#: How a wide operation brings items together.
Kind = Literal["reduce", "group", "join", "sort", "spread"]


@dataclass(frozen=True, eq=False)
class Operation:
    #: For people, as `map(<lambda>)`.
    title: str
    partitions: int
    parents: "tuple[Operation, ...]" = ()
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def own_partitions(self) -> "list[tuple[Operation, int]]":
        return [(self, index) for index in range(self.partitions)]

    @property
    def inputs(self) -> "list[tuple[Operation, int]]":
        """All partitions of its parents, in order."""
        return [each for parent in self.parents for each in parent.own_partitions]

    def sources(self, partition: int) -> "list[tuple[Operation, int]]":
        """Returns which partitions of its parents a partition comes from, if it is narrow."""
        return [(parent, partition) for parent in self.parents]


@dataclass(frozen=True)
class Block:
    """A part of a text file: the lines that begin in a range of bytes."""

    path: Path
    start: int
    #: The byte after its last one; None: all, unpacked by gzip.
    end: int | None

    def __str__(self) -> str:
        return f"{self.path}" + ("" if self.end is None else f" bytes {self.start}-{self.end}")


@dataclass(frozen=True, eq=False)
class LinesSource(Operation):
    """Lines of text files, without their ends."""

    blocks: tuple[Block, ...] = ()
    encoding: str = "utf-8"

    def compute(self, partition: int) -> Iterator[Any]:
        block = self.blocks[partition]
        if block.end is None:
            import gzip

            with gzip.open(block.path, "rt", encoding=self.encoding, newline="\n") as unpacked:
                yield from (line.removesuffix("\n").removesuffix("\r") for line in unpacked)
            return
        with block.path.open("rb") as file:
            if block.start:
                file.seek(block.start - 1)
                file.readline()  # the rest of a line that belongs to the block before
            # In pieces: several times as fast as line by line, and little memory.
            while data := file.read(max(0, min(_PIECE_BYTES, block.end - file.tell()))):
                if not data.endswith(b"\n"):
                    data += file.readline()
                lines = data.decode(self.encoding).split("\n")
                if not lines[-1]:
                    lines.pop()
                yield from [line.removesuffix("\r") for line in lines] if b"\r" in data else lines


@dataclass(frozen=True, eq=False)
class ItemsSource(Operation):
    """Items of an iterable; the driver keeps them and sends each partition with its tasks."""

    chunks: tuple[bytes, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "chunks": ()}


@dataclass(frozen=True, eq=False)
class Narrow(Operation):
    """Items of one partition of the parent, one after the other."""

    how: Literal["map", "flat_map", "filter", "map_partitions", "numbered"] = "map"
    function: Callable[..., Any] = iter

    def at(self, partition: int) -> "Narrow":
        """Returns it for one partition, whose number the function of a "numbered" one gets."""
        if self.how != "numbered":
            return self
        function = functools.partial(self.function, partition)
        return replace(self, how="map_partitions", function=function)

    def apply(self, items: Iterator[Any]) -> Iterator[Any]:
        """Returns what it makes of items. These loops run in C; only the function does not."""
        if self.how == "map_partitions":
            try:
                return iter(self.function(items))
            except StopIteration as error:
                raise self._stopped() from error
        reached: list[bool] = []
        items = itertools.chain(items, _end(reached))
        if self.how == "filter":
            results: Iterator[Any] = filter(self.function, items)
        elif self.how == "map":
            results = map(self.function, items)
        else:
            results = itertools.chain.from_iterable(map(self.function, items))
        return itertools.chain(results, self._check_end(reached))

    def _check_end(self, reached: list[bool]) -> Iterator[Any]:
        # These loops take a StopIteration of the function for the end of the items.
        if not reached:
            raise self._stopped()
        yield from ()

    def _stopped(self) -> RuntimeError:
        return RuntimeError(f"{self.title} raised StopIteration")


def _end(reached: list[bool]) -> Iterator[Any]:
    """Yields nothing; notes that the end was reached."""
    reached.append(True)
    yield from ()


@dataclass(frozen=True, eq=False)
class Union(Operation):
    """The partitions of all parents."""

    def sources(self, partition: int) -> list[tuple[Operation, int]]:
        for parent in self.parents:
            if partition < parent.partitions:
                return [(parent, partition)]
            partition -= parent.partitions
        raise IndexError(partition)


@dataclass(frozen=True, eq=False)
class Some(Operation):
    """Some partitions of the parent, in this order."""

    chosen: Sequence[int] = ()

    def sources(self, partition: int) -> list[tuple[Operation, int]]:
        return [(self.parents[0], self.chosen[partition])]


@dataclass(frozen=True, eq=False)
class Cached(Operation):
    """The same items, which stay with the worker that has computed them."""


@dataclass(frozen=True, eq=False)
class Shuffled(Operation):
    """Items brought together from all partitions of the parents."""

    kind: Kind = "group"
    #: What combines two values of a key, for "reduce".
    function: Callable[[Any, Any], Any] | None = None
    # For "sort": what returns the key of an item, the keys between partitions, and the order.
    key: Callable[[Any], Any] = operator.itemgetter(0)
    bounds: tuple[Any, ...] = ()
    reverse: bool = False
    #: Decides which item goes where, for "spread".
    seed: int = 0

    def sources(self, partition: int) -> list[tuple[Operation, int]]:  # noqa: ARG002
        """Returns none: it is not narrow."""
        return []

    def cut(self, items: list[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Sorts items of a "sort", and yields those for each partition with its index."""
        nans = sort(items, self.key, reverse=self.reverse)
        if nans:
            yield self.partitions - 1, nans
        rising = items[::-1] if self.reverse else items
        # Keys without a total order, such as sets, may go anywhere, but each item goes to one
        # place.
        found = [bisect.bisect_right(rising, bound, key=self.key) for bound in self.bounds]
        places = list(itertools.accumulate(found, max))
        if self.reverse:
            places = [len(items) - place for place in reversed(places)]
        for partition, (start, end) in enumerate(itertools.pairwise([0, *places, len(items)])):
            if start < end:
                yield partition, items[start:end]

    def place(self, source: int) -> Callable[[Any], int]:
        """Returns a function that says which partition an item of an input goes to."""
        count = self.partitions
        if self.kind == "spread":
            rng = random.Random(f"{self.seed} {source}")  # noqa: S311 - no secret
            return lambda _: rng.randrange(count)
        return lambda item: stable_hash(item[0]) % count


def sort(items: list[Any], key: Callable[[Any], Any], *, reverse: bool) -> list[Any]:
    """Sorts items in place by their keys. Takes those out whose key is NaN, and returns them."""
    # This loop runs in C, and takes a StopIteration of the function for the end of the items.
    keys = list(map(key, items))
    if len(keys) < len(items):
        raise RuntimeError(f"{name_of(key)} raised StopIteration")
    nans = []
    try:
        if _has_nan(keys):
            nans = [item for item, of in zip(items, keys, strict=True) if of != of]
            items[:] = [item for item, of in zip(items, keys, strict=True) if of == of]
            keys = [of for of in keys if of == of]
            if _has_nan(keys):
                raise ValueError("one has NaN in it")
        # The next key for each item, in C.
        items.sort(key=functools.partial(next, iter(keys)), reverse=reverse)
    except (TypeError, ValueError) as error:  # of arrays it is the latter
        raise OrderError(f"the keys have no order: {error}") from error
    return nans


def _has_nan(keys: Sequence[Any]) -> bool:
    """Returns whether one of keys is NaN, or has it in it. These loops run in C."""
    kinds = set(map(type, keys))
    if kinds <= _ORDERED:
        return False
    if any(map(operator.ne, keys, keys)):
        return True
    if not any(issubclass(kind, tuple | list) for kind in kinds):
        return False
    parts = [key for key in keys if isinstance(key, tuple | list)]
    return _has_nan(list(itertools.chain.from_iterable(parts)))


def chain_of(operation: Operation, partition: int) -> Iterator[tuple[Operation, int]]:
    """Yields the operations of a task for a partition, from the last to the first."""
    sources = [(operation, partition)]
    while sources:
        [(operation, partition)] = sources  # each partition of a narrow one comes from one other
        yield operation, partition
        sources = operation.sources(partition)


def apply_all(narrow: Iterable[Narrow], items: Iterator[Any]) -> Iterator[Any]:
    """Returns what operations make of items, one after the other."""
    for is_whole, some in itertools.groupby(narrow, lambda each: each.how == "map_partitions"):
        steps = list(some)
        if not is_whole and len(steps) > _MOST_NESTED:
            items = _apply_in_turn(steps, items)
            continue
        for step in steps:
            items = step.apply(items)
    return items


def _apply_in_turn(steps: Sequence[Narrow], items: Iterator[Any]) -> Iterator[Any]:
    """Yields what many steps make of items, some at a time: their iterators are not nested."""
    while some := list(itertools.islice(items, _AT_ONCE)):
        for step in steps:
            some = list(step.apply(iter(some)))
        yield from some


def beginnings_of(operation: Operation) -> Iterator[Operation]:
    """Yields the inputs of the partitions of an operation, in order, unless they are cached."""
    waiting = [operation]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Cached | Shuffled) or not each.parents:
            yield each
        else:
            waiting += reversed(each.parents)


def operations_of(
    operation: Operation, is_there: Callable[[Operation], bool] = lambda _: False
) -> list[Operation]:
    """Returns an operation and all that it needs, each once, after those that it needs itself.

    An operation whose items are there already needs nothing, and is left out.
    """
    found: list[Operation] = []
    seen: set[int] = set()
    waiting = [(operation, False)]
    while waiting:
        each, has_parents = waiting.pop()
        if has_parents:
            found.append(each)
        elif each.number not in seen and not is_there(each):
            seen.add(each.number)
            waiting.append((each, True))
            waiting += [(parent, False) for parent in reversed(each.parents)]
    return found


def shuffles_of(
    operation: Operation, is_there: Callable[[Operation], bool] = lambda _: False
) -> list[Shuffled]:
    """Returns the wide ones of `operations_of`."""
    return [each for each in operations_of(operation, is_there) if isinstance(each, Shuffled)]


def pipeline_of(operation: Operation) -> str:
    """Returns what a task of an operation does, for people: its narrow chain."""
    names = [operation.title]
    while len(operation.parents) == 1 and not isinstance(operation, Shuffled):
        operation = operation.parents[0]
        names.append(operation.title)
    if len(names) > _MOST_NAMES:
        half = _MOST_NAMES // 2
        names[half:-half] = [f"{len(names) - 2 * half} more"]
    return " → ".join(reversed(names))


def lines_blocks(paths: Sequence[Path], block_bytes: int) -> tuple[Block, ...]:
    """Returns files cut into blocks; those that gzip has packed are blocks as a whole."""
    blocks: list[Block] = []
    for path in paths:
        if path.suffix == ".gz":
            blocks.append(Block(path, 0, None))
            continue
        size = path.stat().st_size
        starts = range(0, size, block_bytes) or [0]
        blocks += [Block(path, start, min(start + block_bytes, size)) for start in starts]
    return tuple(blocks)
