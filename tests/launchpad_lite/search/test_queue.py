"""The queue of a broker, with the outbox of a model: any order of calls, losses and restarts.

Then the rules of the queue, one by one.
"""

import itertools
import math
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

import courier
from launchpad_lite.search import _outbox
from launchpad_lite.search._messages import (
    MOST_BYTES,
    Assignment,
    Collected,
    Life,
    Limits,
    Load,
    MembersView,
    TaskOutcome,
    TaskProgress,
    TaskState,
    TaskSubmission,
    WorkerMachine,
)
from launchpad_lite.search._outbox import Outbox
from launchpad_lite.search._queue import Queue, QueuedTask
from launchpad_lite.search._timing import Timing

LEASE_S = 10.0
MAX_LOSSES = 2
MAX_QUEUED = 6
KINDS = ("python", "rust")
T = TypeVar("T")


@dataclass
class Process:
    """A worker as it really is."""

    who: Life
    #: Tokens of what it has, by id, and when its lease was renewed last.
    held: dict[str, str] = field(default_factory=dict)
    renewed_at: dict[str, float] = field(default_factory=dict)
    outcomes: list[TaskOutcome] = field(default_factory=list)
    #: Tasks that may be run elsewhere, because a broker was lost.
    orphans: set[str] = field(default_factory=set)

    def unbegun(self) -> list[str]:
        return [key for key in self.held if key not in {each.id for each in self.outcomes}]


