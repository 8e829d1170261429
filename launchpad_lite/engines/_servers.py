"""The servers of a parameter server: values, updates, and the barrier.

Each `KeyServer` holds the values of some keys. The first one is the `Coordinator`, too: it knows the
workers and their steps, gives them keys, and applies the barrier.
"""

import asyncio
import collections
import concurrent.futures
import contextvars
import functools
import itertools
import pickle
import random
import statistics
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import courier
import launchpad_lite as lp
from launchpad_lite.engines._population import Population
from launchpad_lite.engines._user_code import run_user_code
from launchpad_lite.engines._values import Key, check_first, listed, pulled, unknown_key
from launchpad_lite.engines.errors import EngineError, ValuesLostError
from launchpad_lite.parts.threads import start_thread

if TYPE_CHECKING:
    from launchpad_lite.engines.parameter_server import ParameterServer

#: Workers of a machine that read the same version of a larger array have it in memory once.
_LARGE_BYTES = 1 << 24

#: Seconds that a coordinator waits after a restart for its workers to come back. The first to come
#: would otherwise find itself alone, and pass the barrier.
REJOIN_S = 2.0


class UnknownMemberError(EngineError):
    """This worker does not take part (any more), and is to join again."""


class WorkerIdentity(NamedTuple):
    """A worker that takes part. A later one of the same name takes the place of the earlier."""

    #: Unique among those that take part. Names are used again, so there are few.
    name: str
    #: Of the coordinator when the worker joined; a later one has a greater one.
    life: int
    #: Counts, within that life, the workers that have joined.
    number: int


@dataclass(frozen=True)
class StepStart:
    """The answer to a worker that may begin a step."""

    keys: list[Key]
    #: Of the first server, whose values these are.
    life: str
    #: Key, version and value of each that has changed, of those the worker had.
    changed: list[tuple[Key, int, Any]]


@dataclass(frozen=True)
class Progress:
    """How far the workers of an engine are.

    Attributes:
        workers: How many there are.
        waiting: How many of them wait at the barrier.
        slowest: Steps that the slowest has finished; 0 without workers.
        median: The same of the median.
        fastest: The same of the fastest.
        updates: Steps that were finished in all, also by workers that have left.

    Example:
        print(ps.progress())  # 8 workers, 1 waiting, steps 40 to 44 (median 42), 339 updates
    """

    workers: int
    waiting: int
    slowest: int
    median: float
    fastest: int
    updates: int

    def __str__(self) -> str:
        return (
            f"{self.workers} workers, {self.waiting} waiting, steps {self.slowest:,} to "
            f"{self.fastest:,} (median {self.median:,g}), {self.updates:,} updates"
        )


class Turns:
    """Runs functions in the order in which they come, one at a time. Thread-safe.

    One that finds no other runs in the thread of its caller. Others run in a thread that lives as
    long as there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The first one runs.
        self._runs: collections.deque[Callable[[], None]] = collections.deque()

    def run(self, function: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        """Returns what a function returns or raises, now or later.

        It has the context variables of the caller. It may not wait for others that are to run here.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # A copy: it may run while the caller's own is in use.
        context = contextvars.copy_context()

        def run() -> None:
            context.run(_settle, future, function, args)

        with self._lock:
            self._runs.append(run)
            if len(self._runs) > 1:
                return future
        run()
        if self._end_turn():
            threading.Thread(target=self._run_others, name="engine-turns", daemon=True).start()
        return future

    def _run_others(self) -> None:
        is_more = True
        while is_more:
            self._runs[0]()
            is_more = self._end_turn()

    def _end_turn(self) -> bool:
        with self._lock:
            self._runs.popleft()
            return bool(self._runs)


