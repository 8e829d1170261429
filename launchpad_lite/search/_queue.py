"""The decisions of a broker: which worker gets which task, and how tasks end.

A state machine without I/O and without a clock: `now` is any clock that never goes back, in seconds.
Not thread-safe.

A task waits, is leased to a worker, and has an outcome, which stays until its model has acknowledged
it. The first outcome counts; all later ones are dropped. So each task has one, whatever is lost,
doubled or late. A broker that helps another one is to it a worker with many tasks.
"""

import bisect
import copy
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launchpad_lite.search._messages import (
    MOST_BYTES,
    PYTHON,
    Assignment,
    Life,
    Limits,
    Load,
    TaskOutcome,
    TaskProgress,
    TaskState,
    TaskSubmission,
    WorkerMachine,
    first_of,
    transfer_s,
)
from launchpad_lite.search._room import Use, could_run, kept_for, room

#: A kind, and the resources that its tasks need. All tasks of a lane are alike.
_Lane = tuple[str, Limits]
_NO_NEEDS = Limits()
#: The place of a task that needs no resources.
_NOWHERE: tuple[str, tuple[str, ...]] = "", ()
#: Points of learning curves that wait for a model; older ones are dropped.
_MOST_PROGRESS = 10_000


@dataclass(slots=True)
class QueuedTask:
    """A task, as its broker sees it."""

    submission: TaskSubmission
    #: The model that gets the outcome, or the broker that is helped.
    owner: str
    #: Counts tasks in the order of arrival.
    number: int
    #: Whether it belongs to another broker.
    helps: bool = False
    #: The worker that has it, and the token of the assignment.
    lease: tuple[Life, str] | None = None
    #: One for each time that it has raised.
    errors: tuple[str, ...] = ()
    losses: int = 0
    outcome: TaskOutcome | None = None
    #: The machine and devices that it uses during its lease.
    place: tuple[str, tuple[str, ...]] = _NOWHERE
    # These are not stored: the ends of its lease and of its run, whether its worker is to end it,
    # and whether the process of the worker ends with it.
    expires_at: float = 0.0
    deadline_at: float | None = None
    is_stopped: bool = False
    is_killed: bool = False


@dataclass(frozen=True)
class Changes:
    """Changes for the store to write, at once."""

    new: list[QueuedTask]
    #: Except for their submission.
    changed: list[QueuedTask]
    #: Their ids.
    removed: list[str]

    def copy(self) -> "Changes":
        """Returns what stays as it is now."""
        new, changed = ([*map(copy.copy, tasks)] for tasks in (self.new, self.changed))
        return Changes(new, changed, self.removed)


@dataclass
class _WorkerRecord:
    life: str
    seen_at: float
    kinds: Collection[str] = ()
    #: Whether it is a broker.
    helps: bool = False
    held: set[str] = field(default_factory=set)
    #: Whether it is known from an earlier life of the broker only.
    is_restored: bool = False
    machine: WorkerMachine | None = None
    #: The task that uses resources of the machine, and these, until the worker reports that it is
    #: gone.
    using: tuple[str, Use] | None = None


@dataclass
class _Owner:
    """A model, or a broker that is helped."""

    session: str = ""
    #: Its tasks. Without any it is forgotten.
    ids: dict[str, None] = field(default_factory=dict)
    #: Outcomes that were not delivered in this session.
    ready: dict[str, None] = field(default_factory=dict)
    progress: list[TaskProgress] = field(default_factory=list)
    #: As `Collected.begun`.
    begun: dict[str, bool] = field(default_factory=dict)