class World:
    """A model, a broker, another one that helps it, and their workers; what they do is drawn."""

    def __init__(self, seed: int, *, stores: bool) -> None:
        self.random = random.Random(seed)
        self.stores = stores
        #: Whether no call fails.
        self.is_calm = False
        self.now = 0.0
        self.lives = itertools.count()
        self.rows: dict[str, QueuedTask] = {}
        self.queue, self.broker_life = self.empty(), 0
        self.workers = [Process(self.life(f"worker[{index}]")) for index in range(3)]
        # The model.
        self.numbers = itertools.count()
        self.submissions: dict[str, TaskSubmission] = {}
        self.sent_at: dict[str, float] = {}
        #: Outstanding tasks that the broker has accepted, as the model knows.
        self.accepted: set[str] = set()
        self.ended: dict[str, TaskOutcome] = {}
        self.kept: list[str] = []
        self.outbox = Outbox(self.presence())
        #: Outstanding tasks, those that have ended, and the broker.
        self.checkpoint: tuple[dict[str, TaskSubmission], dict[str, TaskOutcome], str] = {}, {}, ""
        # Its helper.
        self.helper, self.helper_life = self.empty(), self.life("helper")
        self.tokens: dict[str, str] = {}
        self.renewed_at: dict[str, float] = {}
        self.unhanded: list[TaskOutcome] = []
        self.helper_worker = Process(self.life("helper-worker"))
        # What is known from outside.
        self.sent: list[TaskOutcome] = []
        self.failures: dict[str, int] = {}
        self.stopped: set[str] = set()
        #: Tasks with a result; and those of them whose workers know that it was taken.
        self.counted: set[str] = set()
        self.finished: set[str] = set()

    def empty(self) -> Queue:
        return Queue(lease_s=LEASE_S, max_losses=MAX_LOSSES, max_queued=MAX_QUEUED)

    def life(self, name: str) -> Life:
        return Life(name, str(next(self.lives)))

    # How the broker is called.

    def call(self, function: Callable[[], T]) -> T | None:
        """Calls the broker; None: it ended before it had stored anything, or its answer was lost."""
        answer = function()
        fate = 0.0 if self.is_calm else self.random.random()
        if fate > 0.8:
            self.restart()
            return None
        self.write()
        return answer if fate < 0.6 else None

    def write(self) -> None:
        changes = self.queue.take_changes().copy()
        assert not {each.submission.id for each in changes.new} & set(changes.removed)
        self.rows.update({each.submission.id: each for each in changes.new})
        for each in changes.changed:
            assert each.submission == self.rows[each.submission.id].submission
            self.rows[each.submission.id] = each
        for key in changes.removed:
            self.rows.pop(key, None)

    def restart(self) -> None:
        self.queue = self.empty()
        self.broker_life += 1
        if not self.stores:
            self.rows = {}
            self.counted.clear()
            self.finished.clear()
            self.failures.clear()
            for each in (*self.workers, self.helper_worker):
                each.orphans.update(each.held)
            self.helper_worker.orphans.update(self.tokens)
        self.queue.restore([replace(each) for each in self.rows.values()], self.now)

    def finish(self, outcome: TaskOutcome) -> None:
        self.sent.append(outcome)
        counts = self.queue.finish(outcome)
        if counts and outcome.state is TaskState.DONE:
            self.counted.add(outcome.id)
        if counts and outcome.state is TaskState.FAILED:
            self.failures[outcome.id] = self.failures.get(outcome.id, 0) + 1

    # The model.

    def presence(self) -> Any:
        return types.SimpleNamespace(
            timing=Timing(patience_s=math.inf),  # else it would give up what was accepted
            member=types.SimpleNamespace(who=types.SimpleNamespace(name="model")),
            view=MembersView(True, {"broker": ("", Load())}),
            choose=lambda avoid: "broker",
            client=lambda name: {"broker": Door(self)}[name],
            beat=lambda broker: True,
        )

    def ask(self, priority: float, retries: int, timeout_s: float | None, kind: str) -> None:
        key = str(next(self.numbers))
        submission = TaskSubmission(key, b"payload", kind, priority, retries, Limits(timeout_s))
        self.submissions[key] = submission
        self.outbox.add([submission])

    def collect(self) -> None:
        outstanding = list(self.outbox.outstanding)
        if outstanding and not self.is_calm and self.random.random() < 0.1:
            key = self.random.choice(outstanding)
            self.outbox.stop([key], kill=int(key) % 2 == 1)
            self.stopped.add(key)
        for outcome in self.outbox.collect(0.0)[0]:
            self.accept(outcome)

    def accept(self, outcome: TaskOutcome) -> None:
        assert outcome.id not in self.ended, "accepted twice"
        self.ended[outcome.id] = outcome
        self.kept.append(outcome.id)
        self.accepted.discard(outcome.id)
        submission = self.submissions[outcome.id]
        if outcome.state is TaskState.STOPPED:
            # Without a store, it may have been stopped because nobody knew it.
            assert outcome.id in self.stopped or not self.stores
        elif outcome.state is TaskState.FAILED and self.stores:
            assert (
                self.failures.get(outcome.id, 0) > submission.retries
                or f"lost {MAX_LOSSES + 1} workers" in outcome.text
                or self.is_late(submission)  # which counts as one of its failures
            )

    def is_late(self, submission: TaskSubmission) -> bool:
        limit_s = submission.limits.timeout_s
        return limit_s is not None and self.now >= self.sent_at[submission.id] + limit_s

    def cancel(self) -> None:
        if outstanding := list(self.outbox.outstanding):
            key = self.random.choice(outstanding)
            self.accepted.discard(key)
            self.checkpoint[0].pop(key, None)
            self.outbox.cancel([key])

    def save(self) -> None:
        self.checkpoint = self.outbox.outstanding, dict(self.ended), self.outbox.broker
        self.outbox.acknowledge(self.kept)
        self.kept = []

    def restart_model(self) -> None:
        outstanding, ended, broker = self.checkpoint
        self.ended, self.kept = dict(ended), []
        self.accepted.intersection_update(outstanding)
        self.outbox = Outbox(self.presence(), outstanding, broker)

    # The workers.

    def work(self, index: int, count: int) -> None:
        worker = self.workers[index]
        sent = list(worker.outcomes)
        held = worker.unbegun()

        def answer() -> list[Assignment]:
            for outcome in sent:
                self.finish(outcome)
            return self.queue.take(worker.who, held, KINDS[: 1 + index], count, self.now)

        found = self.call(answer)
        if found is None:
            return
        self.note_sent(worker, sent)
        self.receive(worker, found)

    def note_sent(self, worker: Process, sent: list[TaskOutcome]) -> None:
        worker.outcomes = [each for each in worker.outcomes if each not in sent]
        for each in sent:
            worker.held.pop(each.id, None)
        self.finished.update({each.id for each in sent} & self.counted)

    def receive(self, worker: Process, found: list[Assignment]) -> None:
        for each in found:
            worker.held[each.id], worker.renewed_at[each.id] = each.token, self.now
            if worker is self.helper_worker and self.is_lost_to_helper(each.id):
                continue
            assert each.id not in self.finished, f"{each.id} has an outcome"
            for other in (*self.workers, self.helper_worker):
                if other is not worker:
                    self.check_that_it_is_lost(other, each.id)
            worker.orphans.discard(each.id)

    def is_lost_to_helper(self, key: str) -> bool:
        """Whether the broker was not heard of, or did not hear of its helper, for the time of a lease."""
        renewed_at = self.renewed_at.get(key, -math.inf)
        return key in self.helper_worker.orphans or self.now - renewed_at >= LEASE_S

    def check_that_it_is_lost(self, other: Process, key: str) -> None:
        if key not in other.unbegun() or key in other.orphans:
            return
        silent_s = self.now - other.renewed_at[key]
        if other is self.helper_worker:
            silent_s = max(silent_s, self.now - self.renewed_at.get(key, -math.inf))
        # One that has run too long is run again, though its worker may still be stuck in it.
        assert silent_s >= LEASE_S or self.is_late(self.submissions[key]), f"{key} is run twice"

    def run_one(self, index: int, state: TaskState) -> None:
        worker = [*self.workers, self.helper_worker][index]
        for key in worker.unbegun()[:1]:
            worker.outcomes.append(TaskOutcome(key, worker.held[key], state, b"result", "raised"))

    def beat(self, index: int) -> None:
        worker = self.workers[index]
        tokens = dict(worker.held)
        progress = [TaskProgress(key, 1, 1.0) for key in tokens]
        stops = self.call(lambda: self.queue.beat(worker.who, tokens, progress, self.now))
        if stops is not None:
            worker.renewed_at.update(dict.fromkeys(tokens.keys() - stops.keys(), self.now))
        for key in stops or ():
            if key in worker.unbegun():
                worker.outcomes.append(TaskOutcome(key, worker.held[key], TaskState.STOPPED))

    def give_back(self, index: int) -> None:
        worker = self.workers[index]
        stuck = {key: worker.held.pop(key) for key in worker.unbegun()[1:]}
        self.call(lambda: self.queue.give_back(worker.who, stuck))

    def restart_worker(self, index: int, leaves: bool) -> None:
        worker = [*self.workers, self.helper_worker][index]
        queue = self.helper if worker is self.helper_worker else self.queue
        if leaves:
            for outcome in worker.outcomes:
                if queue is self.queue:
                    self.finish(outcome)
                else:
                    queue.finish(outcome)
            queue.leave(worker.who)
            self.write()
            self.finished.update({each.id for each in worker.outcomes} & self.counted)
        # What its broker has of a life without a store, it may yet give to the next life.
        orphans = worker.orphans & self.tokens.keys()
        worker.__init__(self.life(worker.who.name))  # type: ignore[misc]
        worker.orphans = orphans if worker is self.helper_worker else set()

    def deliver_late(self) -> None:
        if self.sent:
            self.finish(self.random.choice(self.sent))
            self.write()

    # The helper.

    def help(self, count: int) -> None:
        outcomes, _ = self.helper.collect("broker", "")
        self.unhanded += outcomes
        sent = [each._replace(token=self.tokens.get(each.id, "")) for each in self.unhanded]
        held = [key for key in self.tokens if key not in {each.id for each in sent}]

        def answer() -> list[Assignment]:
            for outcome in sent:
                self.finish(outcome)
            return self.queue.take(self.helper_life, held, KINDS, count, self.now, helps=True)

        found = self.call(answer)
        if found is None:
            return
        self.unhanded = []
        self.helper.acknowledge("broker", [each.id for each in sent])
        for each in sent:
            self.tokens.pop(each.id, None)
        self.finished.update({each.id for each in sent} & self.counted)
        self.tokens.update({each.id: each.token for each in found})
        self.renewed_at.update(dict.fromkeys([each.id for each in found], self.now))
        self.helper.adopt("broker", found)

    def help_beat(self) -> None:
        tokens = dict(self.tokens)
        stops = self.call(lambda: self.queue.beat(self.helper_life, tokens, (), self.now))
        if stops is not None:
            self.renewed_at.update(dict.fromkeys(tokens.keys() - stops.keys(), self.now))
            self.helper.stop("broker", stops)

    def help_no_more(self) -> None:
        waiting = self.helper.waiting("broker")
        stuck = {key: self.tokens.pop(key) for key in waiting}
        self.helper.cancel("broker", waiting)
        self.call(lambda: self.queue.give_back(self.helper_life, stuck))

    def work_for_helper(self, count: int) -> None:
        worker = self.helper_worker
        sent, held = list(worker.outcomes), worker.unbegun()
        for outcome in sent:
            self.helper.finish(outcome)
        found = self.helper.take(worker.who, held, KINDS, count, self.now)
        worker.outcomes = []
        for each in sent:
            worker.held.pop(each.id, None)
        self.receive(worker, found)
        stops = self.helper.beat(worker.who, worker.held, (), self.now)
        worker.renewed_at.update(dict.fromkeys(worker.held.keys() - stops.keys(), self.now))

    def restart_helper(self) -> None:
        self.helper, self.helper_life = self.empty(), self.life("helper")
        self.tokens, self.unhanded = {}, []
        self.helper_worker.orphans.update(self.helper_worker.held)

    # Time.

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.queue.tick(self.now)
        self.helper.tick(self.now)
        self.write()

    def stand_still(self, seconds: float) -> None:
        """The brokers were not run for some time: no worker is lost by that."""
        ends = [each.losses for each in self.queue._tasks.values()]
        self.now += seconds
        self.queue.tick(self.now)
        self.helper.tick(self.now)
        assert [each.losses for each in self.queue._tasks.values()] == ends
        self.write()

    # What is always true.

    def nothing_is_lost(self) -> None:
        if self.stores:
            assert self.accepted <= set(self.queue._tasks)

    def numbers_are_right(self) -> None:
        for queue in (self.queue, self.helper):
            leased = [each for each in queue._tasks.values() if each.lease is not None]
            queued = [
                each
                for each in queue._tasks.values()
                if each.lease is None and each.outcome is None and not each.helps
            ]
            load = queue.load(self.now)
            assert (load.queued, load.running) == (len(queued), len(leased))

    def the_store_has_what_the_broker_has(self) -> None:
        self.write()
        kept = {key: stored(each) for key, each in self.queue._tasks.items()}
        assert {key: stored(each) for key, each in self.rows.items()} == kept

    def check(self) -> None:
        self.nothing_is_lost()
        self.numbers_are_right()
        self.the_store_has_what_the_broker_has()

    def end(self) -> None:
        """All ends, and leaves nothing."""
        self.is_calm = True
        ids = list(self.outbox.outstanding)
        for _ in range(300):
            self.go_on()
            if not self.outbox.outstanding:
                break
        assert not self.outbox.outstanding
        assert set(ids) <= set(self.ended)
        self.save()
        for _ in range(40):
            self.go_on()
        for queue in (self.queue, self.helper):
            assert not queue._tasks
            assert not queue._owners
            assert not queue._claims
            assert not queue._waiting
        assert not self.rows

    def go_on(self) -> None:
        self.outbox.send()
        for index in range(3):
            self.work(index, 2)
            self.beat(index)
            self.run_one(index, TaskState.DONE)
        self.help_no_more()
        self.work_for_helper(1)
        self.run_one(3, TaskState.DONE)
        self.help(0)
        self.help_beat()
        self.collect()
        self.tick(1.0)
        self.check()


