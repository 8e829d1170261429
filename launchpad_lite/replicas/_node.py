"""The node of a replica: meets the others, runs the user's code, and begins again after a loss."""

import asyncio
import contextlib
import contextvars
import copy
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import courier
import launchpad_lite as lp
from courier.lowlevel import split_address
from launchpad_lite.parts.devices import machine_name
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._courier_carrier import CourierCarrier
from launchpad_lite.replicas._gpu_carrier import GpuCarrier
from launchpad_lite.replicas._inputs import Batch, Key, SharedPipeline
from launchpad_lite.replicas._mailbox import Box, Mailbox
from launchpad_lite.replicas._meeting import Generation, GenerationEnd, Meeting
from launchpad_lite.replicas._state import Training
from launchpad_lite.replicas.errors import InterruptedTraining, ReplicaError, ReplicaLostError

if TYPE_CHECKING:
    from launchpad_lite.replicas.replicators import Here, Replicator

_LOGGER = logging.getLogger(__name__)

#: The label of the call that ends a generation.
RESULTS = "what the replicas return"

LOST = courier.ServerGoneError, courier.CallTimeoutError
#: Early calls that run at the same time, as in a server: they may wait for one another.
_EARLY_THREADS = 16
#: Seconds until the meeting is tried again.
_RETRY_S = 0.1


