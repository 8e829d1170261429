"""Map-reduce on Spark: its executors in place of our workers."""

import collections
import dataclasses
import os
import pickle
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import courier
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
from launchpad_lite.engines._jobs import Backend, Job, SentBroadcasts, load
from launchpad_lite.engines._operations import (
    Cached,
    ItemsSource,
    Operation,
    Shuffled,
    Some,
    beginnings_of,
)
from launchpad_lite.engines._store import ChunkStore
from launchpad_lite.engines._user_code import Named
from launchpad_lite.engines.errors import EngineError, OrderError, SpillError, TaskError

#: Finds an error of ours in the message of Java.
_OURS = re.compile(
    r"launchpad_lite\.engines\.errors\.(\w+): (.*?)\n\s*(?:\n|at |SQLSTATE)", re.DOTALL
)


class SparkBackend(Backend):
    """Runs jobs on Spark.

    Spark hands out the tasks, keeps their output on disk, and computes lost output again.
    """

    def __init__(
        self,
        address: str | None,
        workers: int | None,
        *,
        progress: bool,
        memory_bytes: int | None,
        spill_folder: str | None,
    ) -> None:
        """Connects to Spark, or uses the context that this process has.

        Without an address, the master is that of this context, or of `spark-submit`, or this machine.
        """
        try:
            import pyspark
        except ImportError as error:
            raise EngineError(
                'MapReduce(backend="spark") needs Spark: pip install "launchpad-lite[spark]"'
            ) from error
        found = pyspark.SparkContext._active_spark_context
        if found is not None and address not in (None, found.master):
            raise EngineError(
                f"this process uses Spark at {found.master} already, so not at {address}; stop that, "
                "or leave address out"
            )
        self._is_ours = found is None
        self._context = found or _started(pyspark, address, workers, progress=progress)
        self.workers: int = workers or self._context.defaultParallelism
        self._limits = memory_bytes, spill_folder
        #: The output of tasks for wide and cached operations, by number.
        self._left: dict[int, Any] = {}
        self._sent = SentBroadcasts(self._context.broadcast)

    def compute(self, job: Job) -> list[Any]:
        payload, received = self._context.broadcast(job.payload), self._sent.needed_by(job)
        task = _SparkTask(payload, received, *self._limits)
        operation, partitions = job.operation, list(range(job.operation.partitions))
        if isinstance(operation, Some):
            partitions, [operation] = list(operation.chosen), operation.parents
        try:
            rdd = self._rdd(job, task, operation, None)
            return list(map(pickle.loads, self._context.runJob(rdd, iter, partitions)))
        except Exception as error:
            if found := _OURS.search(str(error)):
                kind = {"SpillError": SpillError, "OrderError": OrderError}.get(found[1], TaskError)
                raise kind(found[2]) from error
            raise TaskError(
                f"Spark could not compute {operation.title} → {job.title}: {error}"
            ) from error

    def forget(self, operations: Sequence[int]) -> None:
        for number in operations:
            if (rdd := self._left.pop(number, None)) is not None:
                rdd.unpersist()

    def close(self) -> None:
        self.forget(list(self._left))
        if self._is_ours:
            self._context.stop()
            _stop_java(type(self._context))

    def _rdd(
        self,
        job: Job,
        task: "_SparkTask",
        operation: Operation,
        target: Operation | None,
        source: int = 0,
    ) -> Any:
        """Returns the output of tasks for a wide or cached operation, or the results of the action.

        The first of their partitions is number `source` among the inputs of that.
        """
        begun = [self._begun(job, task, each) for each in beginnings_of(operation)]
        rdd = begun[0] if len(begun) == 1 else self._context.union(begun)
        step = job.step(operation, 0, target, source)
        return rdd.mapPartitionsWithIndex(dataclasses.replace(task, step=step))

    def _begun(self, job: Job, task: "_SparkTask", operation: Operation) -> Any:
        if isinstance(operation, ItemsSource):
            return self._context.parallelize(operation.chunks, operation.partitions)
        if not isinstance(operation, Cached | Shuffled):
            return self._context.parallelize([], operation.partitions)
        if operation.number not in self._left:
            rdds, source = [], 0
            for parent in operation.parents:
                rdds.append(self._rdd(job, task, parent, operation, source))
                source += parent.partitions
            if isinstance(operation, Cached):
                from pyspark import StorageLevel

                [rdd] = rdds
                left = rdd.persist(StorageLevel.MEMORY_AND_DISK)
            else:
                left = self._context.union(rdds).partitionBy(operation.partitions, int)
            self._left[operation.number] = left
        return self._left[operation.number]


