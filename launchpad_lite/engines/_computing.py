"""Computes partitions of map-reduce within limited memory, on our workers or others."""

import collections
import contextlib
import ctypes
import functools
import gc
import heapq
import itertools
import math
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import courier
from launchpad_lite.engines._hashing import PLAIN, canonical, first_of, stable_hash
from launchpad_lite.engines._operations import (
    Cached,
    ItemsSource,
    LinesSource,
    Narrow,
    Operation,
    Shuffled,
    apply_all,
    chain_of,
    sort,
)
from launchpad_lite.engines._store import ChunkStore

#: How many objects are measured at most: of the items, and inside each.
_MEASURED = 32
_MEASURED_PARTS = 8
#: Types of objects that items share with the program.
_SHARED = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType
#: Bytes at the end of a chunk that say how many its items take. Unpickling ignores them.
_WEIGHT_BYTES = 8
#: M_ARENA_MAX of malloc.h.
_ARENA_MAX = -8
#: A partition that does not fit into memory is read at most so often; after that, it takes more
#: memory.
_MOST_PASSES = 100
#: Items in a chunk that is written, and bytes, at most.
_CHUNK = 4096
_CHUNK_BYTES = 1 << 20
#: Bytes of items that are divided at a time, at most: with more, memory grows and nothing is faster.
_PORTION_BYTES = 16 << 20
#: How many chunks are to fit into memory, by default.
_STREAMS = 16
#: After how many items the memory that they take is looked at for the first time.
_FIRST_LOOK = 4

#: A function of the number of a partition and its items.
Action = Callable[[int, Iterator[Any]], Any]


@dataclass(frozen=True)
class JobStage:
    """A part of a job that runs without an exchange of items: stage `number` (from 1) of `count`."""

    number: int
    count: int
    title: str

    def __str__(self) -> str:
        return f"stage {self.number} ({self.title})"


@dataclass(frozen=True)
class PartitionStep:
    stage: JobStage
    #: The operation whose partition it is, by number.
    operation: int
    partition: int
    #: Number of the wide or cached operation that it is for; None: it is for the action.
    target: int | None
    #: Index of the partition among the inputs of that.
    source: int


#: The operations of a job, by their number.
Operations = Mapping[int, Operation]


def where(step: PartitionStep, operations: Operations) -> str:
    """Returns stage, partition and file of a step, for people."""
    text = f"{step.stage}, partition {step.partition}"
    *_, (first, index) = chain_of(operations[step.operation], step.partition)
    return f"{text} ({first.blocks[index]})" if isinstance(first, LinesSource) else text


def items_of(
    operation: Operation, partition: int, begin: Callable[[Operation, int], Iterator[Any]]
) -> Iterator[Any]:
    """Returns the items of a partition.

    `begin` returns those of `ItemsSource`, `Shuffled` and `Cached`, which others have computed.
    """
    narrow: list[Narrow] = []
    for each, index in chain_of(operation, partition):
        if isinstance(each, Narrow):
            narrow.append(each.at(index))
        elif isinstance(each, ItemsSource | Shuffled | Cached):
            return apply_all(reversed(narrow), begin(each, index))
        elif isinstance(each, LinesSource):
            return apply_all(reversed(narrow), each.compute(index))
    raise AssertionError(f"{operation.title} begins with nothing")


def chunk_of(items: Sequence[Any]) -> bytes:
    """Returns a pickle of items that knows its weight."""
    data = courier.dumps(items)
    # The pickle and what it becomes are in memory at the same time.
    return data + (len(data) + memory_of(items)).to_bytes(_WEIGHT_BYTES, "little")


def weight_of(chunk: bytes) -> int:
    return int.from_bytes(chunk[-_WEIGHT_BYTES:], "little")


def memory_of(items: Collection[Any]) -> int:
    """Returns how many bytes items take, measured object by object on some of them."""
    step = math.ceil(len(items) / _MEASURED)
    sample = items[::step] if isinstance(items, list) else [*itertools.islice(items, 0, None, step)]
    sizes: dict[int, float] = {}
    counts: collections.Counter[int] = collections.Counter()
    for item in sample:
        #: Objects, and how many objects of the item each of them represents.
        waiting = [(item, 1.0)]
        seen: set[int] = set()
        while waiting:
            each, share = waiting.pop()
            kind = type(each)  # not what the object itself says: that is code of the user
            if id(each) in seen or issubclass(kind, _SHARED):
                continue
            seen.add(id(each))
            # Arrays may be views of others.
            buffer = each.nbytes if hasattr(kind, "nbytes") else 0
            size = max(sys.getsizeof(each), buffer if isinstance(buffer, int) else 0)
            sizes[id(each)] = share * size
            parts = gc.get_referents(each)
            # An odd step, since the keys of a dictionary alternate with its values.
            some = parts[:: len(parts) // _MEASURED_PARTS | 1]
            waiting += [(part, share * len(parts) / len(some)) for part in some]
        counts.update(seen)
    # An object that several items share is in memory once.
    ratio = len(items) / len(sample)
    total = sum(size * (ratio if counts[each] == 1 else 1) for each, size in sizes.items())
    return int(8 * len(items) + total)


def loaded(chunks: Iterable[bytes]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_loaded, chunks))