class ReplicaNode:
    def __init__(
        self,
        replicator: "Replicator",
        rank: int,
        replicas: Sequence[Any],
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        stays: bool,
    ) -> None:
        """Makes it. If it `stays`, it serves the results until the program stops."""
        self._replicator = copy.copy(replicator)  # threads of one process share the argument
        self._rank = rank
        self._replicas = replicas
        self._body, self._args, self._kwargs = body, args, kwargs
        node = lp.current_node()
        self._name = node.name
        self._group = self._name.partition("[")[0]
        self._stays = stays
        self._losses = lp.restart_count()
        self._lost_s = 0.0
        self._lost_at: float | None = None
        self._training = Training(is_saved=node.keeps_state)
        #: Whether it keeps snapshots for lost replicas, because there are no checkpoints.
        self._is_guard = node.restarts and not node.keeps_state and rank < min(len(replicas), 2)
        self._results: Future[Any] = Future()
        #: The user's object, once there is one; another one after each loss.
        self._object: Any = None
        self._has_object: Future[None] = Future()
        #: Runs calls that came before.
        self._early = ThreadPoolExecutor(_EARLY_THREADS, "replica-early")
        #: Calls for the results, by replica: answered when this one has finished.
        self._asked: dict[int, Any] = {}
        #: The pipeline of this worker, once there is one.
        self._pipelines: dict[Key, Future[SharedPipeline]] = {}
        lp.register_stop_handler(self._refuse)
        self._box = Box()
        mailbox = Mailbox(self._box)
        self.replica_meet, self.replica_put = mailbox.replica_meet, mailbox.replica_put
        self.replica_stream = mailbox.replica_stream
        if rank == 0:
            meeting = Meeting(
                len(replicas), lp.restart_count(), replicator.min_replicas, replicator.patience_s
            )
            self.replica_attend, self.replica_begin = meeting.attend, meeting.begin
            self.replica_leave = meeting.leave
        if inspect.isclass(body):
            for name in served_methods(body):
                setattr(self, name, self._forwarding(name, getattr(body, name)))

    def run(self) -> None:
        """Runs the user's code until it has ended well in all replicas."""
        while not (lp.stop_event().is_set() or self._results.done()):
            try:
                self._live()
            except _NotMetError:
                lp.wait_for_stop(_RETRY_S)
            except (ReplicaLostError, InterruptedTraining) as error:
                if not lp.stop_event().is_set():
                    _LOGGER.warning("%s: %s; all begin again", self._name, error)
                self._losses += 1
                self._lost_at = time.monotonic()
        if self._stays:
            lp.wait_for_stop()

    def save(self, folder: Path) -> None:
        self._training.save(folder)

    def restore(self, folder: Path) -> None:
        self._training.restore(folder)

    def replica_input(self, key: Key, position: int, part: int) -> Batch:
        return self._pipelines.setdefault(key, Future()).result().take(position, part)

    def replica_results(self) -> "Future[Any]":
        """Returns the results of all replicas, once this one has them."""
        return self._results

    def share(self, key: Key, pipeline: SharedPipeline) -> None:
        """Serves a pipeline to the other replicas of this worker."""
        generation, depth, _ = key
        for past in [each for each in self._pipelines if each < key]:
            if past[0] < generation or past[1] >= depth:  # its run has ended
                del self._pipelines[past]
        self._pipelines.setdefault(key, Future()).set_result(pipeline)

    def _refuse(self) -> None:
        """Tells waiting callers that their result does not come."""
        for awaited in (self._results, self._has_object, *self._pipelines.values()):
            with contextlib.suppress(InvalidStateError):  # it is there
                awaited.set_exception(ReplicaError(f"{self._name}: the program stops"))

    def _live(self) -> None:
        if self._is_guard and len(self._replicas) == 1 and not self._losses:
            _LOGGER.warning("%s: without checkpoints, a restart begins at step 0", self._name)
        if self._losses:
            self._ask_for_end()
        with self._met() as (generation, collectives):
            if self._lost_at is not None:
                self._lost_s += time.monotonic() - self._lost_at
                self._lost_at = None
            self._end(self._replicate(generation, collectives))
            with contextlib.suppress(*LOST):
                self._replicas[0].replica_leave(self._rank)

    def _ask_for_end(self) -> None:
        """Ends this node when another one has finished: finished replicas do not meet again.

        That happens when this replica was lost after the results were exchanged.
        """
        for rank, node in enumerate(self._replicas):
            if rank != self._rank and (rank not in self._asked or self._asked[rank].done()):
                self._asked[rank] = node.futures.replica_results()
                self._asked[rank].add_done_callback(self._take_over_end)

    def _take_over_end(self, answer: Any) -> None:
        try:
            results = answer.result()
        except courier.ServerUnreachableError:
            results = []  # it has ended for good, so it asks for none
        except (courier.CourierError, ReplicaError, CancelledError):
            return  # it is lost, or the program stops
        self._end(results)

    def _end(self, results: Any) -> None:
        with contextlib.suppress(InvalidStateError):  # it has ended, or the program stops
            self._results.set_result(results)
        for answer in list(self._asked.values()):
            answer.cancel()

    def _replicate(self, generation: Generation, collectives: Collectives) -> list[Any]:
        members = [self._replicas[rank] for rank in generation.members]
        here = self._here(generation, collectives, self._training, members)
        here.size = collectives.size
        with self._replicator.being(here):
            result = self._run_body(self._replicator)
        return collectives.all_gather(result, RESULTS)

    def _run_body(self, repl: "Replicator", *, is_served: bool = True) -> Any:
        """Runs the user's code for one replica; other nodes call the object if it `is_served`."""
        value = self._body(repl, *self._args, **self._kwargs)
        if not inspect.isclass(self._body):
            return value
        if is_served:
            self._object = value
            with contextlib.suppress(InvalidStateError):  # it was there before
                self._has_object.set_result(None)
        run = getattr(value, "run", None)
        if run is None:
            raise ReplicaError(f"{self._body.__name__} has no run(), which makes the steps")
        return run()

    def _here(
        self,
        generation: Generation,
        collectives: Collectives,
        training: Training,
        replicas: Sequence[Any],
    ) -> "Here":
        """Returns the data of a replicator in a replica whose steps are to begin."""
        from launchpad_lite.replicas.replicators import Here  # this module is imported by it

        training.begin()
        is_first = training is self._training  # of the replicas in this node
        training.is_guard = self._is_guard and is_first
        here = Here(collectives.rank, collectives, training, self._group)
        here.generation, here.replicas, here.share = generation.number, replicas, self.share
        here.report.losses, here.report.lost_s = self._losses, self._lost_s
        if is_first:
            lp.metrics.view("replica", here.view)
        return here

    @contextlib.contextmanager
    def _met(self) -> Iterator[tuple[Generation, Collectives]]:
        meeting = self._replicas[0]
        try:
            stream = meeting.replica_attend(self._rank, machine_name())
        except LOST as error:
            raise _NotMetError from error
        collectives = None
        try:
            generation = self._begun(stream, meeting)
            collectives = Collectives(self._carrier(generation))
            watcher = start_thread(self._watch, stream, collectives, name="replica-watch")
            yield generation, collectives
        finally:
            stream.close()
            if collectives is not None:
                watcher.join()
                collectives.close()

    def _begun(self, stream: Any, meeting: Any) -> Generation:
        """Waits until all have come; _NotMetError: replica 0 was lost, or the work is over."""
        try:
            next(stream)
            call = meeting.futures.replica_begin(self._rank)
            self._results.add_done_callback(lambda _: call.cancel())  # at the stop, too
            generation: Generation = call.result()
        except (*LOST, courier.CallCancelledError, StopIteration, ReplicaLostError) as error:
            raise _NotMetError from error
        return generation

    def _watch(self, stream: Any, collectives: Collectives) -> None:
        """Ends all calls when a replica is lost."""
        why = GenerationEnd(0)
        with contextlib.suppress(courier.CourierError):
            for event in stream:
                why = event
        what = "has come back" if why.is_back else "was lost"
        collectives.abort(ReplicaLostError(f"{self._group}[{why.rank}] {what}"))

    def _carrier(self, generation: Generation) -> Carrier:
        if len(generation.members) == 1:
            return Carrier()
        carrier = CourierCarrier(
            generation.members.index(self._rank),
            self._box,
            [self._replicas[rank] for rank in generation.members],
            generation.infos,
            generation.number,
        )
        return GpuCarrier(carrier, split_address(self._replicas[0].address)[0])

    def _forwarding(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls a method of the user's object, once there is one."""
        is_async = inspect.iscoroutinefunction(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._has_object.result()
            return getattr(self._object, name)(*args, **kwargs)

        async def call_later(*args: Any, **kwargs: Any) -> Any:
            # A caller that leaves does not end the wait of the others.
            await asyncio.shield(asyncio.wrap_future(self._has_object))
            if is_async:
                return await call(*args, **kwargs)
            run = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._early, run)

        @functools.wraps(method)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # The calls that wait hold no thread: to make the object, other replicas must reach this.
            yields = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
            is_there = self._has_object.done()
            return (call if is_there or yields else call_later)(*args, **kwargs)

        return forward


class _NotMetError(Exception):
    """The meeting broke up before it began."""


def served_methods(body: type) -> list[str]:
    """Returns the names of the methods of a class that other nodes may call."""
    names = [name for name in dir(body) if not name.startswith("_") and name != "run"]
    methods = [name for name in names if callable(getattr(body, name))]
    if taken := [name for name in methods if name in dir(ReplicaNode)]:
        raise ValueError(f"{body.__name__}.{taken[0]}: replicas have a method of this name")
    return methods