@dataclasses.dataclass(frozen=True)
class _SparkTask:
    """Runs in an executor, for each partition: takes chunks, and yields chunks or the result.

    Chunks for a wide operation come with the partition that gets them, the input that they are from,
    and their place there.
    """

    payload: Any
    received: Mapping[str, Any]
    memory_bytes: int | None
    spill_folder: str | None
    step: PartitionStep | None = None

    def __call__(self, index: int, begun: Iterator[Any]) -> Iterator[Any]:
        assert self.step is not None
        step = dataclasses.replace(self.step, partition=index, source=self.step.source + index)
        received = {name: sent.value for name, sent in self.received.items()}
        operations, action = load(self.payload.value, received)
        # Each alone in its block, because Spark may throw errors that are not the user's into this
        # generator.
        named = Named(f"{socket.gethostname()}: {where(step, operations)}")
        results = self._results(step, operations, action, begun)
        while True:
            with named:
                result = next(results, None)
            if result is None:
                return
            yield result

    def _results(
        self, step: PartitionStep, operations: Operations, action: Action, begun: Iterator[Any]
    ) -> Iterator[Any]:
        computes = Computing(self.memory_bytes, self.spill_folder)

        def begin(operation: Operation, partition: int) -> Iterator[Any]:  # noqa: ARG001
            if isinstance(operation, Shuffled):
                return self._gathered(computes, operation, begun)
            return loaded(begun)

        items = items_of(operations[step.operation], step.partition, begin)
        if step.target is None:
            # Here, where an error gets the name of the task.
            yield courier.dumps(action(step.partition, items))
            return
        target = operations[step.target]
        if not isinstance(target, Shuffled):
            yield from computes.chunks(items)
            return
        for number, (partition, chunk) in enumerate(computes.scatter(target, step.source, items)):
            yield partition, (step.source, number, chunk)

    def _gathered(
        self, computes: Computing, operation: Shuffled, begun: Iterator[Any]
    ) -> Iterator[Any]:
        """Returns the items of chunks that come in any order."""
        store = ChunkStore(self.spill_folder)
        numbers: dict[int, list[int]] = collections.defaultdict(list)
        total = 0
        owner = operation.number
        store.open(owner)
        for _, (source, number, chunk) in begun:
            store.add(owner, (source, number), chunk)
            numbers[source].append(number)
            total += weight_of(chunk)

        def fetch(sources: Sequence[int]) -> Iterator[bytes]:
            for source in sources:
                for number in sorted(numbers[source]):
                    yield from store.stream(owner, (source, number))

        return computes.gather(operation, total, fetch)


def _started(pyspark: Any, address: str | None, workers: int | None, *, progress: bool) -> Any:
    conf = pyspark.SparkConf().setAppName("launchpad_lite")
    conf.set("spark.ui.showConsoleProgress", str(progress).lower())
    if address is not None:
        conf.setMaster(address)
    conf.setIfMissing("spark.master", f"local[{workers or '*'}]")
    try:
        context = pyspark.SparkContext(conf=conf)
    except Exception as error:
        raise EngineError(
            f"Spark at {conf.get('spark.master')} does not start; it needs Java 17 or newer, on the "
            f"PATH or in JAVA_HOME: {error}"
        ) from error
    if context.master.startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable  # `python3` may be another one
    context.setLogLevel("OFF")  # an error is in what is raised
    return context


def _stop_java(context: Any) -> None:
    """Ends the Java process, which Spark keeps for the next context until Python ends."""
    gateway, context._gateway, context._jvm = context._gateway, None, None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
