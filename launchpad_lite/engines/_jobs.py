"""An action on a dataset, as its workers get it, be they ours, Dask's or Spark's.

Values for many tasks are sent to each worker once, beside the jobs that need them.
"""

import abc
import contextvars
import pickle
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import courier
from launchpad_lite.engines._computing import Action, JobStage, PartitionStep
from launchpad_lite.engines._operations import (
    Operation,
    Shuffled,
    chain_of,
    operations_of,
    pipeline_of,
    shuffles_of,
)
from launchpad_lite.engines.errors import EngineError

T = TypeVar("T")

#: Shows how far a stage is: tasks done, of how many.
Show = Callable[[JobStage, int, int], None]

#: The values to which the pickle that is being made refers.
_referred: "contextvars.ContextVar[dict[str, Broadcast[Any]]]" = contextvars.ContextVar("referred")
#: The values that came before the pickle that is being read.
_received: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("received")


class Broadcast(Generic[T]):
    """A value for functions of a pipeline, sent to each worker once: `MapReduce.broadcast` makes it.

    Attributes:
        value: The value.

    Example:
        stop_words = mr.broadcast({"a", "the"})
        words.filter(lambda word: word not in stop_words.value)
    """

    def __init__(self, value: T, name: str = "") -> None:
        self.value = value
        self.name = name or uuid.uuid4().hex

    def __reduce__(self) -> Any:
        try:
            _referred.get()[self.name] = self
        except LookupError:
            raise EngineError(
                "a Broadcast can only be used in the functions of a pipeline"
            ) from None
        return _find, (self.name,)


def _find(name: str) -> "Broadcast[Any]":
    return Broadcast(_received.get()[name], name)


def dump(value: object) -> tuple[bytes, "dict[str, Broadcast[Any]]"]:
    """Returns a pickle, and the values that have to be there when it is loaded."""
    referred: dict[str, Broadcast[Any]] = {}
    token = _referred.set(referred)
    try:
        return courier.dumps(value), referred
    finally:
        _referred.reset(token)


def load(data: bytes, received: Mapping[str, Any]) -> Any:
    """Returns the object of a pickle, given the values that came before it."""
    token = _received.set(received)
    try:
        return pickle.loads(data)
    finally:
        _received.reset(token)


class Backend(abc.ABC):
    """Runs jobs: our workers, or those of another system. Used by one thread at a time."""

    #: How many partitions are computed at a time.
    workers: int

    def run(
        self, operation: Operation, action: Action, title: str, *, keep: bool = False
    ) -> list[Any]:
        """Returns what an action returns for each partition; the title is for people.

        With `keep`, the outputs of earlier stages stay, until `forget`. TaskError: code of the pipeline
        has raised, or ends workers; SpillError: there is no room; TypeError: a function cannot be pickled.
        """
        job = Job(operation, action, title)
        try:
            return self.compute(job)
        finally:
            self.forget([] if keep else [each.number for each in job.shuffles])

    @abc.abstractmethod
    def compute(self, job: "Job") -> list[Any]:
        """Returns what the action of a job returns for each partition."""

    @abc.abstractmethod
    def forget(self, operations: Sequence[int]) -> None:
        """Drops what was kept of operations, given their numbers, and of jobs that are over."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what was started for it, and drops what is kept for it."""


class Job:
    """One action: its operations, as the workers get them."""

    def __init__(self, operation: Operation, action: Action, title: str) -> None:
        self.name = uuid.uuid4().hex
        self.operation = operation
        self.title = title
        self.shuffles = shuffles_of(operation)
        # Cached: each task asks, and each answer is a walk through the plan.
        self._stages: dict[tuple[int, int | None], JobStage] = {}
        # Parents first: the pickle of a long chain would be nested too deeply in the other order.
        self._operations = {each.number: each for each in operations_of(operation)}
        try:
            #: The pickle of operations by their number and of the action, and the broadcasts that it
            #: needs, by name.
            self.payload, self.broadcasts = dump((self._operations, action))
        except EngineError:
            raise
        except Exception as error:
            raise TypeError(_what_cannot_be_pickled(self._operations, error)) from error

    def step(
        self, operation: Operation, partition: int, target: Operation | None, source: int
    ) -> PartitionStep:
        """Returns how a partition is computed, for a wide or cached operation or for the action."""
        end = None if target is None else target.number
        key = operation.number, end
        if key not in self._stages:
            if isinstance(target, Shuffled):
                number = self.shuffles.index(target) + 1
            else:
                number = len(shuffles_of(operation)) + 1
            title = self.title if target is None else target.title
            title = f"{pipeline_of(operation)} → {title}"
            self._stages[key] = JobStage(number, len(self.shuffles) + 1, title)
        return PartitionStep(self._stages[key], operation.number, partition, end, source)

    def chain(self, step: PartitionStep) -> Iterator[tuple[Operation, int]]:
        return chain_of(self._operations[step.operation], step.partition)


class SentBroadcasts:
    """Broadcasts that another system has got, each once; free when the user has dropped the value."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send
        self._sent: weakref.WeakKeyDictionary[Broadcast[Any], Any] = weakref.WeakKeyDictionary()

    def needed_by(self, job: Job) -> dict[str, Any]:
        """Returns what `send` has returned for the broadcasts of a job, by name."""
        for broadcast in job.broadcasts.values():
            if broadcast not in self._sent:
                self._sent[broadcast] = self._send(broadcast.value)
        return {name: self._sent[each] for name, each in job.broadcasts.items()}


def _what_cannot_be_pickled(operations: dict[int, Operation], error: Exception) -> str:
    for operation in operations.values():
        function = getattr(operation, "function", None)
        try:
            dump(function)
        except Exception as cause:  # noqa: BLE001 - whatever pickling it raises
            return f"{operation.title}: its function cannot be pickled: {cause}"
    return f"the pipeline cannot be pickled: {error}"
