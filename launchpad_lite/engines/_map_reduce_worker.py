"""A worker of the map-reduce engine: computes partitions, and keeps what others will fetch."""

import functools
import heapq
import itertools
import math
import operator
import os
import pickle
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import courier
import launchpad_lite as lp
from launchpad_lite.engines._broadcasts import load
from launchpad_lite.engines._operations import Cached, Items, Operation, Shuffled, stable_hash
from launchpad_lite.engines.errors import EngineError, SpillError, TaskError

#: Objects take more memory than their pickle, about so many times.
_OVERHEAD = 4
#: How often a partition that does not fit into memory is read, at most: then it takes more memory.
_MOST_PASSES = 100
#: Items in a chunk that is written.
_CHUNK = 4096
#: After how many items the memory that they take is looked at for the first time.
_FIRST_LOOK = 16


class MissingError(EngineError):
    """What a task needs is not (any more) with the worker that had it."""

    def __init__(self, worker: int, life: str) -> None:
        super().__init__(worker, life)
        self.worker = worker
        self.life = life


class NotPreparedError(EngineError):
    """The worker does not know the operations of this job: it was started again."""


@dataclass(frozen=True)
class Output:
    """What a task has left with its worker for the tasks of the next stage.

    Attributes:
        worker: Index of the worker.
        life: Which process of it.
        sizes: Bytes for each partition of the next stage.
    """

    worker: int
    life: str
    sizes: Sequence[int]


@dataclass(frozen=True)
class Task:
    """One partition to compute.

    Attributes:
        job: Whose operations these are.
        operation: Number of the operation.
        partition: Which of its partitions.
        shuffle: Number of the wide operation that it is for; None if the driver wants the result.
        source: Index of the partition among the inputs of that.
        items: Pickled items of partitions that the driver has.
        outputs: Where the inputs of wide operations are, by the number of these.
        where: For people.
    """

    job: str
    operation: int
    partition: int
    shuffle: int | None
    source: int
    items: Mapping[tuple[int, int], bytes]
    outputs: Mapping[int, Sequence[Output]]
    where: str


#: A pickle, or file, offset and size of one.
_Chunk = bytes | tuple[IO[bytes], int, int]


def _read(chunk: _Chunk) -> bytes:
    if isinstance(chunk, bytes):
        return chunk
    file, offset, size = chunk
    return os.pread(file.fileno(), size, offset)


class _Store:
    """Pickled chunks of items: in memory up to a limit, and in a file that has no name beyond."""

    def __init__(self, memory_bytes: int, folder: str | None) -> None:
        self._limit = memory_bytes
        self._folder = folder
        self._used = 0
        self._lock = threading.Lock()
        self._chunks: dict[Any, list[_Chunk]] = {}
        #: One for each owner, so that its room is free once the owner is gone.
        self._files: dict[Any, IO[bytes]] = {}

    def add(self, owner: Any, key: Any, data: bytes) -> None:
        with self._lock:
            chunks = self._chunks.setdefault((owner, key), [])
            if self._used + len(data) <= self._limit:
                self._used += len(data)
                chunks.append(data)
                return
            try:
                if owner not in self._files:
                    # Without a name: nothing is left of it, even after a SIGKILL.
                    self._files[owner] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                file = self._files[owner]
                offset = file.seek(0, os.SEEK_END)
                file.write(data)
                file.flush()
            except OSError as error:
                raise SpillError(
                    f"{lp.current_node().name}: {len(data):,} bytes could not be spilled to "
                    f"{self._folder or tempfile.gettempdir()}: {error}; choose another spill_folder="
                ) from error
            chunks.append((file, offset, len(data)))

    def get(self, owner: Any, key: Any) -> list[bytes]:
        with self._lock:
            chunks = list(self._chunks.get((owner, key), ()))
            return [_read(each) for each in chunks]

    def stream(self, owner: Any, key: Any) -> Iterator[Any]:
        """Yields items that are all in files, one chunk in memory at a time."""
        for each in self._chunks.get((owner, key), ()):
            yield from pickle.loads(_read(each))

    def has(self, owner: Any, key: Any) -> bool:
        with self._lock:
            return (owner, key) in self._chunks

    def mark(self, owner: Any, key: Any) -> None:
        """Notes that there is something, if only nothing."""
        with self._lock:
            self._chunks.setdefault((owner, key), [])

    def drop(self, owner: Any) -> None:
        with self._lock:
            for each in [each for each in self._chunks if each[0] == owner]:
                self._used -= sum(
                    len(data) for data in self._chunks.pop(each) if isinstance(data, bytes)
                )
            file = self._files.pop(owner, None)
        if file is not None:
            file.close()


