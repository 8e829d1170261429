"""Asynchronous replicas: parameters are on servers, and no replica waits for others.

The standard architecture of Li et al., "Scaling Distributed Machine Learning with the Parameter
Server" (OSDI 2014), by the engine of `launchpad_lite.engines`.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import courier
import launchpad_lite as lp
from launchpad_lite import engines
from launchpad_lite.engines.barriers import check_barrier
from launchpad_lite.replicas import _inputs, _payload
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._kept import check_can_be_kept, put_into
from launchpad_lite.replicas._node import LOST, ReplicaNode
from launchpad_lite.replicas._progress import Share
from launchpad_lite.replicas._remote_optimizers import FunctionalRemote, RemoteOptimizer, remote
from launchpad_lite.replicas._state import packed
from launchpad_lite.replicas.errors import (
    InterruptedTraining,
    ReplicaError,
    ReplicaLostError,
    UnsupportedCollectiveError,
)
from launchpad_lite.replicas.replicators import Here, Replicator

T = TypeVar("T")

#: The key of the work of replicas. Whole numbers are keys of parameters.
_DONE = "done"
#: Seconds until a replica asks again for a value that another one is to set.
_POLL_S = 0.05
#: Seconds until a replica that waits for the result of another one shows that it is not hung.
_LOOK_S = 1.0


class _Done(NamedTuple):
    """The work of one replica, in all its lives."""

    steps: int
    examples: int
    waited_s: float
    input_s: float = 0.0


class _Parameters(engines.ParameterServer):
    """The code of the servers, and of a replica as a worker, which has a `push`."""

    def __init__(self, barrier: engines.Barrier, push: "Callable[..., Any] | None" = None) -> None:
        self.barrier = barrier
        self._push = push

    def initial(self) -> Mapping[Any, Any]:
        return {_DONE: {}}

    def schedule(self, workers: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        keys = [key for key in self.keys() if key == _DONE or isinstance(key, int)]
        return dict.fromkeys(workers, keys)

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:  # noqa: ARG002
        assert self._push is not None
        updates: Mapping[Any, Any] = self._push(values)
        return updates

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        if key != _DONE:
            return value.updated(update)
        key, more = update
        before = value.get(key, _Done(0, 0, 0.0))
        return {**value, key: _Done(*map(operator.add, before, more))}

    def visible(self, key: Any, value: Any) -> Any:
        return value.seen() if isinstance(key, int) else value


@dataclass(kw_only=True)
class _AsynchronousHere(Here):
    """The state of the replicator in a running replica.

    `optimizers` are in the order in which they were wrapped. `done` is the work in each run of
    each replica, as last read from the servers, `ps`.
    """

    ps: engines.ParameterServerClient
    optimizers: list[RemoteOptimizer] = dataclasses.field(default_factory=list)
    done: Mapping[tuple[str, int], _Done] = dataclasses.field(default_factory=dict)

    def made(self, run: "str | None" = None, rank: "int | None" = None) -> int:
        """Returns how many steps were made: in one run or all, by one replica or all."""
        return sum(
            done.steps
            for (its_run, its_rank), done in self.done.items()
            if run in (None, its_run) and rank in (None, its_rank)
        )

    def share_of(self, rank: int) -> Share:
        """Returns the work of a replica, for the progress."""
        mine = [done for (_, its_rank), done in self.done.items() if its_rank == rank]
        return Share(*(sum(getattr(done, name) for done in mine) for name in Share._fields))

    def keys(self) -> list[Any]:
        """Returns the keys that a step reads."""
        return [_DONE, *(key for optimizer in self.optimizers for key in optimizer.keys)]

    def take_over(self, values: Mapping[Any, Any]) -> None:
        """Takes over values of the servers."""
        self.done = values[_DONE]
        self.training.step = self.made(rank=self.rank)
        for optimizer in self.optimizers:
            for key in optimizer.keys:
                optimizer.load(key, values[key])

    def read(self) -> None:
        """Reads all that the servers have or will have."""
        self.take_over({key: _awaited(self.ps, key) for key in self.keys()})

    def staleness(self) -> "collections.Counter[int]":
        """Returns how many updates came between reading and updating: how often."""
        stale = (optimizer.staleness for optimizer in self.optimizers)
        return sum(stale, collections.Counter())


class _AsyncReplicaNode(ReplicaNode):
    """A replica as a node, which meets no others."""

    def __init__(self, *arguments: Any) -> None:
        *others, self._ps = arguments
        super().__init__(*others)

    def _live(self) -> None:
        collectives = Collectives(Carrier())
        here = _AsynchronousHere(self._rank, collectives, self._training, self._group, ps=self._ps)
        here.report.losses = lp.restart_count()
        lp.metrics.view("replica", here.view)
        lp.metrics.view(
            "replica/updates-by-staleness", lambda: dict(sorted(here.staleness().items()))
        )
        with self._replicator.being(here):
            result = self._run_body(self._replicator)
        if self._stays and self._rank == 0:
            self._end([result, *map(_result_of, self._replicas[1:])])
        else:
            self._end(result)


def _result_of(replica: Any) -> Any:
    """Returns the result of another replica, once there is one."""
    # Not from the servers: their checkpoints may have results of an earlier program.
    patient = courier.with_timeout(replica, _LOOK_S)
    return _repeated(patient.replica_results, *LOST, ReplicaError)


def _awaited(ps: engines.ParameterServerClient, key: Any) -> Any:
    """Returns the value of a key, once a replica has set it."""
    return _repeated(lambda: ps.get(key).value, engines.UnknownKeyError)


def _repeated(call: Callable[[], T], *errors: type[Exception]) -> T:
    """Returns the result of a call, which is repeated after these errors until the program stops."""
    while True:
        lp.heartbeat()  # waiting is no hang
        with contextlib.suppress(*errors):
            return call()
        if lp.wait_for_stop(_POLL_S):
            raise ReplicaLostError("the program stops")


def _refused(name: str) -> Callable[..., NoReturn]:
    """Returns a method that raises, in place of a collective that asynchronous replicas lack."""

    def refuse(self: "MultiWorkerAsyncReplicator", *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCollectiveError(
            f"replica {self._me.rank}: {type(self).__name__} has no {name}, because its replicas do "
            "not wait for each other; MultiWorkerReplicator has it"
        )

    refuse.__doc__ = "Raises UnsupportedCollectiveError."
    return refuse


class MultiWorkerAsyncReplicator(Replicator):
    """Many workers, asynchronous: parameters are on servers, and no replica waits for others.

    Each step begins with the newest parameters of the servers. `step` of an optimizer keeps the
    gradients; once `step_fn` has returned, they go to the servers, which apply them with the
    optimizer itself. So its state, momentum for instance, is there, and missing in `state_dict()`
    of the optimizer here. Settings of parameter groups, as the learning rate, go with the
    gradients. Gradients may be computed from parameters that others have changed meanwhile;
    `staleness` says how often.

    The servers are the group `<label>_server` of the program. `checkpoints={"<label>_server":
    lp.Checkpoints(folder, period_s=60)}` keeps the parameters, the state of the optimizers, and how
    many steps were made. The others go on without a replica that is lost. With `restart={"<label>":
    "on_failure"}` it comes back, and goes on with the newest parameters. All else, as averages for
    batch normalisation, is its own: `checkpoints={"<label>": ...}` keeps the things of `keep`.

    It has no collectives: they would wait for others.

    Attributes:
        barrier: When a replica may begin its next step.
        servers: How many servers there are.

    Example:
        repl = replicas.MultiWorkerAsyncReplicator(num_workers=8, barrier=engines.PSP(2))
        accuracies = repl.launch(train)
    """

    _node_type = _AsyncReplicaNode

    def __init__(
        self, num_workers: int, *, barrier: "engines.Barrier | None" = None, servers: int = 1
    ) -> None:
        """Describes them.

        Args:
            num_workers: How many workers. Each is one replica, with one device and its own input.
            barrier: When a replica may begin its next step, as `engines.BSP()`, `engines.SSP(4)` or
                `engines.PSP(2)`; by default `engines.ASP()`: at once.
            servers: How many servers divide the parameters: those of an optimizer of PyTorch
                evenly, those of other optimizers as a whole. With more than one, an optimizer that
                looks at all parameters at the same time sees only those of its server.

        Raises:
            ValueError: A number is too small.
            TypeError: The barrier is none.
        """
        super().__init__(num_workers)
        if servers < 1:
            raise ValueError(f"{type(self).__name__}: at least 1 of servers, not {servers}")
        self.barrier = engines.ASP() if barrier is None else barrier
        check_barrier(self.barrier)
        self.servers = servers

    @property
    def _me(self) -> _AsynchronousHere:
        here = super()._me
        assert isinstance(here, _AsynchronousHere)
        return here

    @property
    def step(self) -> int:
        """How many steps replicas have made on average, as this replica has read."""
        return self._me.made() // self.num_replicas

    def staleness(self) -> "collections.Counter[int]":
        """Returns how stale the updates were that the servers have applied, as this replica has read.

        Counts, for each number of updates that came between reading parameters and updating them,
        how often that happened: of all replicas, optimizers and servers.

        Example:
            repl.staleness()  # Counter({3: 812, 2: 95, 4: 90, 31: 3})
        """
        return self._me.staleness()

    def wrap_optimizer(self, optimizer: Any, parameters: Any = None, **options: Any) -> Any:
        """Returns an optimizer whose `step` has the servers update the parameters.

        All replicas wrap the same optimizers in the same order.

        Args:
            optimizer: Of PyTorch; the same object is returned. Or one with `init(parameters)` and
                `update(gradients, state, parameters)`, as those of optax are, which returns updates
                to be added to the parameters, and the state. In the replica, `update` keeps the
                gradients, and returns zeros.
            parameters: For optimizers that are not of PyTorch: a dict or list of arrays, nested
                perhaps. Before each step, the newest values are put into it.
            **options: As for other replicators, without `every` and `outer`. They have no effect,
            because gradients are not averaged here.

        Raises:
            TypeError: It is no optimizer, the parameters are missing, or the options are other ones.
            ValueError: Another optimizer has one of its parameters.
        """
        if more := sorted(
            options.keys() - {"model", "buffers", "overlap", "bucket_bytes", "label"}
        ):
            raise TypeError(f"{type(self).__name__} has no option {', '.join(more)} of optimizers")
        optimizers = self._me.optimizers
        wrapped = remote(optimizer, parameters, len(optimizers), self.servers)
        known = {id(leaf) for each in optimizers for leaf in each.leaves()}
        if not known.isdisjoint(map(id, wrapped.leaves())):
            raise ValueError(f"{type(optimizer).__name__} has parameters of another optimizer")
        optimizers.append(wrapped)
        return wrapped if isinstance(wrapped, FunctionalRemote) else optimizer

    def keep(self, **things: Any) -> None:
        """Names the state of this replica, which begins with that of replica 0.

        After a restart, it goes back to the newest checkpoint of this replica, if there is one. The
        parameters of wrapped optimizers are always those of the servers.

        Args:
            **things: As for all replicators.

        Raises:
            TypeError: A thing cannot be kept.
        """
        here = self._me
        for name, thing in things.items():
            check_can_be_kept(name, thing)
        new = {name: thing for name, thing in things.items() if name not in here.kept}
        found = here.training.newest()
        if found is not None and not here.kept:
            here.training.go_on_at(found.step, found.places)
        here.kept.update(things)
        here.training.kept = here.kept
        if not new:
            return
        key = ("kept", *new)
        self._set_first(key, lambda: {name: packed(name, new[name]) for name in new})
        state = {**_awaited(here.ps, key), **(found.kept if found else {})}
        for name, thing in new.items():
            put_into(name, thing, _payload.unpack([part.copy() for part in state[name]]))

    def _set_first(self, key: Any, value: Callable[[], Any]) -> None:
        """Sets a value in replica 0, if there is none."""
        if self._me.rank == 0:
            known = self._me.ps.keys()
            if key not in known:
                self._me.ps.set(key, value())

    def run(
        self,
        step_fn: Callable[..., T],
        input_fn: "Callable[..., Any] | None" = None,
        *,
        steps: "int | None" = None,
        progress_s: float = 10.0,
        tensorboard: "str | None" = None,
        counts: bool = True,
        uneven: str = "end",  # noqa: ARG002 - each replica ends by itself
    ) -> Iterator[list[T]]:
        """Makes steps; yields after each of them a list with the result of this replica.

        The list has one item, because nothing is gathered. Ends when all replicas together have made
        the steps, when the input of this replica ends, or when the program stops. Between two steps
        parameters are as they were at the begin of the last one; at the end, they are the newest.

        Takes the arguments of `Replicator.run`, with these differences. Several optimizers may step in
        `step_fn`, also several times; parameters change when it has returned. `input_fn` takes the index
        of the replica; the `step` that it may take is how many this replica has made in this run. `steps`
        is how many there will be of each replica on average; fast replicas make more of them, and steps
        in flight at the end are made, too: less than one of each replica. Steps that do not count are of
        this replica alone, and their gradients go nowhere. `uneven` is not used: each replica ends by
        itself.

        Raises:
            ReplicaError: The servers have parameters of another model.
            UpdateError: The servers could not apply an update.
        """
        here = self._me
        if not counts or here.depth:
            yield from super().run(step_fn, input_fn, steps=steps, counts=False)
            return
        if here.has_stopped:
            return
        for optimizer in here.optimizers:
            for key in optimizer.keys:
                self._set_first(key, functools.partial(optimizer.first, key))
        here.read()
        place = here.training.course.enter("run")
        if place.is_over:
            return
        run = here.training.course.name
        inputs = self._inputs(input_fn, here.made(run, here.rank)) if input_fn else None
        total = limit = None
        if steps is not None:
            limit = steps * self.num_replicas
            total = (here.made() - here.made(run)) // self.num_replicas + steps
        stepping = _Stepping(here, step_fn, inputs, limit, run)
        with self._open_run(place, inputs, True, total, progress_s, tensorboard) as progress:
            for result in stepping.steps():
                if progress is not None:
                    shares = [here.share_of(rank) for rank in range(self.num_replicas)]
                    progress.note(self.step, [result], shares, _text(here.staleness()))
                yield [result]
        here.has_stopped = lp.stop_event().is_set()
        if not here.has_stopped:
            here.read()
        here.training.take_at_end()
        if here.has_stopped and lp.current_node().is_interrupted:
            raise InterruptedTraining(f"{here.label}: interrupted between two steps")

    # Collectives, which it lacks.

    all_reduce = _refused("all_reduce")
    all_sum = _refused("all_sum")
    all_gather = _refused("all_gather")
    broadcast = _refused("broadcast")
    map_reduce = _refused("map_reduce")
    map_gather = _refused("map_gather")

    def _add_more(self, program: lp.Program, label: str) -> Sequence[Any]:
        servers = _Parameters(self.barrier)
        return [
            servers.add_to(program, workers=0, servers=self.servers, label=label, progress_s=None)
        ]


@dataclass
class _Stepping:
    """The steps of one `run`, in which all replicas make `limit` steps (None: no limit)."""

    _here: _AsynchronousHere
    _step_fn: Callable[..., Any]
    _inputs: "_inputs.Inputs | None"
    _limit: "int | None"
    _run: str
    _has_ended: bool = False
    _has_result: bool = False
    _result: Any = None
    #: Seconds spent on the servers, not reported yet; and on input, as reported.
    _waited_s: float = 0.0
    _input_s: float = 0.0
    _waits_since: float = 0.0

    def steps(self) -> Iterator[Any]:
        """Makes them; yields the results of the function."""
        report, began_at = self._here.report, time.monotonic() - self._here.report.seconds
        self._input_s = report.input_s
        if not self._goes_on():
            return
        self._waits_since = time.monotonic()
        for _ in self._here.ps.work(_Parameters(engines.ASP(), self._push)):
            if self._has_ended:
                return
            if not self._has_result:
                continue
            report.steps += 1
            self._note_wait()
            yield self._result
            report.seconds = time.monotonic() - began_at
            # Not whether the input goes on: the servers may say that there are enough steps.
            if lp.stop_event().is_set():
                return
            self._waits_since = time.monotonic()

    def _note_wait(self) -> None:
        waited_s = time.monotonic() - self._waits_since
        self._waited_s += waited_s
        self._here.report.waited_s += waited_s

    def _goes_on(self) -> bool:
        return not lp.stop_event().is_set() and self._here.has_next(self._inputs)

    def _push(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        here = self._here
        self._has_result = values.keys() >= set(here.keys())
        if not self._has_result:  # replica 0 sets them, and their names last
            lp.wait_for_stop(_POLL_S)
            return {}
        here.take_over(values)
        self._note_wait()
        is_enough = self._limit is not None and here.made(self._run) >= self._limit
        # Asked again: a step whose server was lost is repeated, with the next batch.
        if is_enough or not self._goes_on():
            self._has_ended = True
            return {}
        here.training.between_steps()
        more_s, self._input_s = here.report.input_s - self._input_s, here.report.input_s
        done = _Done(1, self._call(), self._waited_s, more_s)
        self._waited_s, self._waits_since = 0.0, time.monotonic()
        updates = [optimizer.updates() for optimizer in here.optimizers]
        return {
            _DONE: ((self._run, here.rank), done),
            **{key: each[key] for each in updates for key in each},
        }

    def _call(self) -> int:
        """Calls the function; returns how many examples it got."""
        if self._inputs is None:
            self._result = self._step_fn()
            return 0
        is_last = self._limit is not None and self._here.made(self._run) + 1 >= self._limit
        batch = self._inputs.next(is_last=is_last)
        examples = _inputs.examples_in(batch)
        self._here.report.examples += examples
        self._result = self._step_fn(batch)
        return examples


def _text(staleness: "collections.Counter[int]") -> str:
    """Returns how stale updates were, for a line of progress."""
    if not staleness:
        return ""
    mean = sum(stale * count for stale, count in staleness.items()) / staleness.total()
    return f", updates {mean:.1f} stale on average, {max(staleness)} at most"
