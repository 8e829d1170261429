"""Map-reduce on a Dask cluster: its scheduler and its workers in place of ours."""

import functools
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import courier
from launchpad_lite.engines._computing import (
    Computing,
    PartitionStep,
    items_of,
    loaded,
    weight_of,
    where,
)
from launchpad_lite.engines._jobs import Backend, Job, SentBroadcasts, Show, load
from launchpad_lite.engines._operations import (
    Cached,
    ItemsSource,
    Operation,
    Shuffled,
    beginnings_of,
    chain_of,
)
from launchpad_lite.engines._user_code import Named
from launchpad_lite.engines.errors import EngineError, SpillError, TaskError

#: Starts a task for each partition, for a wide or cached operation or for the action.
_Submit = Callable[
    [Sequence[tuple[Operation, int]], Operation | None], list[tuple[Any, PartitionStep]]
]


class DaskBackend(Backend):
    """Runs jobs on a Dask cluster.

    Dask hands out the tasks, keeps their output (on disk, if it must), and computes lost output
    again.
    """

    def __init__(
        self,
        address: str | None,
        workers: int | None,
        show: Show,
        *,
        memory_bytes: int | None,
        spill_folder: str | None,
    ) -> None:
        """Connects to a scheduler, or starts a cluster of processes here."""
        try:
            import distributed
        except ImportError as error:
            raise EngineError(
                'MapReduce(backend="dask") needs Dask: pip install "launchpad-lite[dask]"'
            ) from error
        options: dict[str, Any] = {"set_as_default": False}
        if address is None:
            options |= {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
        try:
            self._client = distributed.Client(address, **options)
        except OSError as error:
            raise EngineError(
                f"the scheduler of Dask at {address} does not answer: {error}"
            ) from error
        self.workers = workers or sum(self._client.ncores().values()) or 1
        self._limits = memory_bytes, spill_folder
        self._show = show
        #: The output of tasks: for wide operations by input, for cached ones by partition.
        self._left: dict[int, list[Any]] = {}
        send = functools.partial(self._client.scatter, broadcast=True, hash=False)
        self._sent = SentBroadcasts(send)

    def compute(self, job: Job) -> list[Any]:
        # As a task, not scattered: it can be computed again.
        payload = self._client.submit(bytes, job.payload, pure=False)
        submit = functools.partial(self._submit, job, payload, self._sent.needed_by(job))
        try:
            self._prepare(submit, job.operation)
            tasks = submit(job.operation.own_partitions, None)
            return list(map(pickle.loads, self._wait(tasks)))
        except BaseException:
            # Partitions that were to be cached, and were not.
            bad = [
                number
                for number, futures in self._left.items()
                if any(future.status in ("error", "cancelled") for future in futures)
            ]
            self.forget(bad)
            raise

    def forget(self, operations: Sequence[int]) -> None:
        for number in operations:
            self._left.pop(number, None)

    def close(self) -> None:
        self._client.close()

    def _prepare(self, submit: _Submit, operation: Operation) -> None:
        """Computes what the tasks of an operation begin with, stage by stage."""
        for each in beginnings_of(operation):
            if isinstance(each, Shuffled | Cached) and each.number not in self._left:
                for parent in each.parents:
                    self._prepare(submit, parent)
                tasks = submit(each.inputs, each)
                if isinstance(each, Shuffled):
                    self._wait(tasks)
                self._left[each.number] = [future for future, _ in tasks]

    def _submit(
        self,
        job: Job,
        payload: Any,
        received: Mapping[str, Any],
        inputs: Sequence[tuple[Operation, int]],
        target: Operation | None,
    ) -> list[tuple[Any, PartitionStep]]:
        """Returns the future of each task that computes a partition, and the kind of its result."""
        tasks = []
        for source, (operation, partition) in enumerate(inputs):
            step = job.step(operation, partition, target, source)
            begun = self._begun(operation, partition)
            future = self._client.submit(
                _compute, payload, received, step, *self._limits, begun, pure=False
            )
            tasks.append((future, step))
        return tasks

    def _begun(self, operation: Operation, partition: int) -> list[Any]:
        """Returns the chunks that a task begins with, by source, or futures of them."""
        for first, index in chain_of(operation, partition):
            if isinstance(first, ItemsSource):
                return [[first.chunks[index]]]
            if isinstance(first, Cached):
                return [self._left[first.number][index]]
            if isinstance(first, Shuffled):
                left = self._left[first.number]
                futures: list[Any] = self._client.map(
                    operator.getitem, left, [index] * len(left), pure=False
                )
                return futures
        return []

    def _wait(self, tasks: Sequence[tuple[Any, PartitionStep]]) -> list[Any]:
        import distributed

        steps = dict(tasks)
        try:
            for done, future in enumerate(
                distributed.as_completed(list(steps), loop=self._client.loop), 1
            ):
                if future.status != "finished":
                    _raise(future, steps[future])
                self._show(steps[future].stage, done, len(steps))
            results: list[Any] = self._client.gather(list(steps))
            return results
        except BaseException:
            self._client.cancel(list(steps))
            raise


def _raise(future: Any, step: PartitionStep) -> None:
    try:
        future.result()
    except (TaskError, SpillError):
        raise
    except Exception as error:
        raise TaskError(f"{step.stage}, partition {step.partition}: {error}") from error


def _compute(
    payload: bytes,
    received: Mapping[str, Any],
    step: PartitionStep,
    memory_bytes: int | None,
    spill_folder: str | None,
    begun: Sequence[Sequence[bytes]],
) -> Any:
    """Runs in a worker of Dask; returns chunks for each partition of the target, or the result."""
    from distributed import get_worker

    operations, action = load(payload, received)
    computes = Computing(memory_bytes, spill_folder)

    def begin(operation: Operation, partition: int) -> Iterator[Any]:  # noqa: ARG001
        if not isinstance(operation, Shuffled):
            return loaded(begun[0])
        total = sum(weight_of(chunk) for chunks in begun for chunk in chunks)
        return computes.gather(
            operation, total, lambda sources: (c for source in sources for c in begun[source])
        )

    with Named(f"{get_worker().name}: {where(step, operations)}"):
        items = items_of(operations[step.operation], step.partition, begin)
        if step.target is None:
            # Here, where an error gets the name of the task.
            return courier.dumps(action(step.partition, items))
        target = operations[step.target]
        if isinstance(target, Cached):
            return list(computes.chunks(items))
        assert isinstance(target, Shuffled)
        left: list[list[bytes]] = [[] for _ in range(target.partitions)]
        for partition, chunk in computes.scatter(target, step.source, items):
            left[partition].append(chunk)
        return left