class Worker:
    """Computes one partition at a time. Thread-safe: others fetch meanwhile."""

    def __init__(
        self,
        index: int,
        peers: Sequence[Any],
        memory_bytes: int | None,
        spill_folder: str | None,
    ) -> None:
        """Makes one that knows no job yet.

        Args:
            index: Which one it is.
            peers: Clients of all workers, in order; None in the place of this one.
            memory_bytes: For data, in bytes; None: its part of half of the machine's memory.
            spill_folder: Where the rest goes; None: the system's folder for temporary files.
        """
        if memory_bytes is None:
            import psutil

            memory_bytes = psutil.virtual_memory().total // (2 * len(peers))
        self._index = index
        self._peers: list[Any] = [self if peer is None else peer for peer in peers]
        self._life = uuid.uuid4().hex
        # Half for what is computed, half for what is kept.
        self._memory_bytes = max(1, memory_bytes // 2)
        self._spill_folder = spill_folder
        self._store = _Store(self._memory_bytes, spill_folder)
        self._jobs: dict[
            str, tuple[Mapping[int, Operation], Callable[[int, Iterator[Any]], Any]]
        ] = {}
        self._broadcasts: dict[str, Any] = {}
        self._computing = threading.Lock()

    @courier.idempotent
    def hello(self) -> str:
        """Returns which process of the worker this is."""
        return self._life

    @courier.idempotent
    def receive(self, name: str, data: bytes) -> None:
        """Takes a value that functions use."""
        self._broadcasts[name] = pickle.loads(data)

    def prepare(self, job: str, payload: bytes) -> None:
        """Takes the operations of a job."""
        self._jobs[job] = load(payload, self._broadcasts)

    @courier.idempotent
    def forget(self, jobs: Sequence[str], owners: Sequence[int]) -> None:
        """Drops jobs, and what was kept for operations."""
        for job in jobs:
            self._jobs.pop(job, None)
        for owner in owners:
            self._store.drop(owner)

    @courier.idempotent
    def fetch(
        self, life: str, shuffle: int, sources: Sequence[int], partition: int
    ) -> list[list[bytes]]:
        """Returns chunks of what tasks have left here, by task.

        Raises:
            MissingError: This process does not have it.
        """
        if life != self._life or not all(self._store.has(shuffle, (m, -1)) for m in sources):
            raise MissingError(self._index, life)
        return [self._store.get(shuffle, (source, partition)) for source in sources]

    def compute(self, task: Task) -> Any:
        """Computes a partition.

        Returns:
            The result; the `Output` if it is for another stage.

        Raises:
            NotPreparedError: `prepare` comes first.
            MissingError: An input is not there any more.
            TaskError: The code of the user has raised.
        """
        call = courier.current_call()
        with self._computing:
            if call.cancelled:
                return None
            if task.job not in self._jobs:
                raise NotPreparedError(task.job)
            operations, action = self._jobs[task.job]
            try:
                items = self._items(task, operations[task.operation], task.partition)
                if task.shuffle is None:
                    return action(task.partition, items)
                shuffle = operations[task.shuffle]
                assert isinstance(shuffle, Shuffled)
                return Output(self._index, self._life, self._leave(shuffle, task.source, items))
            except (MissingError, SpillError):
                raise
            except Exception as error:
                where = f"{lp.current_node().name}: {task.where}"
                raise TaskError(f"{where}: {type(error).__name__}: {error}") from error

    # How a partition is computed.

    def _items(self, task: Task, operation: Operation, partition: int) -> Iterator[Any]:
        if isinstance(operation, Items):
            return iter(pickle.loads(task.items[operation.number, partition]))
        if isinstance(operation, Shuffled):
            return self._gathered(operation, partition, task.outputs[operation.number])
        if isinstance(operation, Cached):
            key = (partition, 0)
            if not self._store.has(operation.number, (partition, -1)):
                for chunk in _chunks(self._items(task, operation.parents[0], partition)):
                    self._store.add(operation.number, key, pickle.dumps(chunk, protocol=5))
                self._store.mark(operation.number, (partition, -1))
            return _loaded(self._store.get(operation.number, key))
        return operation.compute(partition, functools.partial(self._items, task))

    def _leave(self, shuffle: Shuffled, source: int, items: Iterator[Any]) -> list[int]:
        """Keeps items for the partitions of a wide operation; returns their sizes in bytes."""
        sizes = [0] * shuffle.partitions
        place = shuffle.place(source)

        def write(some: Iterable[Any]) -> None:
            buckets: list[list[Any]] = [[] for _ in range(shuffle.partitions)]
            for item in some:
                buckets[place(item)].append(item)
            for partition, bucket in enumerate(buckets):
                if bucket:
                    data = pickle.dumps(bucket, protocol=5)
                    sizes[partition] += len(data)
                    self._store.add(shuffle.number, (source, partition), data)

        if shuffle.kind == "reduce":
            assert shuffle.function is not None
            for combined in self._combined(items, shuffle.function):
                write(combined)
        else:
            for some in self._portions(items):
                write(some)
        self._store.mark(shuffle.number, (source, -1))
        return sizes

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
        size = _OVERHEAD * len(pickle.dumps(sample, protocol=5)) / len(sample)
        look = max(1, min(16 * _CHUNK, int(self._memory_bytes / 8 / size)))
        return size * count > self._memory_bytes, look

    def _gathered(
        self, shuffle: Shuffled, partition: int, outputs: Sequence[Output]
    ) -> Iterator[Any]:
        """Returns the items of a partition of a wide operation."""
        total = sum(output.sizes[partition] for output in outputs)
        passes = max(1, math.ceil(total * _OVERHEAD / self._memory_bytes))
        passes = min(passes, _MOST_PASSES)

        def fetched(sources: Sequence[int]) -> Iterator[Any]:
            chunks = self._fetched(shuffle.number, partition, outputs, sources, at_once=passes == 1)
            return itertools.chain.from_iterable(map(pickle.loads, chunks))

        everything = range(len(outputs))
        if shuffle.kind == "spread":
            return fetched(everything)
        if shuffle.kind == "sort":
            return self._sorted(fetched(everything), reverse=shuffle.reverse, fits=passes == 1)
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

    def _fetched(
        self,
        shuffle: int,
        partition: int,
        outputs: Sequence[Output],
        sources: Sequence[int],
        *,
        at_once: bool,
    ) -> Iterator[bytes]:
        """Yields chunks in the order of the tasks that made them."""
        wanted = [source for source in sources if outputs[source].sizes[partition]]
        for some in [wanted] if at_once else [[source] for source in wanted]:
            parts: dict[tuple[int, str], list[int]] = {}
            for source in some:
                parts.setdefault((outputs[source].worker, outputs[source].life), []).append(source)
            calls = {
                place: self._peers[place[0]].futures.fetch(place[1], shuffle, part, partition)
                for place, part in parts.items()
                if place[0] != self._index
            }
            found: dict[int, list[bytes]] = {}
            for (worker, life), part in parts.items():
                try:
                    chunks = (
                        self.fetch(life, shuffle, part, partition)
                        if worker == self._index
                        else calls[worker, life].result()
                    )
                except (courier.ServerLostError, courier.ServerUnreachableError):
                    raise MissingError(worker, life) from None
                found.update(zip(part, chunks, strict=True))
            for source in some:
                yield from found.pop(source)

    def _sorted(self, items: Iterator[Any], *, reverse: bool, fits: bool) -> Iterator[Any]:
        key = operator.itemgetter(0)
        if fits:
            return iter(sorted(items, key=key, reverse=reverse))
        runs = _Store(0, self._spill_folder)
        count = 0
        for portion in self._portions(items):
            portion.sort(key=key, reverse=reverse)
            for chunk in _chunks(iter(portion)):
                runs.add("runs", count, pickle.dumps(chunk, protocol=5))
            count += 1
        merged = heapq.merge(
            *(runs.stream("runs", number) for number in range(count)), key=key, reverse=reverse
        )
        return _then(merged, functools.partial(runs.drop, "runs"))


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(items, _CHUNK)):
        yield chunk


def _loaded(chunks: Iterable[bytes]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(pickle.loads, chunks))


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
