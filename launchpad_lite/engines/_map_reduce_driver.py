"""The driver of the map-reduce engine: hands out partitions, and repeats what was lost."""

import collections
import concurrent.futures
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import courier
from launchpad_lite.engines._computing import PartitionStep
from launchpad_lite.engines._jobs import Backend, Broadcast, Job, Show
from launchpad_lite.engines._map_reduce_worker import (
    PROCESS,
    NotPreparedError,
    StageOutput,
    StepRequest,
)
from launchpad_lite.engines._operations import Cached, ItemsSource, Operation, Shuffled, shuffles_of
from launchpad_lite.engines._store import MissingError
from launchpad_lite.engines.errors import EngineError, TaskError

#: Tasks that a worker has at a time, so that the next one is there when one ends.
_AT_A_TIME = 2
#: How often a task is computed again when its worker was lost.
_MOST_LOSSES = 4
#: How often a task may find that its input was lost.
_MOST_MISSES = 50
#: Seconds between two updates of the progress.
_SHOW_S = 0.2

#: Seconds that workers get to end, or to report that they are idle, when an action is interrupted.
_END_S = 0.5


@dataclass(eq=False)
class _WorkerPlace:
    """A worker, as the driver sees it."""

    index: int
    client: Any
    #: The stream that keeps our data there while it is open, and the name of the data on the
    #: worker.
    stream: Any = None
    life: str = ""
    #: The broadcasts that it has, in this life.
    prepared: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    running: int = 0
    #: Whether it gets no other task, so that this one is known to be the cause of a loss.
    is_reserved: bool = False
    #: The call that ends when the worker is back; None while it is there.
    returns: "concurrent.futures.Future[None] | None" = None

    def leave(self) -> None:
        """Has the worker drop what it keeps for us."""
        if self.stream is not None:
            self.stream.close()
        self.stream = None
        self.prepared.clear()
        self.received.clear()