def _loaded(chunk: bytes) -> Any:
    try:
        return pickle.loads(chunk)
    except StopIteration as error:  # which `map` would take for the end of the chunks
        raise RuntimeError("an item raised StopIteration when it was unpickled") from error


class Computing:
    """Takes items apart for wide operations, and brings them together. Thread-safe."""

    def __init__(
        self, memory_bytes: int | None, spill_folder: str | None, workers: int | None = None
    ) -> None:
        """Sets how much memory it takes, about, and where the rest goes.

        By default, the memory is a worker's part of half of the machine's, and each core has a worker.
        """
        if memory_bytes is None:
            import psutil

            workers = workers or psutil.cpu_count() or 1
            memory_bytes = psutil.virtual_memory().total // (2 * workers)
        # For what is computed; the rest is in transit.
        self._memory_bytes = max(1, 2 * memory_bytes // 5)
        self._spill_folder = spill_folder
        _tidy_heap()

    def chunks(self, items: Iterator[Any], streams: int = _STREAMS) -> Iterator[bytes]:
        """Yields chunks of items, so small that one from each of so many streams fits into memory.

        Only an item that is larger than that makes a larger chunk.
        """
        chunk_bytes, count = min(_CHUNK_BYTES, self._memory_bytes // streams), 1
        while some := list(itertools.islice(items, count)):
            data = chunk_of(some)
            yield data
            fitting = len(some) * chunk_bytes // weight_of(data)
            count = max(1, min(_CHUNK, 4 * count, fitting))

    def scatter(
        self, shuffle: Shuffled, source: int, items: Iterator[Any]
    ) -> Iterator[tuple[int, bytes]]:
        """Yields chunks of items, each with the partition of a wide operation that gets them."""
        place = shuffle.place(source)
        if shuffle.kind == "reduce":
            assert shuffle.function is not None
            portions: Iterator[Iterable[Any]] = self._combined(items, shuffle.function)
        else:
            portions = self._portions(items)
        chunk_bytes = max(1, self._memory_bytes // _STREAMS)
        for portion in portions:
            for partition, some in _divided(shuffle, place, portion):
                count = math.ceil(len(some) / max(1, memory_of(some) // chunk_bytes))
                for start in range(0, len(some), count):
                    yield partition, chunk_of(some[start : start + count])
            portion = some = []
            _tidy_heap()  # before there is the next one

    def gather(
        self, shuffle: Shuffled, total: int, fetch: Callable[[Sequence[int]], Iterator[bytes]]
    ) -> Iterator[Any]:
        """Returns the items of a partition of a wide operation, whose chunks weigh `total` bytes.

        `fetch` returns the chunks of some inputs, in order.
        """
        passes = min(_MOST_PASSES, max(1, math.ceil(total / self._memory_bytes)))

        def fetched(sources: Sequence[int]) -> Iterator[Any]:
            return loaded(fetch(sources))

        everything = range(len(shuffle.inputs))
        if shuffle.kind == "spread":
            return fetched(everything)
        if shuffle.kind == "sort":
            return self._sorted(shuffle, fetched(everything), passes)
        # A partition that does not fit is read several times, for some of the keys each time.
        sides = [everything]
        merge: Callable[..., Iterator[Any]] = _grouped
        if shuffle.kind == "join":
            border = shuffle.parents[0].partitions
            sides, merge = [everything[:border], everything[border:]], _joined
        elif shuffle.function is not None:
            merge = functools.partial(_reduced, shuffle.function)

        def merged(number: int) -> Iterator[Any]:
            parts = [fetched(sources) for sources in sides]
            if passes > 1:
                is_chosen = functools.partial(_is_in_round, shuffle.partitions, passes, number)
                parts = [filter(is_chosen, items) for items in parts]
            return merge(*parts)

        # No `map`, which would take a StopIteration of the function for its end.
        return itertools.chain.from_iterable(merged(number) for number in range(passes))

    def _combined(
        self, items: Iterator[Any], function: Callable[[Any, Any], Any]
    ) -> Iterator[Iterable[Any]]:
        """Yields keys with combined values, as many at a time as fit into memory."""
        values: dict[Any, Any] = {}
        firsts: dict[Any, Any] = {}
        look = _FIRST_LOOK
        for first in items:
            # Not as a list: a tuple that is used at once costs nearly no memory.
            some = itertools.chain((first,), itertools.islice(items, look))
            _combine(values, firsts, some, function)
            is_full, look = _look(values.items(), look, self._memory_bytes)
            if is_full:
                yield values.items()
                values, firsts = {}, {}
        yield values.items()

    def _portions(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        portion: list[Any] = []
        look, most = _FIRST_LOOK, min(self._memory_bytes, _PORTION_BYTES)
        while some := list(itertools.islice(items, look)):
            portion += some
            del some
            is_full, look = _look(portion, look, most)
            if is_full:
                yield portion
                portion = []
        yield portion

    def _sorted(self, shuffle: Shuffled, items: Iterator[Any], runs: int) -> Iterator[Any]:
        order = functools.partial(sort, key=shuffle.key, reverse=shuffle.reverse)
        if runs == 1:
            portion = list(items)
            nans = order(portion)
            return itertools.chain(portion, nans)
        store = ChunkStore(self._spill_folder)
        owner = shuffle.number
        store.open(owner)
        count = 0
        for portion in self._portions(items):
            for run, some in ("nan", order(portion)), (count, portion):
                for chunk in self.chunks(iter(some), runs):
                    store.add(owner, run, chunk)
            count += 1
            del portion, some
            _tidy_heap()  # before there is the next one
        merged = heapq.merge(
            *(loaded(store.stream(owner, number)) for number in range(count)),
            key=shuffle.key,
            reverse=shuffle.reverse,
        )
        # The file is gone with the last of these streams.
        return itertools.chain(merged, loaded(store.stream(owner, "nan")))


def _look(items: Collection[Any], look: int, most_bytes: int) -> tuple[bool, int]:
    """Returns whether items take as much memory as they may, and after how many to look again."""
    taken = memory_of(items)
    size = taken / len(items)
    look = max(1, min(16 * _CHUNK, 4 * look, int(most_bytes / 8 / size)))
    return taken + size * look > most_bytes, look


def _tidy_heap() -> None:
    """Has the C library return what is free, and make no heaps for threads that each keep their own."""
    with contextlib.suppress(AttributeError):  # another library than that of GNU
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
        ctypes.CDLL(None).malloc_trim(0)


def _is_in_round(partitions: int, rounds: int, number: int, item: tuple[Any, Any]) -> bool:
    # Another digit than the one that has chosen the partition.
    return stable_hash(item[0]) // partitions % rounds == number


def _divided(
    shuffle: Shuffled, place: Callable[[Any], int], portion: Iterable[Any]
) -> Iterator[tuple[int, list[Any]]]:
    if shuffle.kind == "sort":
        assert isinstance(portion, list)
        yield from shuffle.cut(portion)
        return
    buckets: list[list[Any]] = [[] for _ in range(shuffle.partitions)]
    for item in portion:
        buckets[place(item)].append(item)
    yield from ((partition, bucket) for partition, bucket in enumerate(buckets) if bucket)


def _combine(
    values: dict[Any, Any],
    firsts: dict[Any, Any],
    items: Iterable[tuple[Any, Any]],
    function: Callable[[Any, Any], Any],
) -> None:
    for key, value in items:
        if key in values or (type(key) not in PLAIN and (key := first_of(firsts, key)) in values):
            values[key] = function(values[key], value)
        else:
            values[key] = value


def _reduced(
    function: Callable[[Any, Any], Any], items: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[Any, Any]]:
    values: dict[Any, Any] = {}
    _combine(values, {}, items, function)
    return iter(values.items())


def _groups(firsts: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in items:
        if key in groups or (type(key) not in PLAIN and (key := first_of(firsts, key)) in groups):
            groups[key].append(value)
        else:
            groups[key] = [value]
    return groups


def _grouped(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    return iter(_groups({}, items).items())


def _joined(
    left: Iterable[tuple[Any, Any]], right: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    firsts: dict[Any, Any] = {}
    groups = _groups(firsts, left)
    for key, value in right:
        # Nothing is kept of keys that are only here.
        if key not in groups and type(key) not in PLAIN:
            key = firsts.get(canonical(key), key)
        for other in groups.get(key, ()):
            yield key, (other, value)