class Queue:
    def __init__(
        self, *, lease_s: float = 10.0, max_losses: int = 5, max_queued: int = 10_000
    ) -> None:
        #: Seconds that a silent worker keeps a task.
        self._lease_s = lease_s
        #: How often a task may lose its worker; once more, and it fails.
        self._max_losses = max_losses
        #: Tasks that may wait; more are not accepted.
        self._max_queued = max_queued
        self._tasks: dict[str, QueuedTask] = {}
        self._numbers = itertools.count()
        #: By kind and needs, the tasks that wait, the next one first.
        self._waiting: dict[_Lane, list[tuple[float, int, str]]] = {}
        self._queued = 0
        self._leased: set[str] = set()
        self._workers: dict[str, _WorkerRecord] = {}
        self._owners: dict[str, _Owner] = {}
        #: Tasks of an earlier life, which wait until their model confirms them, or sends them again
        #: with the newest code.
        self._awaited: set[str] = set()
        #: Tasks that workers report, and that no model has sent (again) yet.
        self._claims: dict[str, tuple[Life, str]] = {}
        #: When it was restored, perhaps from nothing.
        self._began_at = -math.inf
        self._ticked_at = math.inf
        #: Tasks to store, and whether the store lacks them; those that are gone are to be removed.
        self._touched: dict[str, bool] = {}
        #: Counts changes to store.
        self.changes = 0

    # Storing.

    def restore(self, tasks: Iterable[QueuedTask], now: float) -> None:
        """Takes over the tasks of a store. Leases begin now: workers have time to report."""
        self._began_at = self._ticked_at = now
        number = -1
        for task in sorted(tasks, key=lambda task: task.number):
            number = task.number
            self._keep(task)
            if task.outcome is not None:
                self._owner(task.owner).ready[task.submission.id] = None
                continue
            self._awaited.add(task.submission.id)
            if task.lease is not None:
                self._leased.add(task.submission.id)
                self._time(task, now)
                worker = task.lease[0]
                known = self._workers.setdefault(
                    worker.name, _WorkerRecord(worker.life, now, is_restored=True)
                )
                known.held.add(task.submission.id)
                if task.place[0]:
                    known.machine = WorkerMachine(task.place[0])
                    known.using = task.submission.id, (task.submission.limits, task.place[1])
            else:
                self._push(task)
        self._numbers = itertools.count(number + 1)

    def take_changes(self) -> Changes:
        """Returns what has changed: the tasks themselves, which go on changing."""
        found = Changes([], [], [])
        for key, is_new in self._touched.items():
            task = self._tasks.get(key)
            if task is None or task.helps:
                found.removed.append(key)
            else:
                (found.new if is_new else found.changed).append(task)
        self._touched = {}
        return found

    def _note(self, task: QueuedTask, *, is_new: bool = False) -> None:
        if not task.helps:
            key = task.submission.id
            self._touched[key] = is_new or self._touched.get(key, False)
            self.changes += 1

    # Called for models.

    def submit(self, owner: str, submissions: Sequence[TaskSubmission], now: float) -> int:
        """Takes tasks, as many as there is room for, in order; returns how many. Known ones count.

        A known task without an outcome is replaced by the new one.
        """
        for count, submission in enumerate(submissions):
            self._awaited.discard(submission.id)
            if (known := self._tasks.get(submission.id)) is not None:
                if known.helps:  # the model has lost its broker, and this one has the task already
                    self._own(known, owner, submission, now)
                elif known.outcome is None:
                    if known.submission != submission:
                        self._wait_no_more(known)  # its priority may be another one
                        known.submission = submission
                        self._note(known, is_new=True)
                    self._wait(known)
                continue
            if self._queued >= self._max_queued:
                return count
            self._add(QueuedTask(submission, owner, next(self._numbers)), now)
        return len(submissions)

    def lacks(self, submission: TaskSubmission) -> bool:
        """Returns whether `submit` would take this task for the first time, or in place of an earlier one."""
        known = self._tasks.get(submission.id)
        if known is None:
            return self._queued < self._max_queued
        return known.helps or (known.outcome is None and known.submission != submission)

    def _keep(self, task: QueuedTask) -> None:
        self._tasks[task.submission.id] = task
        self._owner(task.owner).ids[task.submission.id] = None

    def _add(self, task: QueuedTask, now: float) -> None:
        submission = task.submission
        self._keep(task)
        self._note(task, is_new=True)
        claim = self._claims.pop(submission.id, None)
        if claim is None:
            self._push(task)
        else:
            self._lend(task, *claim, now)

    def _own(self, task: QueuedTask, owner: str, submission: TaskSubmission, now: float) -> None:
        self._wait_no_more(task)  # its priority may be another one
        helped = self._owner(task.owner)
        for each in (helped.ids, helped.ready, helped.begun):
            each.pop(submission.id, None)
        task.helps, task.owner, task.submission = False, owner, submission
        self._keep(task)
        self._note(task, is_new=True)
        if task.outcome is not None:
            self._owner(owner).ready[submission.id] = None
        elif task.lease is not None:
            self._time(task, now)
            self._owner(owner).begun[submission.id] = True
        else:
            self._push(task)

    def collect(self, owner: str, session: str) -> tuple[list[TaskOutcome], list[TaskProgress]]:
        """Returns outcomes, each once in a session, and progress since the last call.

        Outcomes that do not fit into one call come with the next ones. In another session, all
        that are not acknowledged come again.
        """
        found = self._owner(owner)
        if found.session != session:
            found.session = session
            found.ready = {
                each: None for each in found.ids if self._tasks[each].outcome is not None
            }
            found.begun = {each: True for each in found.ids if self._tasks[each].lease is not None}
        outcomes = first_of(filter(None, (self._tasks[each].outcome for each in found.ready)))
        for each in outcomes:
            del found.ready[each.id]
        progress, found.progress = found.progress, []
        return outcomes, progress

    def begun(self, owner: str) -> list[tuple[str, bool]]:
        """Returns `Collected.begun`, each once in a session."""
        found = self._owner(owner)
        begun, found.begun = found.begun, {}
        return list(begun.items())

    def has_news(self, owner: str, *, begun: bool = False) -> bool:
        """Returns whether `collect` would return something, or `begun`."""
        found = self._owners.get(owner)
        return found is not None and bool(found.ready or found.progress or (begun and found.begun))

    def acknowledge(self, owner: str, ids: Iterable[str]) -> None:
        for task in self._owned(owner, ids):
            if task.outcome is not None:
                self._remove(task)

    def cancel(self, owner: str, ids: Iterable[str]) -> None:
        for task in self._owned(owner, ids):
            self._remove(task)

    def _owned(self, owner: str, ids: Iterable[str]) -> Iterator[QueuedTask]:
        for each in ids:
            task = self._tasks.get(each)
            if task is not None and task.owner == owner:
                yield task

    def stop(self, owner: str, ids: Mapping[str, bool]) -> None:
        """Ends tasks early, some by force: waiting ones now, others when their worker hears it."""
        for task in self._owned(owner, ids):
            if task.outcome is not None:
                continue
            if task.lease is None:
                self._decide(task, TaskState.STOPPED)
            else:
                task.is_stopped = True
                task.is_killed |= ids[task.submission.id]

    def resume(self, owner: str, ids: Collection[str], awaited: Collection[str] = ()) -> list[str]:
        """Forgets all tasks of a model but these; returns those of them that are not here.

        Of these, `awaited` are sent again by the model, and wait until then.
        """
        wanted = set(ids)
        here = self._owner(owner).ids
        for each in [each for each in here if each not in wanted]:
            self._remove(self._tasks[each])
        self._awaited.update(awaited)
        for each in self._awaited.intersection(here).difference(awaited):
            self._awaited.discard(each)
            self._wait(self._tasks[each])
        return self.missing(owner, ids)

    def missing(self, owner: str, ids: Iterable[str]) -> list[str]:
        here = self._owner(owner).ids
        return [each for each in ids if each not in here]

    # Called for workers.

    def take(
        self,
        worker: Life,
        held: Collection[str],
        kinds: Collection[str],
        count: int,
        now: float,
        *,
        helps: bool = False,
        machine: WorkerMachine | None = None,
    ) -> list[Assignment]:
        """Leases tasks to a worker: the first ones for which its machine has room.

        Resources are reserved for the first task that waits for room there; later ones get the
        rest. Tasks leased to it that are not among `held` have never arrived. Without a machine,
        it gets no tasks that need resources. A worker that `helps` is a broker.
        """
        known = self._life_of(worker, now)
        known.kinds, known.helps, known.machine = kinds, helps, machine
        if known.using and known.using[0] not in held:
            known.using = None
        for each in sorted(known.held.difference(held)):
            self._return(self._tasks[each])
        return [
            self._lend(task, worker, os.urandom(16).hex(), now) for task in self._next(known, count)
        ]

    def has_work(self, kinds: Collection[str]) -> bool:
        return any(kind in kinds for kind, _ in self._waiting)

    def needs_room(self) -> bool:
        return any(needs != _NO_NEEDS for _, needs in self._waiting)

    def beat(
        self, worker: Life, held: Mapping[str, str], progress: Iterable[TaskProgress], now: float
    ) -> dict[str, bool]:
        """Renews the leases of `held`, tokens of tasks by id; returns tasks to stop, and whether by force."""
        known = self._workers.get(worker.name)
        if known is not None and known.life == worker.life:
            known.seen_at, known.is_restored = now, False
        stops = {
            each: (task := self._tasks.get(each)) is not None and task.is_killed
            for each, token in held.items()
            if self._is_over(each, worker, token, now)
        }
        for point in progress:
            running = self._tasks.get(point.id)
            if running is not None and running.outcome is None:
                waiting = self._owner(running.owner).progress
                waiting.append(point)
                del waiting[:-_MOST_PROGRESS]
        return stops

    def _is_over(self, key: str, worker: Life, token: str, now: float) -> bool:
        task = self._tasks.get(key)
        if task is not None and task.lease == (worker, token) and task.outcome is None:
            task.expires_at = now + self._lease_s
            return task.is_stopped
        if task is None and now - self._began_at < self._lease_s:
            # A broker without a store was started again, and its models will send their tasks again.
            self._claims[key] = worker, token
            return False
        return True

    def awaits(self, outcome: TaskOutcome) -> bool:
        """Returns whether an outcome would count."""
        task = self._tasks.get(outcome.id)
        if task is None or task.outcome is not None:
            return False
        is_current = task.lease is not None and task.lease[1] == outcome.token
        return outcome.state is TaskState.DONE or is_current  # else another worker has it by now

    def finish(self, outcome: TaskOutcome) -> bool:
        """Takes an outcome; returns whether it counts, because it is the first one of its task."""
        if not self.awaits(outcome):
            return False
        task = self._tasks[outcome.id]
        if outcome.state is TaskState.FAILED:
            self._fail(task, outcome)
        else:
            self._settle(task, outcome)
        return True

    def _fail(self, task: QueuedTask, outcome: TaskOutcome) -> None:
        """Queues a failed task again, or gives it up."""
        if not task.helps:
            task.errors += (outcome.text,)
            count, text = len(task.errors), outcome.text
            if count <= task.submission.retries:
                self._return(task)
                return
            if count > 1:
                text = f"it was run {count} times, and failed each time; the last one:\n{text}"
            attempts = outcome.attempts - 1  # the last one is among the errors
            outcome = outcome._replace(text=text, attempts=attempts)
        self._settle(task, outcome)

    def give_back(self, worker: Life, held: Mapping[str, str]) -> None:
        """Takes back tasks that a worker has not begun; their tokens by id."""
        for each, token in held.items():
            task = self._tasks.get(each)
            if task is not None and task.lease == (worker, token):
                self._return(task)

    def leave(self, worker: Life) -> None:
        known = self._workers.get(worker.name)
        if known is not None and known.life == worker.life:
            for each in sorted(known.held):
                self._return(self._tasks[each])
            del self._workers[worker.name]

    # The clock.

    def tick(self, now: float) -> None:
        """Ends leases and runs that are too long. Call it several times per `lease_s`."""
        gap_s, self._ticked_at = now - self._ticked_at, now
        if gap_s > self._lease_s / 2:  # this process stood still, and could hear of no worker
            for each in self._leased:
                self._tasks[each].expires_at = now + self._lease_s
            for worker in self._workers.values():
                worker.seen_at = now
        for each in sorted(self._leased):
            task = self._tasks[each]
            is_due = task.deadline_at is not None and task.deadline_at <= now
            # Live workers end tasks by themselves, except those in other languages.
            is_python = task.submission.kind == PYTHON
            if is_due and not (is_python and task.expires_at >= now + self._lease_s / 2):
                assert task.lease is not None
                text = f"it ran longer than timeout_s={task.submission.limits.timeout_s:g}"
                outcome = TaskOutcome(
                    each, "", TaskState.FAILED, text=text, worker=task.lease[0].name
                )
                self._fail(task, outcome)
            elif task.expires_at <= now:
                self._lose(task, f"was not heard of for {self._lease_s:g} s")
        for name in [
            name
            for name, worker in self._workers.items()
            if worker.seen_at + 2 * self._lease_s <= now and not worker.held
        ]:
            del self._workers[name]
        if now - self._began_at > 2 * self._lease_s:
            self._claims.clear()
        for name in [name for name, owner in self._owners.items() if not owner.ids]:
            del self._owners[name]

    # Other brokers.

    def adopt(self, owner: str, assignments: Sequence[Assignment]) -> None:
        """Takes tasks of another broker, to help it. The owner has stored them; this one does not."""
        for each in assignments:
            if each.id not in self._tasks:
                submission = TaskSubmission(each.id, each.payload, each.kind, limits=each.limits)
                task = QueuedTask(submission, owner, next(self._numbers), helps=True)
                self._keep(task)
                self._push(task)

    def waiting(self, owner: str) -> list[str]:
        owned = self._owner(owner).ids
        return [each for each in owned if self._is_waiting(self._tasks[each])]

    def inherit(self, tasks: Iterable[QueuedTask], now: float) -> None:
        """Takes over tasks of a broker that is lost.

        Their workers report to that broker, not to this one: the tasks wait again.
        """
        for task in sorted(tasks, key=lambda task: task.number):
            outcome, task.outcome, task.lease = task.outcome, None, None
            if outcome is not None:
                task.errors, task.losses = (), 0  # it counts them
            known = self._tasks.get(task.submission.id)
            if known is None:
                known, task.number = task, next(self._numbers)
                self._add(task, now)
            elif known.helps:
                known.errors = task.errors
                if known.outcome is not None:  # it counts the runs here
                    attempts = known.outcome.attempts + len(task.errors)
                    known.outcome = known.outcome._replace(attempts=attempts)
                self._own(known, task.owner, task.submission, now)
            if outcome is not None and known.outcome is None:
                self._settle(known, outcome)

    # How busy it is.

    def load(self, now: float) -> Load:
        """Returns how busy it is; tasks of others count as running."""
        workers = [
            worker
            for worker in self._workers.values()
            if not worker.helps and worker.seen_at + 2 * self._lease_s > now
        ]
        idle = sum(not worker.held for worker in workers)
        return Load(self._queued, len(self._leased), len(workers), idle)

    def unknown_kinds(self) -> list[str]:
        """Returns the kinds of waiting tasks that none of its workers takes, with what they need."""
        found = []
        for kind, needs in self._waiting:
            fit = (
                kind in each.kinds and could_run(each.machine, needs)
                for each in self._workers.values()
            )
            if not any(fit):
                named = [f"{name}={each:g}" for name, each in needs._asdict().items() if each]
                found.append(f"{kind} with {', '.join(named)}" if named else kind)
        return sorted(found)

    # Workers that come and go.

    def _life_of(self, worker: Life, now: float) -> _WorkerRecord:
        """Returns the record of this life of a worker, which is there now."""
        known = self._workers.get(worker.name)
        if known is not None and known.life != worker.life:
            for each in sorted(known.held):
                self._lose(self._tasks[each], "was started again")
            known = None
        if known is None:
            known = self._workers[worker.name] = _WorkerRecord(worker.life, now)
        known.seen_at, known.is_restored = now, False
        return known

    def _next(self, worker: _WorkerRecord, count: int) -> list[QueuedTask]:
        found: list[QueuedTask] = []
        size = 0
        while len(found) < count and (first := self._first(worker)) is not None:
            task, place = first
            if worker.helps and task.helps:
                break  # a helper gets no help
            if found and (task.losses or found[0].losses):
                break  # it may be what ends workers: no other task is to end with it
            if found and (place[0] or found[0].place[0]):
                break  # it would use its part of the machine while it waits
            size += len(task.submission.payload)
            if found and size > MOST_BYTES:
                break
            self._wait_no_more(task)
            self._queued -= not task.helps
            self._leased.add(task.submission.id)
            task.place = place
            if place[0]:
                worker.using = task.submission.id, (task.submission.limits, place[1])
            found.append(task)
        return found

    def _first(
        self, worker: _WorkerRecord
    ) -> tuple[QueuedTask, tuple[str, tuple[str, ...]]] | None:
        """Returns the first task that a worker can run now, and where it is to run."""
        machine = worker.machine
        heads = [
            (entries[0], needs)
            for (kind, needs), entries in self._waiting.items()
            if kind in worker.kinds
        ]
        heads.sort(key=lambda each: each[0])
        used: list[Use] | None = None
        is_kept = False
        for (_, _, key), needs in heads:
            if needs == _NO_NEEDS:
                return self._tasks[key], _NOWHERE
            if machine is None or not could_run(machine, needs):
                continue
            if used is None:
                used = [
                    each.using[1]
                    for each in self._workers.values()
                    if each.using and each.machine and each.machine.name == machine.name
                ]
            devices = room(machine, needs, used)
            if devices is not None and self._is_best(worker, devices):
                return self._tasks[key], (machine.name, devices)
            if not is_kept:
                is_kept = True
                used.append(kept_for(machine, needs, used))
        return None

    def _is_best(self, worker: _WorkerRecord, devices: tuple[str, ...]) -> bool:
        """Returns whether no worker that waits there is better: one that sees others has to start again."""
        assert worker.machine is not None
        if not devices or worker.machine.pinned in ((), devices):
            return True
        others = [each.machine for each in self._workers.values() if not each.held and each.machine]
        return not any(
            each.name == worker.machine.name and each.pinned in ((), devices) for each in others
        )

    def _lend(self, task: QueuedTask, worker: Life, token: str, now: float) -> Assignment:
        key, payload, kind, _, _, limits = task.submission
        task.lease = worker, token
        self._time(task, now)
        self._leased.add(key)
        known = self._workers.setdefault(worker.name, _WorkerRecord(worker.life, now))
        known.held.add(key)
        self._owner(task.owner).begun[key] = True
        self._note(task)
        return Assignment(key, token, kind, payload, limits, task.place[1])

    def _time(self, task: QueuedTask, now: float) -> None:
        """Begins the lease of a task; it is longer if the task takes longer to arrive."""
        arrives_at = now + transfer_s([task.submission])
        task.expires_at = arrives_at + self._lease_s
        limit_s = task.submission.limits.timeout_s
        task.deadline_at = None if limit_s is None else arrives_at + limit_s

    def _lose(self, task: QueuedTask, why: str) -> None:
        assert task.lease is not None
        worker = self._workers.get(task.lease[0].name)
        # Tasks are not to blame for the end of a broker: this one with its workers, or a helper.
        if worker is None or not (worker.helps or worker.is_restored):
            task.losses += 1
        if task.losses > self._max_losses:
            text = f"it has lost {task.losses} workers; the last one, {task.lease[0].name}, {why}"
            self._decide(task, TaskState.FAILED, text)
        else:
            self._return(task)

    # The states of a task.

    def _push(self, task: QueuedTask) -> None:
        self._queued += not task.helps
        self._wait(task)

    def _wait(self, task: QueuedTask) -> None:
        """Puts a task into its lane, if it is to be there."""
        if task.submission.id not in self._awaited and self._is_waiting(task):
            lane, entry = _lane_of(task)
            entries = self._waiting.setdefault(lane, [])
            index = bisect.bisect_left(entries, entry)
            if entries[index : index + 1] != [entry]:
                entries.insert(index, entry)

    def _wait_no_more(self, task: QueuedTask) -> None:
        """Takes a task out of its lane, if it is there."""
        lane, entry = _lane_of(task)
        entries = self._waiting.get(lane, [])
        index = bisect.bisect_left(entries, entry)
        if entries[index : index + 1] == [entry]:
            del entries[index]
            if not entries:
                del self._waiting[lane]

    def _is_waiting(self, task: QueuedTask) -> bool:
        return task.outcome is None and task.submission.id not in self._leased

    def _release(self, task: QueuedTask) -> None:
        """Ends the lease of a task, or removes it from its lane."""
        if task.lease is not None:
            worker = self._workers.get(task.lease[0].name)
            if worker is not None:
                worker.held.discard(task.submission.id)
            self._leased.discard(task.submission.id)
            task.lease = None
        elif task.outcome is None:
            self._wait_no_more(task)
            self._queued -= not task.helps

    def _return(self, task: QueuedTask) -> None:
        """Queues a task of a worker again."""
        if task.is_stopped:
            self._decide(task, TaskState.STOPPED)
            return
        self._release(task)
        self._push(task)
        self._owner(task.owner).begun[task.submission.id] = False
        self._note(task)

    def _decide(self, task: QueuedTask, state: TaskState, text: str = "") -> None:
        self._settle(task, TaskOutcome(task.submission.id, "", state, text=text, attempts=0))

    def _settle(self, task: QueuedTask, outcome: TaskOutcome) -> None:
        self._release(task)
        if task.losses or task.errors:
            outcome = outcome._replace(
                attempts=outcome.attempts + task.losses + len(task.errors),
                lost_workers=outcome.lost_workers + task.losses,
            )
        task.outcome = outcome
        owner = self._owner(task.owner)
        owner.ready[outcome.id] = None
        owner.begun.pop(outcome.id, None)
        self._note(task)

    def _remove(self, task: QueuedTask) -> None:
        key = task.submission.id
        self._release(task)
        self._awaited.discard(key)
        del self._tasks[key]
        owner = self._owner(task.owner)
        for each in (owner.ids, owner.ready, owner.begun):
            each.pop(key, None)
        self._note(task)

    def _owner(self, name: str) -> _Owner:
        return self._owners.setdefault(name, _Owner())


def _lane_of(task: QueuedTask) -> tuple[_Lane, tuple[float, int, str]]:
    """Returns the lane of a task, and its entry there."""
    key, _, kind, priority, _, limits = task.submission
    return (kind, Limits(None, None, *limits.needs)), (-priority, task.number, key)