class Driver(Backend):
    """Runs jobs on workers, one at a time."""

    def __init__(
        self, workers: Sequence[Any], show: Show, end_workers: Callable[[], object] | None = None
    ) -> None:
        #: Ends the workers, if they are for it alone; then they come back if one is ended.
        self._end_workers = end_workers
        self._places = [_WorkerPlace(index, client) for index, client in enumerate(workers)]
        self._show = show
        self.workers = len(self._places)
        #: The places of all inputs of wide operations, by their number.
        self._outputs: dict[int, dict[int, StageOutput]] = {}
        #: The worker of each partition of a cached operation.
        self._cached: dict[tuple[int, int], _WorkerPlace] = {}
        #: Of the job that runs: how often a task has lost its worker.
        self._losses: collections.Counter[tuple[PartitionStep, int]] = collections.Counter()
        #: Names of jobs that the workers may forget with the next operations.
        self._ended_jobs: list[str] = []
        #: Broadcasts that this process still has, by name.
        self._broadcasts: weakref.WeakValueDictionary[str, Broadcast[Any]] = (
            weakref.WeakValueDictionary()
        )

    def compute(self, job: Job) -> list[Any]:
        self._broadcasts.update(job.broadcasts)
        self._ended_jobs.append(job.name)
        self._losses.clear()
        results: dict[int, Any] = {}
        while True:
            # In this order, since the later ones need the earlier; from the start again when
            # something was lost.
            for shuffle in [*shuffles_of(job.operation, self._is_cached), None]:
                if shuffle is None:
                    inputs, found = job.operation.own_partitions, results
                else:
                    inputs = shuffle.inputs
                    found = self._outputs.setdefault(shuffle.number, {})
                missing = [
                    job.step(each, partition, shuffle, source)
                    for source, (each, partition) in enumerate(inputs)
                    if source not in found
                ]
                if missing:
                    self._execute(job, missing, found, len(inputs))
                    break
            else:
                return [results[partition] for partition in range(job.operation.partitions)]

    def close(self) -> None:
        for place in self._places:
            self._lose_life(place.life)
            place.leave()
        if self._end_workers is not None:
            self._end_workers()  # at last, since they wait for drivers that stay

    def forget(self, operations: Sequence[int]) -> None:
        for number in operations:
            self._outputs.pop(number, None)
            for key in [key for key in self._cached if key[0] == number]:
                del self._cached[key]
        for place in self._places:
            if place.stream is not None:
                try:
                    place.client.forget(place.life, self._ended_jobs, operations)
                except courier.ServerGoneError:
                    self._lose(place)
        self._ended_jobs.clear()

    def _is_cached(self, operation: Operation) -> bool:
        return isinstance(operation, Cached) and all(
            (operation.number, partition) in self._cached
            for partition in range(operation.partitions)
        )

    # One stage.

    def _execute(
        self, job: Job, steps: Sequence[PartitionStep], results: dict[int, Any], total: int
    ) -> None:
        """Computes partitions; returns early when an input was lost, with what there is."""
        stage = steps[0].stage
        waiting = collections.deque(steps)
        # With the life that was asked: an answer is of that, also if the place has another one by now.
        calls: dict[concurrent.futures.Future[Any], tuple[PartitionStep, _WorkerPlace, str]] = {}
        is_incomplete = False
        shown_at = time.monotonic()
        try:
            while calls or (waiting and not is_incomplete):
                while not is_incomplete and (chosen := self._choose(job, waiting)):
                    each, place = chosen
                    try:
                        calls[self._begin(job, each, place)] = each, place, place.life
                    except courier.ServerGoneError:
                        self._lose(place)
                        is_incomplete = True
                    except NotPreparedError:
                        place.leave()
                        waiting.appendleft(each)
                returns = [place.returns for place in self._places if place.returns is not None]
                done, _ = concurrent.futures.wait(
                    [*calls, *returns], _SHOW_S, concurrent.futures.FIRST_COMPLETED
                )
                for call in done:
                    if call not in calls:
                        self._note_return(call)
                        continue
                    each, place, life = calls.pop(call)
                    is_over = life != place.life
                    place.running -= 1
                    place.is_reserved = False
                    try:
                        results[each.source] = call.result()
                        if not is_over:
                            self._note_cached(job, each, place)
                    except courier.ServerGoneError:
                        if not is_over:
                            self._lose(place)
                        self._note_loss(each, place)
                        is_incomplete = True
                    except MissingError as error:
                        self._lose_life(error.life)
                        self._note_loss(each, place, most=_MOST_MISSES)
                        is_incomplete = True
                    except NotPreparedError:
                        if not is_over:
                            place.leave()
                        waiting.append(each)
                    except courier.SerializationError as error:
                        raise TaskError(
                            f"worker {place.index}: {stage}, partition {each.partition}: {error}"
                        ) from error
                if time.monotonic() - shown_at >= _SHOW_S:
                    shown_at = time.monotonic()
                    self._show(stage, len(results), total)
            self._show(stage, len(results), total)
        except EngineError:
            raise
        except BaseException:  # a Ctrl-C, or what a signal handler has raised
            for call in calls:
                call.cancel()  # first, or a worker may begin with the next one meanwhile
            self._abandon(job.name, {place for _, place, _ in calls.values()})
            raise
        finally:
            for call, (_, place, _) in calls.items():
                call.cancel()
                call.add_done_callback(_ignore)
                place.running -= 1
                place.is_reserved = False

    def _abandon(self, job: str, places: Iterable[_WorkerPlace]) -> None:
        """Ends the workers that compute for a job, because other jobs would wait for them."""
        if self._end_workers is None:
            return
        ends = {place: place.client.futures.end(job, PROCESS) for place in places}
        concurrent.futures.wait(ends.values(), _END_S)
        for place, end in ends.items():
            end.add_done_callback(_ignore)
            if not end.done() or end.exception() is not None:
                self._lose(place)

    def _choose(
        self, job: Job, waiting: "collections.deque[PartitionStep]"
    ) -> tuple[PartitionStep, _WorkerPlace] | None:
        """Takes a task out of those that wait, with its worker; None while all have enough to do."""
        free = [
            place
            for place in self._places
            if place.returns is None and place.running < _AT_A_TIME and not place.is_reserved
        ]
        for index, step in enumerate(waiting if free else ()):
            # A cached partition is nowhere else.
            place = self._place_of(job, step) or min(free, key=lambda place: place.running)
            # A task that has lost its worker runs alone, because the task beside it may be the
            # cause.
            if place in free and not (self._was_lost(step) and place.running):
                del waiting[index]
                return step, place
        return None

    def _was_lost(self, step: PartitionStep) -> bool:
        return (step, _MOST_LOSSES) in self._losses

    def _place_of(self, job: Job, step: PartitionStep) -> _WorkerPlace | None:
        """Returns the worker that has cached what a task begins with."""
        for operation, partition in job.chain(step):
            if place := self._cached.get((operation.number, partition)):
                return place
        return None

    def _begin(
        self, job: Job, step: PartitionStep, place: _WorkerPlace
    ) -> "concurrent.futures.Future[Any]":
        if job.name not in place.prepared:
            self._prepare(job, place)
        items = b""
        outputs: Sequence[StageOutput] = ()
        *_, (first, index) = job.chain(step)
        if isinstance(first, ItemsSource):
            items = first.chunks[index]
        elif isinstance(first, Shuffled):
            known = self._outputs.get(first.number, {})
            outputs = [known[source] for source in sorted(known)]
        call: concurrent.futures.Future[Any] = place.client.futures.compute(
            place.life, StepRequest(job.name, step, items, outputs)
        )
        place.running += 1
        place.is_reserved = self._was_lost(step)
        return call

    def _prepare(self, job: Job, place: _WorkerPlace) -> None:
        if place.stream is None:  # or it was started again between two calls
            self._lose_life(place.life)
            stream = iter(place.client.stay())
            place.life, place.stream = next(stream), stream
        for sent, broadcast in job.broadcasts.items():
            if sent not in place.received:
                place.client.receive(place.life, sent, courier.dumps(broadcast.value))
                place.received.add(sent)
        place.received.intersection_update(self._broadcasts)
        place.client.prepare(place.life, job.name, job.payload, list(place.received))
        place.prepared.add(job.name)

    # Workers that come and go.

    def _note_cached(self, job: Job, step: PartitionStep, place: _WorkerPlace) -> None:
        for operation, partition in job.chain(step):
            if (operation.number, partition) in self._cached:
                return  # it began here
            if isinstance(operation, Cached):
                self._cached[operation.number, partition] = place

    def _note_loss(
        self, step: PartitionStep, place: _WorkerPlace, most: int = _MOST_LOSSES
    ) -> None:
        """Counts that a task has lost its worker or its input; too often is a TaskError."""
        self._losses[step, most] += 1
        if self._losses[step, most] < most:
            return
        where = f"partition {step.partition} of {step.stage}"
        if most == _MOST_MISSES:
            raise TaskError(f"the input of {where} was lost {most} times")
        raise TaskError(
            f"worker {place.index} was lost, the {most}th one that computed {where}: its code may be "
            "what ends them, or that of another partition that it had to compute"
        )

    def _lose(self, place: _WorkerPlace) -> None:
        self._lose_life(place.life)
        place.leave()
        if place.returns is None:
            place.returns = place.client.futures.hello()
            place.returns.add_done_callback(_ignore)

    def _lose_life(self, life: str) -> None:
        for outputs in self._outputs.values():
            for source in [s for s, output in outputs.items() if output.life == life]:
                del outputs[source]
        for key in [key for key, place in self._cached.items() if place.life == life]:
            del self._cached[key]

    def _note_return(self, call: "concurrent.futures.Future[None]") -> None:
        place = next(place for place in self._places if place.returns is call)
        place.returns = None
        try:
            call.result()
        except courier.ServerLostError:
            self._lose(place)
        except courier.ServerUnreachableError as error:
            raise EngineError(
                f"a worker of map-reduce is gone and does not come back: {error}"
            ) from error


def _ignore(call: "concurrent.futures.Future[Any]") -> None:
    """Reads an error that no one else may read, or it would be logged."""
    if not call.cancelled():
        call.exception()
