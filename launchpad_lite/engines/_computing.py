"""How a worker of map-reduce computes partitions, whoever runs the worker, within limited memory."""

import contextlib
import functools
import heapq
import itertools
import math
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import courier
from launchpad_lite.engines._broadcasts import load
from launchpad_lite.engines._operations import (
    Cached,
    Items,
    Lines,
    Narrow,
    Operation,
    Shuffled,
    apply_all,
    chain_of,
    link,
    stable_hash,
)
from launchpad_lite.engines._store import Store
from launchpad_lite.engines.errors import EngineError, SpillError, TaskError

#: Objects take more memory than their pickle, about so many times.
_OVERHEAD = 4
#: How often a partition that does not fit into memory is read, at most: then it takes more memory.
_MOST_PASSES = 100
#: Items in a chunk that is written, and bytes, at most.
_CHUNK = 4096
_CHUNK_BYTES = 1 << 20
#: How many chunks are to fit into memory, if nothing else is said.
_STREAMS = 16
#: After how many items the memory that they take is looked at for the first time.
_FIRST_LOOK = 16

#: What is done with the items of a partition, given its number.
Action = Callable[[int, Iterator[Any]], Any]


class MissingError(EngineError):
    """What a task needs is not (any more) with the worker that had it."""

    def __init__(self, worker: int, life: str) -> None:
        super().__init__(worker, life)
        self.worker = worker
        self.life = life


@dataclass(frozen=True)
class Stage:
    """A part of a job that runs without an exchange of items.

    Attributes:
        number: Its place, from 1.
        count: Of the stages of the job.
        title: What it does, for people.
    """

    number: int
    count: int
    title: str


@dataclass(frozen=True)
class Step:
    """One partition to compute.

    Attributes:
        stage: What it is a part of.
        operation: Whose partition, by number.
        partition: Which one.
        target: Number of the wide or cached operation that it is for; None: it is for the action.
        source: Index of the partition among the inputs of that.
    """

    stage: Stage
    operation: int
    partition: int
    target: int | None
    source: int


#: The operations of a job, by their number.
Operations = Mapping[int, Operation]


def where(step: Step, operations: Operations) -> str:
    """Returns stage, partition and file of a step, for people."""
    text = f"stage {step.stage.number} ({step.stage.title}), partition {step.partition}"
    *_, (first, index) = chain_of(operations[step.operation], step.partition)
    return f"{text} ({first.blocks[index]})" if isinstance(first, Lines) else text