def _settle(
    future: "concurrent.futures.Future[Any]", function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
        future.set_exception(error)
    else:
        future.set_result(result)


class _Held:
    """One value. Replaced, never changed: readers may still get it."""

    __slots__ = ("_sent", "_was_read", "value", "version")

    def __init__(self, value: Any, visible: Any, version: int) -> None:
        self.value = value
        self.version = version
        self._sent = visible
        self._was_read = False

    def sent(self) -> Any:
        """Returns what a reader gets: not shared at first, because most values have one reader."""
        sent = self._sent  # read once: several threads may be here
        if self._was_read and getattr(sent, "nbytes", 0) >= _LARGE_BYTES:
            sent = self._sent = courier.Shared(sent)  # which has no nbytes
        self._was_read = True
        return sent


class KeyServer:
    """Holds the values of some keys. Thread-safe."""

    def __init__(self, job: "ParameterServer", servers: Sequence[Any]) -> None:
        """Gets clients of all servers, in order; None in the place of this one."""
        self._name = lp.current_node().name
        #: Tells values of this process from those of an earlier one, whose versions may be the
        #: same.
        self._life = uuid.uuid4().hex
        self._held: dict[Key, _Held] = {}
        #: Keys that are in a checkpoint, if there are any.
        self._kept: set[Key] = set()
        #: By name of a worker, the last updates that were applied: life, number, and step.
        self._applied: dict[str, tuple[int, int, int]] = {}
        # Runs what changes values. Waiting callers hold no thread: reads need the threads.
        self._changes = Turns()
        #: Held while a result is stored, so that a checkpoint has all of a step or nothing.
        self._storing = threading.Lock()
        self._is_lost = lp.restart_count() > 0
        self._server_num = len(servers)
        self._job = job.in_node_of([self if server is None else server for server in servers])

    @courier.idempotent
    def read(
        self, wanted: Mapping[Key, int], life: str = ""
    ) -> tuple[str, list[tuple[Key, int, Any]]]:
        """Returns the life of this server; and key, version and value of each that has changed.

        The caller has the `wanted` versions, by key (-1: none), of a server of this `life`.
        """
        self._check()
        with self._storing:  # all of a step, or nothing
            found = {key: self._known(key) for key in wanted}
        changed = [
            (key, held.version, held.sent())
            for key, held in found.items()
            if held.version != wanted[key] or life != self._life
        ]
        return self._life, changed

    @courier.idempotent
    def put(
        self, values: Mapping[Key, Any], replace: bool = True
    ) -> "concurrent.futures.Future[None]":
        """Sets values. New keys are in a checkpoint, if there are any, when this is done.

        The caller does not change the values any more. `replace` says whether those of keys that have
        one are set.
        """
        return self._changes.run(self._put, values, replace)

    def _put(self, values: Mapping[Key, Any], replace: bool) -> None:
        self._check()
        self._store({key: values[key] for key in values if replace or key not in self._held}, {})
        self._keep(values, self._kept)

    def _keep(self, keys: Iterable[Key], kept: set[Key]) -> None:
        """Saves a checkpoint, if there are any, unless one has these keys."""
        if not kept.issuperset(keys):
            lp.save_checkpoint()
            kept.update(keys)

    @courier.idempotent
    def update(
        self, member: WorkerIdentity, step: int, updates: Mapping[Key, Any]
    ) -> "concurrent.futures.Future[None]":
        """Applies the updates of one step: all or none, and once, however often it is called.

        UnknownMemberError says that another worker has taken the place of this one.
        """
        return self._changes.run(self._update, member, step, updates)

    def _update(self, member: WorkerIdentity, step: int, updates: Mapping[Key, Any]) -> None:
        self._check()
        name, life, number = member
        last = self._applied.get(name)
        if last is not None and last >= (life, number, step):
            if last[:2] != (life, number):  # it is not known whether this was applied before
                raise UnknownMemberError(f"{self._name}: another worker is {name} now")
            return
        values = {}
        for key, update in updates.items():
            value = self._known(key).value
            values[key] = pulled(self._job, self._name, key, name, step, value, update)
        self._store(values, {name: (life, number, step)})

    def _known(self, key: Key) -> _Held:
        held = self._held.get(key)
        if held is None:
            raise unknown_key(self._name, key, self._held)
        return held

    def _store(
        self, values: Mapping[Key, Any], applied: Mapping[str, tuple[int, int, int]]
    ) -> None:
        new = {}
        for key, value in values.items():
            held = self._held.get(key)
            new[key] = self._hold(key, value, 0 if held is None else held.version + 1)
        with self._storing:
            self._held.update(new)
            self._applied.update(applied)

    def _hold(self, key: Key, value: Any, version: int) -> _Held:
        return _Held(value, run_user_code(self._name, self._job, "visible", key, value), version)

    def _check(self) -> None:
        # With checkpoints, there are no keys before they are in one.
        if self._is_lost and lp.save_checkpoint() is not None:
            self._is_lost = False
        if self._is_lost:
            raise ValuesLostError(
                f"{self._name} was started again, and its values are lost: launch with "
                "checkpoints= for it, and a period_s"
            )

    def save(self, folder: Path) -> None:
        with self._storing:
            state = self._state()
        with (folder / "values.pickle").open("wb") as file:
            courier.dump(state, file)

    def _state(self) -> dict[str, Any]:
        values = {key: (held.value, held.version) for key, held in self._held.items()}
        return {"servers": self._server_num, "values": values, "applied": dict(self._applied)}

    def restore(self, folder: Path) -> None:
        with (folder / "values.pickle").open("rb") as file:
            self._restore(pickle.load(file))

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["servers"] != self._server_num:  # each would miss keys that others have
            raise EngineError(
                f"{self._name}: this checkpoint is of {state['servers']} servers, and the program has "
                f"{self._server_num}. Launch with add_to(..., servers={state['servers']}), or with "
                "another folder for the checkpoints"
            )
        for key, (value, version) in state["values"].items():
            self._held[key] = self._hold(key, value, version)
        self._kept = set(self._held)
        self._applied = state["applied"]
        self._is_lost = False


@dataclass
class _StepCall:
    """A call of a worker that wants to begin a step."""

    #: The versions that it has, as for `KeyServer.read`.
    versions: Mapping[Key, int]
    life: str
    future: "concurrent.futures.Future[StepStart | None]" = field(
        default_factory=concurrent.futures.Future
    )


@dataclass
class _WorkerPresence:
    """What the coordinator knows of a worker that takes part."""

    #: Its node, and how often that was started again.
    node: str
    restarts: int
    #: Ends its stream.
    dismiss: Callable[[], object]
    #: Its call, answered when it may go on.
    call: _StepCall | None = None


class Coordinator(KeyServer):
    """The first server: knows the workers, and decides which of them goes on with which keys."""

    def __init__(
        self, job: "ParameterServer", servers: Sequence[Any], progress_s: float | None
    ) -> None:
        #: Seconds between two lines of progress; None for no such lines.
        self._progress_s = progress_s
        self._population: Population[WorkerIdentity] = Population(
            job.barrier,
            random.Random(lp.current_node().seed),  # noqa: S311 - no secret
        )
        # From the clock, and not from a checkpoint, which may be older.
        self._member_life = time.time_ns()
        self._member_numbers = itertools.count()
        self._members: dict[WorkerIdentity, _WorkerPresence] = {}
        self._keys: dict[Key, None] = {}
        #: Those of these keys that are in a checkpoint, if there are checkpoints.
        self._kept_names: set[Key] = set()
        #: Workers that have finished a step, which is not counted yet.
        self._early: dict[WorkerIdentity, None] = {}
        self._updates = 0
        #: How many there were in the last line of progress, and when that was.
        self._shown_updates, self._shown_at = 0, time.monotonic()
        #: Workers that may go on, once the thread below gets to it.
        self._released: list[WorkerIdentity] = []
        self._opens_at = time.monotonic() + (REJOIN_S if lp.restart_count() else 0.0)
        # Guards all of these.
        self._changed = threading.Condition()
        # Held while code of the user decides. That may set values and then waits for `_changes`;
        # nothing there waits for this.
        self._decisions = Turns()
        self._has_begun = False
        self._has_ended = False
        self._stops = False
        super().__init__(job, servers)  # which runs code of the user
        lp.register_stop_handler(self._stop)
        lp.metrics.view("engine", self.progress)
        lp.metrics.view("engine/workers-by-steps", self._workers_by_steps)
        start_thread(self._watch, name="parameter-server")

    # Called by workers and other nodes.

    @courier.idempotent
    def begin(self) -> "concurrent.futures.Future[None]":
        """Sets the first values, unless that was done before."""
        return self._decisions.run(self._begin)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._check()
        self._job.set_first(run_user_code(self._name, self._job, "initial", check=check_first))
        self._has_begun = True
        try:
            lp.save_checkpoint()
        except BaseException:
            self._has_begun = False
            raise

    @courier.idempotent
    def add_keys(self, keys: Sequence[Key]) -> None:
        """Notes that there are values of these keys. New ones are in a checkpoint, as for `put`."""
        with self._changed:
            self._keys.update(dict.fromkeys(keys))
        self._keep(keys, self._kept_names)

    @courier.idempotent
    def keys(self) -> list[Key]:
        self._check()
        with self._changed:
            return list(self._keys)

    @courier.idempotent
    def worker_num(self) -> int:
        return len(self._population)

    @courier.idempotent
    def progress(self) -> Progress:
        with self._changed:
            steps = sorted(self._population.steps.values()) or [0]
            return Progress(
                len(self._population),
                self._population.waiting,
                steps[0],
                statistics.median(steps),
                steps[-1],
                self._updates,
            )

    def _workers_by_steps(self) -> Mapping[int, int]:
        with self._changed:
            return collections.Counter(sorted(self._population.steps.values()))

    async def stay(
        self, node: str, restarts: int, before: WorkerIdentity | None, finished: int | None
    ) -> AsyncIterator[tuple[WorkerIdentity, int]]:
        """Lets a worker take part as long as it reads this stream.

        Yields once: the member that it is, and how many steps it counts as finished. If it took part
        before, it takes the place of that member, and says how many it has finished.
        """
        dismissed, loop = asyncio.Event(), asyncio.get_running_loop()
        dismiss = functools.partial(loop.call_soon_threadsafe, dismissed.set)
        with self._changed:
            # Streams of workers that are gone, whose end was not noticed yet.
            gone = [
                other
                for other, its in self._members.items()
                if other == before or (its.node == node and its.restarts < restarts)
            ]
            name = _free_name(node, {other.name for other in self._members if other not in gone})
            member = WorkerIdentity(name, self._member_life, next(self._member_numbers))
            # A worker that comes back has finished this step, and still has to pass the barrier.
            step = self._population.add(member, finished - 1 if finished else None)
            self._members[member] = _WorkerPresence(node, restarts, dismiss)
            for other in gone:
                self._members[other].dismiss()
                self._remove(other)
        try:
            yield member, finished or step
            await dismissed.wait()  # or the worker leaves
        finally:
            with self._changed:
                if member in self._members:
                    self._remove(member)

    def _remove(self, member: WorkerIdentity) -> None:
        del self._members[member]
        # Decided elsewhere: code of the user may block, and this is the event loop.
        self._released += self._at_barrier("remove", member)
        self._changed.notify()

    def _at_barrier(self, change: str, *args: Any) -> list[WorkerIdentity]:
        """Returns the workers that may go on after a change. Errors of a barrier go to all that wait."""
        try:
            return list(run_user_code(f"{self._name}: barrier", self._population, change, *args))
        except Exception as error:  # noqa: BLE001 - as above
            for member in self._members:
                self._answer(member, error)
            return []

    @courier.idempotent
    def advance(
        self,
        member: WorkerIdentity,
        finished: int,
        updates: Mapping[Key, Any],
        versions: Mapping[Key, int],
        life: str,
    ) -> "concurrent.futures.Future[StepStart | None]":
        """Asks to begin the next step; answered when the barrier lets the worker pass.

        It saves further calls: the rest of the updates of the last step are applied first, and the
        answer brings values, of keys for which the worker has these versions, as for `read`. None
        says that there is nothing more to do. Raises what `update` does.
        """
        call = _StepCall(versions, life)
        arrive = functools.partial(self._arrive, member, finished, call)
        if not updates:
            arrive(decides=True)
            return call.future
        applied = self.update(member, finished - 1, updates)
        # Else it decides elsewhere: the next updates wait for this thread, and must not wait for a
        # decision.
        applied.add_done_callback(functools.partial(arrive, decides=applied.done()))
        return call.future

    def _arrive(
        self,
        member: WorkerIdentity,
        finished: int,
        call: _StepCall,
        applied: "concurrent.futures.Future[None] | None" = None,
        *,
        decides: bool,
    ) -> None:
        """Has a call wait at the barrier; if any worker may pass, decides here or elsewhere."""
        try:
            if applied is not None:
                applied.result()
            released = self._wait_at_barrier(member, finished, call)
        except Exception as error:  # noqa: BLE001 - the worker gets it
            call.future.set_exception(error)
            return
        if decides and released:
            self._decisions.run(self._let_go, released)
        elif released:
            with self._changed:
                self._released += released
                self._changed.notify()

    def _wait_at_barrier(
        self, member: WorkerIdentity, finished: int, call: _StepCall
    ) -> list[WorkerIdentity]:
        with self._changed:
            if self._stops:
                call.future.set_result(None)
                return []
            if member not in self._members:
                raise UnknownMemberError(f"{self._name}: {member.name} does not take part any more")
            waits = self._members[member].call is not None
            self._members[member].call = call
            is_open = self._opens_at <= time.monotonic()
            released: list[WorkerIdentity] = []
            if member in self._early:
                pass  # repeated, because its connection broke
            elif finished > self._population.step_of(member):
                self._updates += 1
                self._early[member] = None
                if is_open:
                    released = self._finish_early()
            elif not waits:  # else repeated, too
                (released if is_open else self._released).append(member)
            self._changed.notify()  # there may be something to do at some time, now
            return released

    def __courier_waits__(self, method: str) -> list[tuple[str, str]]:
        """Returns of each call that waits at the barrier one worker that is not there."""
        members = tuple(self._members.values()) if method == "advance" else ()
        away = [(each.node, "at the barrier") for each in members if each.call is None]
        return [*itertools.islice(itertools.cycle(away), len(members) - len(away))]

    # How it decides.

    def _finish_early(self) -> list[WorkerIdentity]:
        """Notes finished steps; returns workers that may go on. Waits a while after a restart."""
        early, self._early = self._early, {}
        released: list[WorkerIdentity] = []
        for member in early:
            if member in self._members:
                released += self._at_barrier("finish", member, time.monotonic())
        return released

    def _let_go(self, members: Sequence[WorkerIdentity]) -> None:
        try:
            self._check()
            self._has_ended = self._has_ended or bool(run_user_code(self._name, self._job, "stop"))
            keys = self._schedule(members) if not self._has_ended else {}
        except Exception as error:  # noqa: BLE001 - the workers get it
            for member in members:
                self._answer(member, error)
            return
        if self._has_ended:
            with self._changed:
                members = list(self._members)
        for member in members:
            self._answer(member, keys.get(member))

    def _schedule(self, members: Sequence[WorkerIdentity]) -> dict[WorkerIdentity, list[Key]]:
        with self._changed:
            names = {member.name: member for member in members if member in self._members}
        plan = run_user_code(self._name, self._job, "schedule", list(names), check=_check_plan)
        if unknown := sorted(set(plan) - set(names), key=repr):
            raise ValueError(
                f"{self._name}: schedule has keys for {unknown[0]!r}, but was asked for {', '.join(names)}"
            )
        for key in {key for keys in plan.values() for key in keys}:
            if key not in self._keys:
                raise unknown_key(f"{self._name}: schedule", key, self._keys)
        return {member: plan.get(name, []) for name, member in names.items()}

    def _answer(self, member: WorkerIdentity, answer: list[Key] | Exception | None) -> None:
        with self._changed:
            # It may have left.
            call = self._members[member].call if member in self._members else None
            if call is not None:
                self._members[member].call = None
        if call is None:
            return
        if isinstance(answer, Exception):
            call.future.set_exception(answer)
        elif answer is None:
            call.future.set_result(None)
        else:
            known = {key: call.versions[key] for key in answer if key in call.versions}
            call.future.set_result(StepStart(answer, *self.read(known, call.life)))

    def _watch(self) -> None:
        """Does what no call does: what is due at a time, and what follows when a worker leaves."""
        while True:
            with self._changed:
                now = time.monotonic()
                if self._opens_at <= now:
                    self._released += self._finish_early()
                    self._released += self._at_barrier("draw_due", now)
                due = self._due()
                if self._stops:
                    return
                if not (self._released and self._opens_at <= now) and due > now:
                    self._changed.wait(min(due - now, threading.TIMEOUT_MAX))
                    continue
                released, self._released = self._released, []
            if released:
                self._decisions.run(self._let_go, released)
            self._show_progress()

    def _due(self) -> float:
        times = [self._opens_at] if self._released or self._early else []
        draw = self._population.next_draw()
        times += [] if draw is None else [max(draw, self._opens_at)]
        if self._progress_s is not None:
            times.append(self._shown_at + self._progress_s)
        return min(times, default=float("inf"))

    def _show_progress(self) -> None:
        now = time.monotonic()
        if self._progress_s is None or now < self._shown_at + self._progress_s:
            return
        progress = self.progress()
        new = progress.updates - self._shown_updates
        rate = new / (now - self._shown_at)
        self._shown_updates, self._shown_at = progress.updates, now
        if progress.workers or new:
            print(f"{progress}, {rate:,.0f}/s", file=sys.stderr)  # noqa: T201 - asked for

    def _stop(self) -> None:
        """Answers all calls at the barrier: workers that ignore the stop must not delay the end."""
        with self._changed:
            self._stops = True
            self._changed.notify()
            members = dict(self._members)
        for member, presence in members.items():
            self._answer(member, None)
            presence.dismiss()

    # Its state, besides the values.

    def _state(self) -> dict[str, Any]:
        with self._changed:
            return super()._state() | {
                "keys": list(self._keys),
                "step": self._population.slowest,
                "has_begun": self._has_begun,
                "member_life": self._member_life,
            }

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._keys = dict.fromkeys(state["keys"])
        self._kept_names = set(self._keys)
        if lp.restart_count():
            self._opens_at = time.monotonic() + REJOIN_S
        self._population.begin_at(state["step"])
        self._has_begun = state["has_begun"]
        # Greater, even if the clock was set back.
        self._member_life = max(self._member_life, state["member_life"] + 1)


def _check_plan(what: str, plan: Any) -> dict[str, list[Key]]:
    if not isinstance(plan, Mapping):
        raise TypeError(f"{what} returned {plan!r}; it is to map workers to keys")
    return {name: listed(f"{what} of {name}", keys) for name, keys in plan.items()}


def _free_name(node: str, taken: Container[str]) -> str:
    """Returns the name of a node, or one that differs in a number."""
    names = itertools.chain([node], (f"{node}#{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
