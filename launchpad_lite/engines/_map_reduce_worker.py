"""A worker of the map-reduce engine: computes partitions, and keeps output for other workers."""

import asyncio
import functools
import heapq
import logging
import operator
import os
import pickle
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.engines._computing import (
    Action,
    Computing,
    Operations,
    PartitionStep,
    items_of,
    loaded,
    weight_of,
    where,
)
from launchpad_lite.engines._jobs import load
from launchpad_lite.engines._operations import Cached, ItemsSource, Operation, Shuffled
from launchpad_lite.engines._store import ChunkStore, MissingError
from launchpad_lite.engines._user_code import Named
from launchpad_lite.engines.errors import EngineError

#: The name of this process: threads of the driver's cannot be ended.
PROCESS = uuid.uuid4().hex

_LOGGER = logging.getLogger(__name__)


class NotPreparedError(EngineError):
    """The worker does not know the operations of this job: it was started again, or lost the driver."""


@dataclass(frozen=True)
class StageOutput:
    """The output of a task, kept by its worker for the tasks of the next stage."""

    worker: int
    #: Which stay of the driver there.
    life: str
    #: Bytes of memory that it takes to load what each partition of the next stage gets.
    weights: Sequence[int]


@dataclass(frozen=True)
class StepRequest:
    """A step, and what it needs."""

    job: str
    step: PartitionStep
    #: Pickled items of its input partition, if the driver has them.
    items: bytes
    #: Where its input items are, if they come from a wide operation.
    outputs: Sequence[StageOutput]


@dataclass(eq=False)
class _Stay:
    """The data of a driver on this worker, kept while the driver is connected."""

    store: ChunkStore
    #: Ends it.
    end: Callable[[], object]
    jobs: dict[str, tuple[Operations, Action]] = field(default_factory=dict)
    broadcasts: dict[str, Any] = field(default_factory=dict)