def limit(memory_bytes: int | None, workers: int | None = None) -> int:
    """Returns half of the memory that a worker may take for data; it keeps in the other what it has.

    Args:
        memory_bytes: What the user says; None: its part of half of the machine's memory.
        workers: How many share the machine; None: one for each core.
    """
    if memory_bytes is None:
        import psutil

        memory_bytes = psutil.virtual_memory().total // (2 * (workers or psutil.cpu_count() or 1))
    return max(1, memory_bytes // 2)


def load_job(payload: bytes, received: Mapping[str, Any]) -> tuple[Operations, Action]:
    """Returns what a `Job` has pickled, given the values that came before it."""
    operations, action = load(payload, received)
    link(operations)
    return operations, action


@contextlib.contextmanager
def named(place: str) -> Iterator[None]:
    """Gives errors of the user's code the name of what was computed.

    Args:
        place: The worker, and `where`.

    Raises:
        TaskError: The code has raised.
        SpillError: The disk takes no more.
        MissingError: As it came.
    """
    try:
        yield
    except SpillError as error:
        raise SpillError(f"{place}: {error}") from error
    except MissingError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{place}: {type(error).__name__}: {error}") from error


def items_of(
    operation: Operation,
    partition: int,
    begin: Callable[[Operation, int], Iterator[Any]],
) -> Iterator[Any]:
    """Returns the items of a partition.

    Args:
        operation: Whose partition.
        partition: Which one.
        begin: Returns those of `Items`, `Shuffled` and `Cached`, which others have computed.
    """
    narrow: list[Narrow] = []
    for each, index in chain_of(operation, partition):
        if isinstance(each, Narrow):
            narrow.append(each)
        elif isinstance(each, Items | Shuffled | Cached):
            return apply_all(reversed(narrow), begin(each, index))
        elif isinstance(each, Lines):
            return apply_all(reversed(narrow), each.compute(index))
    raise AssertionError(f"{operation.title} begins with nothing")


def chunks_of(items: Iterator[Any], chunk_bytes: int) -> Iterator[bytes]:
    """Yields pickles of some items each, of about so many bytes at most unless one item has more."""
    count = 1
    while chunk := list(itertools.islice(items, count)):
        data = courier.dumps(chunk)
        yield data
        fitting = len(chunk) * chunk_bytes // len(data)
        count = max(1, min(_CHUNK, 4 * count, fitting))


def loaded(chunks: Iterable[bytes]) -> Iterator[Any]:
    """Yields the items of pickles."""
    return itertools.chain.from_iterable(map(pickle.loads, chunks))


class Computing:
    """Takes items apart for wide operations, and brings them together. Thread-safe."""

    def __init__(self, memory_bytes: int, spill_folder: str | None) -> None:
        """Sets the limits.

        Args:
            memory_bytes: That it takes, about.
            spill_folder: Where the rest goes; None: the system's folder for temporary files.
        """
        self._memory_bytes = memory_bytes
        self._spill_folder = spill_folder

    def chunks(self, items: Iterator[Any], streams: int = _STREAMS) -> Iterator[bytes]:
        """Yields pickles of some items each.

        Args:
            items: The items.
            streams: From how many such iterators a chunk is to fit into memory at a time.
        """
        chunk_bytes = self._memory_bytes // (_OVERHEAD * streams)
        return chunks_of(items, min(_CHUNK_BYTES, chunk_bytes))

    def scatter(
        self, shuffle: Shuffled, source: int, items: Iterator[Any]
    ) -> Iterator[tuple[int, bytes]]:
        """Yields pickled items, each time with the partition of a wide operation that gets them.

        Args:
            shuffle: The wide operation.
            source: Which of its inputs this is.
            items: What the input has.
        """
        if shuffle.kind == "sort":
            for unsorted in self._portions(items):
                for partition, some in shuffle.cut(unsorted):
                    yield partition, courier.dumps(some)
            return
        place = shuffle.place(source)
        if shuffle.kind == "reduce":
            assert shuffle.function is not None
            portions: Iterator[Iterable[Any]] = self._combined(items, shuffle.function)
        else:
            portions = self._portions(items)
        for portion in portions:
            buckets: list[list[Any]] = [[] for _ in range(shuffle.partitions)]
            for item in portion:
                buckets[place(item)].append(item)
            for partition, bucket in enumerate(buckets):
                if bucket:
                    yield partition, courier.dumps(bucket)

    def gather(
        self,
        shuffle: Shuffled,
        total: int,
        fetch: Callable[[Sequence[int], bool], Iterator[bytes]],
    ) -> Iterator[Any]:
        """Returns the items of a partition of a wide operation.

        Args:
            shuffle: The wide operation.
            total: The bytes of all chunks of this partition.
            fetch: Returns the chunks of some inputs, in order; the second argument says whether they
                may be in memory at the same time.
        """
        passes = max(1, math.ceil(total * _OVERHEAD / self._memory_bytes))
        passes = min(passes, _MOST_PASSES)

        def fetched(sources: Sequence[int]) -> Iterator[Any]:
            return loaded(fetch(sources, passes == 1))

        everything = range(len(shuffle.inputs))
        if shuffle.kind == "spread":
            return fetched(everything)
        if shuffle.kind == "sort":
            return self._sorted(fetched(everything), reverse=shuffle.reverse, runs=passes)
        # What does not fit is read several times, some of the keys each time.
        rounds = [
            functools.partial(_is_in_round, shuffle.partitions, passes, number)
            for number in range(passes)
        ]
        selected = [
            (lambda items: items) if passes == 1 else functools.partial(filter, chosen)
            for chosen in rounds
        ]
        if shuffle.kind == "join":
            border = shuffle.parents[0].partitions
            left, right = everything[:border], everything[border:]
            return itertools.chain.from_iterable(
                _joined(select(fetched(left)), select(fetched(right))) for select in selected
            )
        if shuffle.kind == "group":
            merge: Callable[[Iterable[Any]], Iterator[Any]] = _grouped
        else:
            assert shuffle.function is not None
            merge = functools.partial(_reduced, shuffle.function)
        return itertools.chain.from_iterable(
            merge(select(fetched(everything))) for select in selected
        )

    def _combined(
        self, items: Iterator[Any], function: Callable[[Any, Any], Any]
    ) -> Iterator[Iterable[Any]]:
        """Yields keys with combined values, as many at a time as fit into memory."""
        values: dict[Any, Any] = {}
        look = _FIRST_LOOK
        for first in items:
            # Not as a list: a tuple that is used at once costs nearly no memory.
            _combine(values, itertools.chain((first,), itertools.islice(items, look)), function)
            is_full, look = self._look(values.items(), len(values))
            if is_full:
                yield values.items()
                values = {}
        yield values.items()

    def _portions(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        """Yields as many items at a time as fit into memory."""
        portion: list[Any] = []
        look = _FIRST_LOOK
        while some := list(itertools.islice(items, look)):
            portion += some
            is_full, look = self._look(portion, len(portion))
            if is_full:
                yield portion
                portion = []
        yield portion

    def _look(self, items: Iterable[Any], count: int) -> tuple[bool, int]:
        """Returns whether items take as much memory as they may, and when to look again."""
        sample = list(itertools.islice(items, 0, None, max(1, count // 50)))
        size = _OVERHEAD * len(courier.dumps(sample)) / len(sample)
        look = max(1, min(16 * _CHUNK, int(self._memory_bytes / 8 / size)))
        return size * count > self._memory_bytes, look

    def _sorted(self, items: Iterator[Any], *, reverse: bool, runs: int) -> Iterator[Any]:
        key = operator.itemgetter(0)
        if runs == 1:
            return iter(sorted(items, key=key, reverse=reverse))
        store = Store(0, self._spill_folder)
        count = 0
        for portion in self._portions(items):
            portion.sort(key=key, reverse=reverse)
            for chunk in self.chunks(iter(portion), runs):
                store.add("runs", count, chunk)
            count += 1
        merged = heapq.merge(
            *(loaded(store.stream("runs", number)) for number in range(count)),
            key=key,
            reverse=reverse,
        )
        return _then(merged, functools.partial(store.drop, "runs"))


def _then(items: Iterator[Any], end: Callable[[], None]) -> Iterator[Any]:
    try:
        yield from items
    finally:
        end()


def _is_in_round(partitions: int, rounds: int, number: int, item: tuple[Any, Any]) -> bool:
    # Another digit than the one that has chosen the partition.
    return stable_hash(item[0]) // partitions % rounds == number


def _combine(
    values: dict[Any, Any], items: Iterable[tuple[Any, Any]], function: Callable[[Any, Any], Any]
) -> None:
    if function is operator.add:  # by far the most frequent one, without a call
        for key, value in items:
            if key in values:
                values[key] = values[key] + value
            else:
                values[key] = value
        return
    for key, value in items:
        if key in values:
            values[key] = function(values[key], value)
        else:
            values[key] = value


def _reduced(
    function: Callable[[Any, Any], Any], items: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[Any, Any]]:
    values: dict[Any, Any] = {}
    _combine(values, items, function)
    return iter(values.items())


def _grouped(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in items:
        groups.setdefault(key, []).append(value)
    return iter(groups.items())


def _joined(
    left: Iterable[tuple[Any, Any]], right: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    groups: dict[Any, list[Any]] = dict(_grouped(left))
    for key, value in right:
        for other in groups.get(key, ()):
            yield key, (other, value)