class Door:
    """The broker, as its model calls it: the request or the answer may be lost."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _reach(self, function: Callable[[], T]) -> T:
        answer = self._world.call(function)
        if answer is None:
            raise courier.ServerLostError("broker")
        return answer

    def submit(self, model: str, part: Sequence[TaskSubmission]) -> int:
        world = self._world
        room = MAX_QUEUED - world.queue.load(world.now).queued
        new = [each for each in part if each.id not in world.queue._tasks]
        for each in part:
            world.sent_at.setdefault(each.id, world.now)
        count = self._reach(lambda: world.queue.submit(model, part, world.now))
        assert count == len(part) or room <= len(new)
        world.accepted.update(each.id for each in part[:count])
        return count

    def resume(
        self, model: str, ids: Sequence[str], awaited: Sequence[str] = ()
    ) -> tuple[str, list[str]]:
        world, life = self._world, str(self._world.broker_life)
        world.accepted.intersection_update(ids)  # it forgets the others
        missing = self._reach(lambda: world.queue.resume(model, ids, awaited))
        assert not (world.stores and world.accepted.intersection(missing)), "lost"
        world.accepted = set(world.outbox.outstanding).intersection(ids).difference(missing)
        return life, missing

    def cancel(self, model: str, ids: Sequence[str]) -> None:
        self._reach(lambda: (self._world.queue.cancel(model, ids), True))

    def collect(
        self,
        model: str,
        session: str,
        acknowledged: Sequence[str],
        stopped: dict[str, bool],
        wait_s: float,
    ) -> Collected:
        world = self._world

        def answer() -> Collected:
            world.queue.acknowledge(model, acknowledged)
            world.queue.stop(model, stopped)
            outcomes, progress = world.queue.collect(model, session)
            begun, load = world.queue.begun(model), world.queue.load(world.now)
            return Collected(str(world.broker_life), outcomes, progress, load, (), begun)

        return self._reach(answer)


def stored(task: QueuedTask) -> QueuedTask:
    return replace(task, expires_at=0.0, deadline_at=None, is_stopped=False, is_killed=False)


#: What may happen, and how often it does, in relation to the others.
STEPS: list[tuple[float, Callable[[World, random.Random], object]]] = [
    (
        1,
        lambda world, draw: world.ask(
            draw.choice([0.0, 1.0]),
            draw.randint(0, 2),
            draw.choice([None, None, 25.0]),
            draw.choice(KINDS),
        ),
    ),
    (2, lambda world, _: world.outbox.send()),
    (1, lambda world, _: world.collect()),
    (0.2, lambda world, _: world.cancel()),
    (0.5, lambda world, _: world.save()),
    (0.1, lambda world, _: world.restart_model()),
    (3, lambda world, draw: world.work(draw.randint(0, 2), draw.randint(0, 3))),
    (
        1.5,
        lambda world, draw: world.run_one(
            draw.randint(0, 3), draw.choice([TaskState.DONE, TaskState.DONE, TaskState.FAILED])
        ),
    ),
    (2, lambda world, draw: world.beat(draw.randint(0, 2))),
    (0.5, lambda world, draw: world.give_back(draw.randint(0, 2))),
    (0.3, lambda world, draw: world.restart_worker(draw.randint(0, 3), draw.random() < 0.5)),
    (1, lambda world, _: world.deliver_late()),
    (1, lambda world, draw: world.help(draw.randint(0, 3))),
    (1, lambda world, _: world.help_beat()),
    (0.5, lambda world, _: world.help_no_more()),
    (1, lambda world, draw: world.work_for_helper(draw.randint(0, 3))),
    (0.2, lambda world, _: world.restart_helper()),
    (1, lambda world, draw: world.tick(draw.choice([0.5, 2.0, 4.0]))),
    (0.2, lambda world, draw: world.stand_still(draw.choice([6.0, 12.0, 1000.0]))),
    (0.2, lambda world, _: world.restart()),
]


def check(seed: int, *, stores: bool) -> None:
    with pytest.MonkeyPatch.context() as monkey:
        world = World(seed, stores=stores)
        clock = types.SimpleNamespace(monotonic=lambda: world.now, sleep=lambda _: None)
        monkey.setattr(_outbox, "time", clock)
        monkey.setattr(courier, "with_timeout", lambda client, _: client)
        weights, steps = zip(*STEPS, strict=True)
        for step in world.random.choices(steps, weights, k=150):
            step(world, world.random)
            world.check()
        world.end()


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(
    "seeds",
    [
        range(20),
        *[pytest.param(range(n, n + 200), marks=pytest.mark.slow) for n in range(0, 800, 200)],
    ],
    ids=str,
)
def test_each_task_has_one_outcome_whatever_happens(seeds: range, stores: bool) -> None:
    for seed in seeds:
        check(seed, stores=stores)


# The rules one by one.

MODEL = "model"
WORKER, OTHER, HELPER = Life("worker[0]", "a"), Life("worker[1]", "b"), Life("broker[1]", "c")
ANY = ("python",)


def make_queue(**options: Any) -> Queue:
    queue = Queue(lease_s=LEASE_S, **options)
    queue.restore((), 0.0)
    return queue


def restarted(queue: Queue, now: float = 0.0, **options: Any) -> Queue:
    """Returns one that begins with what the earlier one has stored."""
    again = Queue(lease_s=LEASE_S, **options)
    again.restore([stored(each) for each in queue.take_changes().new], now)
    return again


def ask(queue: Queue, *keys: str, now: float = 0.0, owner: str = MODEL, **options: Any) -> int:
    return queue.submit(owner, [TaskSubmission(key, b"", **options) for key in keys], now)


def take(
    queue: Queue, worker: Life = WORKER, count: int = 1, held: tuple[str, ...] = ()
) -> list[Assignment]:
    return queue.take(worker, held, ANY, count, 0.0, helps=worker is HELPER)


def done(each: Assignment) -> TaskOutcome:
    return TaskOutcome(each.id, each.token, TaskState.DONE, b"result")


def states(queue: Queue) -> dict[str, TaskState]:
    session = str(random.random())
    return {each.id: each.state for each in queue.collect(MODEL, session)[0]}


def test_a_task_that_is_cancelled_when_it_has_ended_is_not_collected() -> None:
    queue = make_queue()
    assert queue.collect(MODEL, "session")[0] == []
    ask(queue, "1")
    queue.finish(done(*take(queue)))
    queue.cancel(MODEL, ["1"])
    assert queue.collect(MODEL, "session")[0] == []


def test_only_as_many_tasks_are_accepted_as_there_is_room_for() -> None:
    queue = make_queue(max_queued=2)
    assert ask(queue, "1", "2", "3") == 2
    assert ask(queue, "1", "2", "3") == 2, "those that it has count"
    take(queue)
    assert ask(queue, "3", "4") == 1


def test_tasks_go_by_priority_and_then_by_age_whatever_their_kinds() -> None:
    queue = make_queue()
    ask(queue, "low", priority=-1.0)
    ask(queue, "first")
    ask(queue, "rust", kind="rust")
    ask(queue, "high", priority=1.0)
    found = queue.take(WORKER, (), KINDS, 9, 0.0)
    assert [each.id for each in found] == ["high", "first", "rust", "low"]


def test_a_kind_that_no_worker_takes_is_named() -> None:
    queue = make_queue()
    ask(queue, "1", kind="rust")
    take(queue)
    assert queue.unknown_kinds() == ["rust"]
    queue.take(OTHER, (), ("rust",), 0, 0.0)
    assert queue.unknown_kinds() == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_task_that_raises_is_run_as_often_as_it_may(retries: int) -> None:
    queue = make_queue()
    ask(queue, "1", retries=retries)
    for _ in range(retries + 1):
        (each,) = take(queue)
        assert queue.finish(TaskOutcome("1", each.token, TaskState.FAILED, b"report", "ValueError"))
    (outcome,) = queue.collect(MODEL, "")[0]
    assert (outcome.state, outcome.payload) == (TaskState.FAILED, b"report")
    assert ("failed each time" in outcome.text) == bool(retries)
    assert outcome.text.endswith("ValueError")


def test_a_task_that_ends_its_workers_is_set_aside_and_takes_no_other_along() -> None:
    queue = make_queue(max_losses=2)
    ask(queue, *map(str, range(8)))
    for life in range(100):
        worker = Life("worker[0]", str(life))
        batch = take(queue, worker, 4)
        if not batch:
            break
        for each in batch:
            if each.id == "0":
                break  # that ends the worker
            queue.finish(done(each))
    found = {each.id: each for each in queue.collect(MODEL, "")[0]}
    assert [key for key, each in found.items() if each.state is TaskState.FAILED] == ["0"]
    assert len(found) == 8
    assert "has lost 3 workers; the last one, worker[0], was started again" in found["0"].text


def test_the_end_of_a_helper_is_no_fault_of_its_tasks() -> None:
    queue = make_queue(max_losses=0)
    ask(queue, "1")
    take(queue, HELPER)
    queue.tick(4.0)
    queue.tick(8.0)
    queue.tick(12.0)
    assert take(queue)
    assert not states(queue)


def test_a_worker_that_ends_with_its_broker_is_no_fault_of_its_tasks() -> None:
    queue = make_queue(max_losses=0)
    ask(queue, "1")
    take(queue)
    again = restarted(queue, max_losses=0)
    again.resume(MODEL, ["1"])
    assert take(again, Life(WORKER.name, "second"))
    assert not states(again)
    take(again, Life(WORKER.name, "third"))
    assert states(again) == {"1": TaskState.FAILED}


@pytest.mark.parametrize("how", ["given back", "lost", "left", "raised"])
def test_a_stopped_task_is_not_run_again(how: str) -> None:
    queue = make_queue()
    ask(queue, "1", retries=3)
    (each,) = take(queue)
    queue.stop(MODEL, {"1": False})
    assert [*queue.beat(WORKER, {"1": each.token}, (), 0.0)] == ["1"]
    if how == "given back":
        queue.give_back(WORKER, {"1": each.token})
    elif how == "lost":
        take(queue, Life(WORKER.name, "another"))
    elif how == "left":
        queue.leave(WORKER)
    else:
        queue.finish(TaskOutcome("1", each.token, TaskState.FAILED, text="while it ended"))
    assert states(queue) == {"1": TaskState.STOPPED}


def test_a_task_that_runs_too_long_fails_and_those_that_wait_have_their_time() -> None:
    queue = make_queue()
    ask(queue, "runs", "waits", limits=Limits(3.0))
    (each,) = take(queue)
    queue.tick(2.9)
    queue.tick(4.9)
    assert not states(queue)
    queue.tick(5.1)
    assert states(queue) == {"runs": TaskState.FAILED}
    assert queue.beat(WORKER, {each.id: each.token}, (), 5.1) == {each.id: False}
    assert not queue.finish(done(each)), "it is too late"


def test_a_timeout_is_a_failure_that_retries_repeat() -> None:
    queue = make_queue()
    ask(queue, "1", limits=Limits(3.0), retries=1, kind="js")
    for begun_at in (0.0, 3.0):
        assert queue.take(WORKER, ["1"] if begun_at else (), ["js"], 1, begun_at)
        queue.tick(begun_at + 2.9)
        assert not states(queue)
        queue.tick(begun_at + 3.0)
    (outcome,) = queue.collect(MODEL, "")[0]
    assert (outcome.state, outcome.attempts, outcome.worker) == (TaskState.FAILED, 2, WORKER.name)


def test_a_worker_that_is_heard_of_ends_its_task_at_its_limits_by_itself() -> None:
    queue = make_queue()
    ask(queue, "1", limits=Limits(3.0))
    (each,) = take(queue)
    for now in range(20):
        assert queue.beat(WORKER, {each.id: each.token}, (), float(now)) == {}
        queue.tick(float(now))
    assert not states(queue)


def test_a_task_is_ended_by_force_until_it_has_ended() -> None:
    queue = make_queue()
    ask(queue, "1", "2", retries=1)
    each, other = take(queue, count=2)
    queue.stop(MODEL, {"1": True, "2": False})
    queue.stop(MODEL, {"1": False})
    held = {each.id: each.token, other.id: other.token}
    assert queue.beat(WORKER, held, (), 0.0) == {"1": True, "2": False}
    queue.finish(TaskOutcome("1", each.token, TaskState.STOPPED))
    assert states(queue) == {"1": TaskState.STOPPED}


def test_a_stop_does_not_count_as_time_that_a_task_has_run() -> None:
    queue = make_queue()
    ask(queue, "1", limits=Limits(5.0))
    take(queue)
    again = restarted(queue, 86_400.0)
    again.tick(86_404.0)
    assert not states(again)
    again.tick(86_405.1)
    assert states(again) == {"1": TaskState.FAILED}


def test_a_large_task_has_time_to_arrive() -> None:
    queue = make_queue()
    queue.submit(MODEL, [TaskSubmission("large", bytes(64 << 20), limits=Limits(3.0))], 0.0)
    take(queue)
    for second in range(16):
        queue.tick(float(second))
    assert queue.load(15.0).running == 1
    queue.tick(19.0)
    queue.tick(21.1)
    assert states(queue) == {"large": TaskState.FAILED}


def test_the_outcome_of_a_lost_worker_counts_if_it_is_the_first() -> None:
    queue = make_queue()
    ask(queue, "1")
    (early,) = take(queue)
    queue.take(Life(WORKER.name, "another"), (), ANY, 0, 0.0)
    (late,) = take(queue, OTHER)
    assert queue.finish(done(early))
    assert not queue.finish(done(late))
    assert states(queue) == {"1": TaskState.DONE}


def test_restored_leases_outlive_a_slow_start() -> None:
    queue = make_queue()
    ask(queue, "1")
    (each,) = take(queue)
    again = restarted(queue)
    again.tick(60.0)
    assert [*again.beat(WORKER, {"1": each.token}, (), 60.0)] == []


def test_what_an_earlier_life_has_left_waits_until_its_model_has_the_newest_code_of_it() -> None:
    queue = make_queue()
    ask(queue, "kept", "changed", "run")
    take(queue, count=1)
    again = restarted(queue)
    assert again.load(0.0).queued == 2
    other = Life(WORKER.name, "second")  # the task of its first life waits as well
    assert not take(again, other, count=3)
    assert again.resume(MODEL, ["kept", "changed", "run"], ["changed"]) == []
    assert [each.id for each in take(again, other, count=3, held=())] == ["kept", "run"]
    again.submit(MODEL, [TaskSubmission("changed", b"newest")], 0.0)
    (found,) = take(again, Life("another", "life"))
    assert (found.id, found.payload) == ("changed", b"newest")
    (stored,) = [each for each in again.take_changes().new if each.submission.id == "changed"]
    assert stored.submission.payload == b"newest"


def test_workers_keep_what_a_broker_without_a_store_has_forgotten() -> None:
    queue = make_queue()
    assert [*queue.beat(WORKER, {"1": "token"}, (), 1.0)] == []
    ask(queue, "1", now=2.0)
    assert not take(queue, OTHER)
    queue.tick(2.5)
    assert [*queue.beat(WORKER, {"2": "token"}, (), LEASE_S + 1)] == ["2"], (
        "nobody wants it any more"
    )


def test_a_task_with_which_a_broker_helps_becomes_its_own() -> None:
    queue = make_queue(max_queued=1)
    queue.adopt("broker", [Assignment("1", "theirs", "python", b"")])
    assert queue.load(0.0).queued == 0
    assert ask(queue, "1", priority=2.0, limits=Limits(1.0)) == 1
    assert queue.load(0.0).queued == 1
    queue.stop("broker", {"1": False})
    queue.cancel("broker", ["1"])
    assert queue.missing("broker", ["1"]) == ["1"]
    assert queue.take_changes().new[0].submission == TaskSubmission(
        "1", b"", "python", 2.0, 0, Limits(1.0)
    )
    (each,) = take(queue)
    queue.finish(done(each))
    assert queue.collect("broker", "") == ([], [])
    assert states(queue) == {"1": TaskState.DONE}


def test_the_outcome_of_a_helped_task_goes_to_the_model_that_sends_it() -> None:
    queue = make_queue()
    queue.adopt("broker", [Assignment("1", "theirs", "python", b"")])
    (each,) = take(queue)
    queue.finish(done(each))
    ask(queue, "1")
    assert states(queue) == {"1": TaskState.DONE}
    queue.acknowledge(MODEL, ["1"])
    assert queue.collect("broker", "") == ([], [])


def test_nobody_helps_a_helper() -> None:
    queue = make_queue()
    queue.adopt("broker", [Assignment("1", "theirs", "python", b"")])
    assert not take(queue, HELPER)
    assert queue.waiting("broker") == ["1"]
    assert take(queue)
    assert queue.waiting("broker") == []


def test_an_outcome_from_a_helper_counts_the_runs_at_the_lost_broker() -> None:
    lost, queue = make_queue(), make_queue()
    ask(lost, "1", retries=2)
    (first,) = take(lost)
    lost.finish(done(first)._replace(state=TaskState.FAILED))
    queue.adopt("broker", take(lost, HELPER))
    (again,) = take(queue)
    queue.finish(done(again))
    queue.inherit(lost.take_changes().new, 1.0)
    (outcome,) = queue.collect(MODEL, "")[0]
    assert (outcome.state, outcome.attempts) == (TaskState.DONE, 2)


def test_learning_curves_go_to_the_model_and_the_oldest_points_are_dropped() -> None:
    queue = make_queue()
    ask(queue, "1")
    (each,) = take(queue)
    points = [TaskProgress("1", step, 0.5) for step in range(10_001)]
    queue.beat(WORKER, {"1": each.token}, [*points, TaskProgress("unknown", 0, 0.0)], 0.0)
    assert queue.has_news(MODEL)
    assert queue.collect(MODEL, "")[1] == points[1:]
    assert not queue.has_news(MODEL)


def test_what_is_too_large_for_one_call_comes_with_the_next_ones() -> None:
    queue = make_queue()
    large = bytes(MOST_BYTES // 2 + 1)
    queue.submit(MODEL, [TaskSubmission(str(number), large) for number in range(3)], 0.0)
    held: dict[str, Assignment] = {}
    for count in (1, 2, 3):
        held |= {each.id: each for each in take(queue, count=3, held=tuple(held))}
        assert len(held) == count
    for each in held.values():
        queue.finish(done(each)._replace(payload=large))
    assert [[each.id for each in queue.collect(MODEL, "1")[0]] for _ in range(4)] == [
        ["0"],
        ["1"],
        ["2"],
        [],
    ]
    assert not queue.has_news(MODEL)


def test_tasks_of_a_lost_broker_wait_again_and_outcomes_are_kept() -> None:
    lost, queue = make_queue(), make_queue(max_queued=1)
    ask(lost, "runs", "done", "helped", "known", limits=Limits(5.0))
    runs, ended = take(lost, count=2)
    lost.finish(done(ended))
    ask(queue, "known", limits=Limits(5.0))
    queue.adopt("broker", [Assignment("helped", "theirs", "python", b"")])
    take(queue, OTHER, 2)
    queue.take_changes()
    queue.inherit(lost.take_changes().new, 1.0)
    assert queue.load(1.0).queued == 1
    assert queue.resume(MODEL, ["runs", "done", "helped", "known"]) == []
    assert states(queue) == {"done": TaskState.DONE}
    assert {each.submission.id for each in queue.take_changes().new} == {"runs", "done", "helped"}
    (again,) = take(queue)
    assert again.id == runs.id
    queue.tick(3.0)
    queue.tick(6.1)
    assert states(queue) == dict.fromkeys(["runs", "helped", "known"], TaskState.FAILED) | {
        "done": TaskState.DONE
    }


def test_an_outcome_says_how_often_its_task_was_run_and_how_many_workers_were_lost() -> None:
    queue = make_queue(max_losses=1)
    ask(queue, "lost", "raises", retries=1)
    _, raises = take(queue, count=2)
    queue.finish(TaskOutcome(raises.id, raises.token, TaskState.FAILED, text="first"))
    queue.tick(0.0)
    queue.tick(LEASE_S / 2)
    queue.tick(LEASE_S)
    (again,) = take(queue, OTHER)
    (last,) = take(queue, Life("third", "life"))
    assert (again.id, last.id) == ("lost", "raises")
    queue.finish(done(again))
    queue.finish(TaskOutcome(last.id, last.token, TaskState.FAILED, text="second"))
    found = {each.id: (each.attempts, each.lost_workers) for each in queue.collect(MODEL, "s")[0]}
    assert found == {"lost": (2, 1), "raises": (2, 0)}


GIB = 1 << 30
HOST = WorkerMachine("host", 4, 8 * GIB, ("0", "1"))


def lend(queue: Queue, name: str, machine: WorkerMachine = HOST) -> list[Assignment]:
    """Has a worker ask that has nothing."""
    return queue.take(Life(name, ""), (), ANY, 3, 0.0, machine=machine)


def needing(cpus: float = 0.0, gpus: float = 0.0, memory_bytes: int = 0) -> Limits:
    return Limits(cpus=cpus, gpus=gpus, memory_bytes=memory_bytes)


def test_a_machine_has_as_many_tasks_as_it_has_room_for() -> None:
    queue = make_queue()
    ask(queue, "1", "2", "3", limits=needing(memory_bytes=3 * GIB))
    assert [[each.id for each in lend(queue, name)] for name in "abc"] == [["1"], ["2"], []]
    assert lend(queue, "d", HOST._replace(name="another"))
    assert lend(queue, "e", WorkerMachine("small", 64, GIB, ())) == []


def test_what_waits_for_room_is_passed_only_by_what_it_does_not_need() -> None:
    queue = make_queue()
    ask(queue, "runs", limits=needing(cpus=2))
    lend(queue, "a")
    ask(queue, "large", limits=needing(cpus=3))
    ask(queue, "small", limits=needing(cpus=1))
    ask(queue, "passes", limits=needing(gpus=1))
    assert [each.id for each in lend(queue, "b")] == ["passes"]
    assert lend(queue, "c") == []
    ask(queue, "needs nothing")
    (each,) = lend(queue, "c")
    assert each.id == "needs nothing"
    queue.leave(Life("a", ""))
    assert [each.id for each in lend(queue, "d")] == ["runs"], "it is older"
    queue.cancel(MODEL, ["runs"])
    assert lend(queue, "e") == [], "it runs until its worker says that it has it no more"
    assert [each.id for each in lend(queue, "d")] == ["large"]


def test_what_waits_for_devices_has_them_kept() -> None:
    queue = make_queue()
    ask(queue, "half", limits=needing(gpus=0.5))
    assert [each.devices for each in lend(queue, "a")] == [("0",)]
    ask(queue, "both", limits=needing(gpus=2))
    ask(queue, "one", limits=needing(gpus=1))
    assert lend(queue, "b") == []
    queue.leave(Life("a", ""))
    queue.cancel(MODEL, ["half"])
    assert [each.devices for each in lend(queue, "b")] == [("0", "1")]


def test_parts_fill_one_device_before_the_next() -> None:
    queue = make_queue()
    ask(queue, *"123456", limits=needing(gpus=1 / 3))
    devices = [each.devices for name in "abcdef" for each in lend(queue, name)]
    assert sorted(devices) == [("0",)] * 3 + [("1",)] * 3
    assert devices[:3] in ([("0",)] * 3, [("1",)] * 3)


def test_a_process_that_sees_other_devices_is_the_last_choice() -> None:
    queue = make_queue()
    pinned = [HOST._replace(pinned=each) for each in (("0",), ("1",))]
    assert lend(queue, "0", pinned[0]) == lend(queue, "1", pinned[1]) == []
    ask(queue, "1", limits=needing(gpus=1))
    assert [each.devices for each in lend(queue, "1", pinned[1])] == [("1",)]
    ask(queue, "2", limits=needing(gpus=1))
    assert [each.devices for each in lend(queue, "0", pinned[0])] == [("0",)]
    queue.cancel(MODEL, ["1", "2"])
    assert lend(queue, "1", pinned[1]) == lend(queue, "0", pinned[0]) == []
    ask(queue, "both", limits=needing(gpus=2))
    assert lend(queue, "free", HOST._replace(devices=("0",))) == []
    assert lend(queue, "0", pinned[0]) == [], "another one there has seen none yet"
    queue.leave(Life("free", ""))
    assert [each.devices for each in lend(queue, "0", pinned[0])] == [("0", "1")]


def test_what_no_machine_has_room_for_is_named() -> None:
    queue = make_queue()
    ask(queue, "1", limits=needing(cpus=8, gpus=0.5))
    assert queue.unknown_kinds() == ["python with cpus=8, gpus=0.5"]
    assert lend(queue, "a") == []
    assert queue.unknown_kinds() == ["python with cpus=8, gpus=0.5"]
    lend(queue, "b", HOST._replace(name="large", cpus=8))
    assert queue.unknown_kinds() == []


def test_what_a_task_uses_outlives_the_broker() -> None:
    queue = make_queue()
    ask(queue, "1", "2", limits=needing(cpus=3))
    assert lend(queue, "a")
    again = restarted(queue)
    again.resume(MODEL, ["1", "2"])
    assert lend(again, "b") == []
    again.cancel(MODEL, ["1"])
    assert [each.id for each in lend(again, "a")] == ["2"]


@pytest.mark.parametrize("seed", range(3))
def test_no_machine_is_given_more_than_it_has_and_each_task_has_its_turn(seed: int) -> None:
    rng = random.Random(seed)
    queue = make_queue(max_losses=1000)
    machines = [HOST, HOST._replace(name="other", cpus=2.0, devices=("0",))]
    workers = {f"{each.name}-{index}": each for each in machines for index in range(6)}
    running: dict[str, tuple[str, Assignment]] = {}
    ended: set[str] = set()
    for step in itertools.count():
        assert len(ended) == step or step < 20_000, "a task waits for ever"
        if step < 80:
            limits = needing(rng.choice([0, 0.5, 1, 4]), rng.choice([0, 0, 0.25, 0.5, 1, 2]))
            ask(queue, str(step), limits=limits, priority=rng.choice([0.0, 1.0]))
        elif len(ended) == 80:
            break
        name = rng.choice(list(workers))
        if name in running and rng.random() < 0.5:
            key, each = running.pop(name)
            queue.finish(done(each))
            ended.add(key)
        elif name in running and rng.random() < 0.1:
            del running[name]
            queue.leave(Life(name, ""))
            workers[name] = workers[name]._replace(pinned=())
        elif name not in running:
            for each in lend(queue, name, workers[name]):
                if each.devices and workers[name].pinned not in ((), each.devices):
                    queue.leave(Life(name, ""))
                    workers[name] = workers[name]._replace(pinned=())
                    break
                workers[name] = workers[name]._replace(pinned=each.devices or workers[name].pinned)
                running[name] = each.id, each
        for machine in machines:
            there = [each for key, (_, each) in running.items() if key.startswith(machine.name)]
            assert sum(each.limits.cpus for each in there) <= machine.cpus
            for device in machine.devices:
                parts = [min(1, each.limits.gpus) for each in there if device in each.devices]
                assert sum(parts) <= 1


def test_a_model_hears_once_which_tasks_have_begun_and_which_wait_again() -> None:
    queue = make_queue()
    ask(queue, "lasts", "ended", "lost")
    queue.collect(MODEL, "session")
    lasts, ended, lost = take(queue, count=3)
    queue.finish(done(ended))
    queue.collect(MODEL, "session")
    assert not queue.has_news("nobody", begun=True)
    assert queue.has_news(MODEL, begun=True)
    assert queue.begun(MODEL) == [("lasts", True), ("lost", True)]
    assert not queue.has_news(MODEL, begun=True)
    queue.give_back(WORKER, {"lost": lost.token})
    assert queue.begun(MODEL) == [("lost", False)]
    queue.collect(MODEL, "another session")
    assert queue.begun(MODEL) == [("lasts", True)]
    queue.finish(done(lasts))
    assert not queue.begun(MODEL)