class MapReduceWorker:
    """Computes one partition at a time. Thread-safe: others fetch meanwhile."""

    def __init__(
        self, index: int, peers: Sequence[Any], memory_bytes: int | None, spill_folder: str | None
    ) -> None:
        self._index = index
        #: Clients of all workers, in order; None in the place of this one.
        self._peers = peers
        self._spill_folder = spill_folder
        self._computes = Computing(memory_bytes, spill_folder, len(peers))
        #: By life.
        self._stays: dict[str, _Stay] = {}
        self._computing = threading.Lock()
        #: The job of the task that is computed.
        self._job: str | None = None
        self._stops = False
        lp.register_stop_handler(self._stop)

    @courier.idempotent
    def hello(self) -> None:
        """Returns when the worker is there."""

    async def stay(self) -> AsyncIterator[str]:
        """Keeps the data of a driver while it reads this stream; yields the name of the data, its life."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        life = uuid.uuid4().hex
        store = ChunkStore(self._spill_folder, life)
        self._stays[life] = _Stay(store, functools.partial(loop.call_soon_threadsafe, ended.set))
        try:
            yield life
            if not self._stops:
                await ended.wait()  # or the driver leaves, or is gone
        finally:
            del self._stays[life]
            store.drop_all()  # what a task still adds goes with the last reference to the store

    def _stop(self) -> None:
        """Ends the streams of drivers, for which the end of the node would wait."""
        self._stops = True
        for stay in list(self._stays.values()):
            stay.end()

    def _stay(self, life: str, job: str) -> _Stay:
        try:
            return self._stays[life]
        except KeyError:
            raise NotPreparedError(job) from None

    @courier.idempotent
    def receive(self, life: str, name: str, data: bytes) -> None:
        self._stay(life, name).broadcasts[name] = pickle.loads(data)

    def prepare(self, life: str, job: str, payload: bytes, broadcasts: Sequence[str]) -> None:
        """Takes the operations of a job. Drops values that functions cannot use any more."""
        stay = self._stay(life, job)
        stay.broadcasts = {name: stay.broadcasts[name] for name in broadcasts}
        stay.jobs[job] = load(payload, stay.broadcasts)

    @courier.idempotent
    def forget(self, life: str, jobs: Sequence[str], owners: Sequence[int]) -> None:
        if stay := self._stays.get(life):
            for job in jobs:
                stay.jobs.pop(job, None)
            for owner in owners:
                stay.store.drop(owner)

    def end(self, job: str, process: str) -> None:
        """Ends this process if it computes a task of a job, unless it is that of the driver."""
        if self._job == job:
            if process != PROCESS:
                os.kill(os.getpid(), signal.SIGKILL)
            _LOGGER.warning(
                "worker %d is a thread of this process and cannot be ended: the next action waits "
                "until its task is done",
                self._index,
            )

    def fetch(
        self, life: str, shuffle: int, sources: Sequence[int], partition: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yields what tasks have left for a partition: each chunk with its task, in their order."""
        stay = self._stays.get(life)
        if stay is None or not all(stay.store.has(shuffle, (source, -1)) for source in sources):
            raise MissingError(life)
        for source in sources:
            for chunk in stay.store.stream(shuffle, (source, partition)):
                yield source, chunk

    def compute(self, life: str, task: StepRequest) -> Any:
        """Returns the result of the action for a partition, or a `StageOutput` for another stage.

        Before it comes `prepare`, or it raises NotPreparedError. MissingError says that an input is
        not there any more.
        """
        call = courier.current_call()
        with self._computing:
            if call.cancelled:
                return None
            stay = self._stay(life, task.job)
            if task.job not in stay.jobs:
                raise NotPreparedError(task.job)
            operations, action = stay.jobs[task.job]
            step = task.step
            self._job = task.job
            try:
                with Named(f"{lp.current_node().name}: {where(step, operations)}"):
                    return self._computed(stay.store, task, operations, action)
            finally:
                self._job = None
                if task.job not in stay.jobs and step.target is not None:
                    stay.store.drop(step.target)  # the job failed meanwhile

    def _computed(
        self, store: ChunkStore, task: StepRequest, operations: Operations, action: Action
    ) -> Any:
        step = task.step
        missing: list[MissingError] = []
        begin = functools.partial(self._begin, store, task, missing)
        items = items_of(operations[step.operation], step.partition, begin)
        if step.target is None:
            result = action(step.partition, items)
        else:
            target = operations[step.target]
            assert isinstance(target, Shuffled)
            weights = self._leave(store, target, step.source, items)
            result = StageOutput(self._index, store.life, weights)
        if missing:  # the user's code may have caught it
            raise missing[0]
        return result

    def _begin(
        self,
        store: ChunkStore,
        task: StepRequest,
        missing: list[MissingError],
        operation: Operation,
        partition: int,
    ) -> Iterator[Any]:
        """Returns the items of a partition that a task begins with; notes if some are missing."""
        if isinstance(operation, ItemsSource):
            return loaded([task.items])
        if isinstance(operation, Shuffled):
            if len(task.outputs) < len(operation.inputs):  # not all are cached here
                raise MissingError(store.life)
            total = sum(output.weights[partition] for output in task.outputs)

            def fetch(sources: Sequence[int]) -> Iterator[bytes]:
                wanted: dict[tuple[int, str], list[int]] = {}
                for source in sources:
                    output = task.outputs[source]
                    if output.weights[partition]:
                        wanted.setdefault((output.worker, output.life), []).append(source)
                fetched = [
                    self._fetched(*place, operation.number, some, partition)
                    for place, some in wanted.items()
                ]
                merged = heapq.merge(*fetched, key=operator.itemgetter(0))
                return _noting(missing, (chunk for _, chunk in merged))

            return self._computes.gather(operation, total, fetch)
        assert isinstance(operation, Cached)
        owner = operation.number
        if not store.has(owner, (partition, -1)):
            begin = functools.partial(self._begin, store, task, missing)
            store.open(owner)
            store.remove(owner, (partition, 0))  # of a task that has failed
            for chunk in self._computes.chunks(items_of(operation.parents[0], partition, begin)):
                store.add(owner, (partition, 0), chunk)
            if missing:
                raise missing[0]
            store.mark(owner, (partition, -1))
        return loaded(_noting(missing, store.stream(owner, (partition, 0))))

    def _leave(
        self, store: ChunkStore, shuffle: Shuffled, source: int, items: Iterator[Any]
    ) -> list[int]:
        """Keeps items for the partitions of a wide operation; returns the weight of each."""
        weights = [0] * shuffle.partitions
        owner = shuffle.number
        store.open(owner)
        for partition in range(shuffle.partitions):
            store.remove(owner, (source, partition))  # of a task that has failed
        for partition, chunk in self._computes.scatter(shuffle, source, items):
            weights[partition] += weight_of(chunk)
            store.add(owner, (source, partition), chunk)
        store.mark(owner, (source, -1))
        return weights

    def _fetched(self, worker: int, life: str, *wanted: Any) -> Iterator[tuple[int, bytes]]:
        """Yields what `fetch` of a worker does."""
        peer = self if worker == self._index else self._peers[worker]
        try:
            yield from peer.fetch(life, *wanted)
        except courier.ServerGoneError:
            raise MissingError(life) from None


def _noting(missing: list[MissingError], chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields chunks; notes that some are missing, because the user's code may catch the error."""
    try:
        yield from chunks
    except MissingError as error:
        missing.append(error)
        raise
