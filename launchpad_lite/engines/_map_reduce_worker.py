"""A worker of the map-reduce engine: computes partitions, and keeps what others will fetch."""

import functools
import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.engines._broadcasts import load
from launchpad_lite.engines._computing import (
    Action,
    Computing,
    MissingError,
    Operations,
    Step,
    chunks_of,
    items_of,
    limit,
    loaded,
    named,
    where,
)
from launchpad_lite.engines._operations import Cached, Items, Operation, Shuffled
from launchpad_lite.engines._store import Store
from launchpad_lite.engines.errors import EngineError


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
    """A step, and what it needs.

    Attributes:
        job: Whose operations these are.
        step: What to compute.
        items: Pickled items of the partition that it begins with, if the driver has them.
        outputs: Where those are that it begins with, if they come from a wide operation.
    """

    job: str
    step: Step
    items: bytes
    outputs: Sequence[Output]


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
        self._index = index
        self._peers = peers
        self._life = uuid.uuid4().hex
        half = limit(memory_bytes, len(peers))
        self._store = Store(half, spill_folder)
        self._computes = Computing(half, spill_folder)
        self._jobs: dict[str, tuple[Operations, Action]] = {}
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

    def prepare(self, job: str, payload: bytes, broadcasts: Sequence[str]) -> None:
        """Takes the operations of a job.

        Args:
            job: Its name.
            payload: Operations and action.
            broadcasts: Names of the values that they use.

        Raises:
            NotPreparedError: One of these has not come: this process was started again.
        """
        if not self._broadcasts.keys() >= set(broadcasts):
            raise NotPreparedError(job)
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
            step = task.step
            try:
                with named(f"{lp.current_node().name}: {where(step, operations)}"):
                    return self._computed(task, operations, action)
            finally:
                if task.job not in self._jobs and step.target is not None:
                    self._store.drop(step.target)  # the job failed meanwhile

    def _computed(self, task: Task, operations: Operations, action: Action) -> Any:
        step = task.step
        missing: list[MissingError] = []
        begin = functools.partial(self._begin, task, missing)
        items = items_of(operations[step.operation], step.partition, begin)
        if step.target is None:
            result = action(step.partition, items)
        else:
            target = operations[step.target]
            assert isinstance(target, Shuffled)
            result = Output(self._index, self._life, self._leave(target, step.source, items))
        if missing:  # the user's code may have caught it
            raise missing[0]
        return result

    def _begin(
        self, task: Task, missing: list[MissingError], operation: Operation, partition: int
    ) -> Iterator[Any]:
        """Returns the items of a partition that a task begins with; notes if some are missing."""
        if isinstance(operation, Items):
            return loaded([task.items])
        if isinstance(operation, Shuffled):
            if len(task.outputs) < len(operation.inputs):  # what was to be cached here is not
                raise MissingError(self._index, self._life)
            total = sum(output.sizes[partition] for output in task.outputs)

            def fetch(sources: Sequence[int], at_once: bool) -> Iterator[bytes]:
                try:
                    yield from self._fetched(
                        operation.number, partition, task.outputs, sources, at_once
                    )
                except MissingError as error:
                    missing.append(error)
                    raise

            return self._computes.gather(operation, total, fetch)
        assert isinstance(operation, Cached)
        if not self._store.has(operation.number, (partition, -1)):
            begin = functools.partial(self._begin, task, missing)
            self._store.remove(operation.number, (partition, 0))  # of a task that has failed
            for chunk in chunks_of(items_of(operation.parents[0], partition, begin)):
                self._store.add(operation.number, (partition, 0), chunk)
            if missing:
                raise missing[0]
            self._store.mark(operation.number, (partition, -1))
            if (
                task.job not in self._jobs
            ):  # it failed, and `uncache` may have dropped some of these
                self._store.remove(operation.number, (partition, 0))
                self._store.remove(operation.number, (partition, -1))
                raise MissingError(self._index, self._life)
        return loaded(self._store.get(operation.number, (partition, 0)))

    def _leave(self, shuffle: Shuffled, source: int, items: Iterator[Any]) -> list[int]:
        """Keeps items for the partitions of a wide operation; returns their sizes in bytes."""
        sizes = [0] * shuffle.partitions
        for partition in range(shuffle.partitions):
            self._store.remove(shuffle.number, (source, partition))  # of a task that has failed
        for partition, chunk in self._computes.scatter(shuffle, source, items):
            sizes[partition] += len(chunk)
            self._store.add(shuffle.number, (source, partition), chunk)
        self._store.mark(shuffle.number, (source, -1))
        return sizes

    def _fetched(
        self,
        shuffle: int,
        partition: int,
        outputs: Sequence[Output],
        sources: Sequence[int],
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
