"""A model, two brokers and workers on a bad network, in virtual time: nothing is lost or doubled."""

import collections
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import courier
from launchpad_lite.search import _outbox
from launchpad_lite.search._messages import (
    Assignment,
    Collected,
    Life,
    Load,
    MembersView,
    SearchMember,
    TaskOutcome,
    TaskState,
    TaskSubmission,
)
from launchpad_lite.search._outbox import Outbox
from launchpad_lite.search._queue import Queue, QueuedTask
from launchpad_lite.search._timing import Timing

TIMING = Timing(lease_s=5.0, beat_s=1.0, silence_s=3.0, patience_s=3.0)
STEP_S = 0.1
AHEAD = 40


class Broker:
    """A queue with a store, or without, that comes and goes."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network = network
        self.name = name
        self.rows: dict[str, QueuedTask] = {}
        self.up_at = 0.0
        self.start()

    def start(self) -> None:
        self.life = str(self.network.random.random())
        self.queue = Queue(lease_s=TIMING.lease_s, max_losses=1000, max_queued=30)
        self.queue.restore([replace(each) for each in self.rows.values()], self.network.now)

    def crash(self) -> None:
        self.up_at = self.network.now + self.network.random.choice([0.5, 2.0, 8.0])
        if self.network.kind == "memory":
            self.rows = {}
        self.start()

    @property
    def is_up(self) -> bool:
        return self.network.now >= self.up_at

    def keep(self) -> None:
        changes = self.queue.take_changes().copy()
        for each in (*changes.new, *changes.changed):
            self.rows[each.submission.id] = each
        for key in changes.removed:
            self.rows.pop(key, None)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls it; at times the request, the broker or the answer is lost."""
        fate = self.network.random.random()
        if not self.is_up or fate < self.network.loss:
            raise courier.ServerLostError(self.name)
        answer = function()
        if fate > 1 - self.network.crashes:
            self.crash()  # before it has stored anything
            raise courier.ServerLostError(self.name)
        self.keep()
        if fate > 1 - self.network.crashes - self.network.loss:
            raise courier.ServerLostError(self.name)
        return answer

    # As `_broker.Broker`.

    def submit(self, model: str, submissions: Sequence[TaskSubmission]) -> Any:
        return self.call(lambda: self.queue.submit(model, submissions, self.network.now))

    def cancel(self, model: str, ids: Sequence[str]) -> Any:
        return self.call(lambda: self.queue.cancel(model, ids))

    def resume(self, model: str, ids: Sequence[str], awaited: Sequence[str] = ()) -> Any:
        def answer() -> tuple[str, list[str]]:
            missing = self.queue.resume(model, ids, awaited)
            if missing and self.network.kind == "database":
                self.take_over()
                missing = self.queue.resume(model, ids, awaited)
            return self.life, missing

        return self.call(answer)

    def take_over(self) -> None:
        for other in self.network.brokers.values():
            if not other.is_up:
                found, other.rows = other.rows, {}
                self.rows = {**found, **self.rows}
                other.start()
                self.queue.inherit([replace(each) for each in found.values()], self.network.now)

    def collect(
        self,
        model: str,
        session: str,
        acknowledged: Sequence[str],
        stopped: Sequence[str],
        wait_s: float,
    ) -> Any:
        def answer() -> Collected:
            self.queue.acknowledge(model, acknowledged)
            self.queue.stop(model, stopped)
            outcomes, progress = self.queue.collect(model, session)
            return Collected(self.life, outcomes, progress, self.queue.load(self.network.now))

        return self.call(answer)

    def work(
        self, worker: Life, held: Sequence[str], outcomes: Sequence[TaskOutcome], count: int
    ) -> Any:
        def answer() -> list[Assignment]:
            for each in outcomes:
                self.queue.finish(each)
            return self.queue.take(worker, held, ("python",), count, self.network.now)

        return self.call(answer)

    def beat(self, worker: Life, held: dict[str, str]) -> Any:
        return self.call(lambda: self.queue.beat(worker, held, (), self.network.now))


class Worker:
    """Runs one task after the other, asks another broker when one is lost, and hands in later."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network = network
        self.who = Life(name, str(network.random.random()))
        self.broker = network.random.choice(list(network.brokers))
        self.held: dict[str, dict[str, str]] = {name: {} for name in network.brokers}
        self.outcomes: dict[str, list[TaskOutcome]] = {name: [] for name in network.brokers}
        self.queue: list[tuple[str, Assignment]] = []
        self.ends_at = 0.0
        self.beats_at = 0.0

    def step(self) -> None:
        now = self.network.now
        if self.queue and now >= self.ends_at:
            broker, each = self.queue.pop(0)
            self.network.runs[each.id] += 1
            self.outcomes[broker].append(
                TaskOutcome(each.id, each.token, TaskState.DONE, b"result")
            )
            self.ends_at = now + self.network.random.uniform(0, 0.5)
        if now >= self.beats_at:
            self.beats_at = now + TIMING.beat_s
            for name in self.network.brokers:
                self.show(name)
        if not self.queue:
            self.exchange(self.broker, self.network.random.randint(1, 3))

    def show(self, name: str) -> None:
        try:
            if self.held[name]:
                self.network.brokers[name].beat(self.who, self.held[name])
            if self.outcomes[name] and name != self.broker:
                self.exchange(name, 0)
        except courier.ServerLostError:
            pass

    def exchange(self, name: str, count: int) -> None:
        sent = list(self.outcomes[name])
        ended = {each.id for each in sent}
        held = [key for key in self.held[name] if key not in ended]
        try:
            found = self.network.brokers[name].work(self.who, held, sent, count)
        except courier.ServerLostError:
            self.broker = self.network.random.choice(list(self.network.brokers))
            return
        self.outcomes[name] = []
        for key in ended:
            self.held[name].pop(key, None)
        self.held[name].update({each.id: each.token for each in found})
        self.queue += [(name, each) for each in found]


class Network:
    """All of them, what is drawn, and what time it is; as a model sees it, a `Presence`."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.now = 0.0
        self.loss, self.crashes = 0.02, 0.002
        self.runs: collections.Counter[str] = collections.Counter()
        self.timing = TIMING
        self.member = SearchMember("model", Life("model", ""))
        self.brokers: dict[str, Broker] = {}
        for name in ("broker[0]", "broker[1]"):
            self.brokers[name] = Broker(self, name)
        self.workers = [Worker(self, f"worker[{index}]") for index in range(8)]

    @property
    def view(self) -> MembersView:
        return MembersView(
            True, {name: (name, Load()) for name, each in self.brokers.items() if each.is_up}
        )

    def beat(self, broker: str = "") -> bool:
        return True

    def choose(self, avoid: Sequence[str] = ()) -> str:
        return self.random.choice([each for each in self.brokers if each not in avoid] or [""])

    def client(self, name: str) -> Any:
        return self.brokers[name]

    def step(self) -> None:
        self.now += STEP_S
        for broker in self.brokers.values():
            if broker.is_up:
                broker.queue.tick(self.now)
                broker.keep()
        for index, worker in enumerate(self.workers):
            if self.random.random() < self.crashes:
                self.workers[index] = Worker(self, worker.who.name)
            else:
                worker.step()


def search(seed: int, kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Has a model run `count` tasks; it is started again from its checkpoints at times."""
    network = Network(seed, kind)
    clock = types.SimpleNamespace(monotonic=lambda: network.now, sleep=lambda _: None)
    monkeypatch.setattr(_outbox, "time", clock)
    monkeypatch.setattr(
        _outbox,
        "courier",
        types.SimpleNamespace(
            with_timeout=lambda client, _: client, CallTimeoutError=courier.CallTimeoutError
        ),
    )
    todo = [TaskSubmission(str(number), b"", retries=number % 2) for number in range(count)]
    asked, told = 0, collections.Counter[str]()
    kept: list[str] = []
    outbox: Any = Outbox(network)  # type: ignore[arg-type]
    checkpoint: Any = (0, {}, {}, "")
    while len(told) < count:
        assert network.now < 10 * count, f"{count - len(told)} are lost"
        network.step()
        more = todo[asked : asked + AHEAD - len(outbox)]
        asked += len(more)
        outbox.add(more)
        outbox.send()
        for outcome in outbox.collect(0.0)[0]:
            told[outcome.id] += 1
            kept.append(outcome.id)
        assert max(told.values(), default=1) == 1, "accepted twice"
        if network.random.random() < 0.05:
            checkpoint = asked, dict(told), outbox.outstanding, outbox.broker
            outbox.acknowledge(kept)
            kept = []
        elif network.crashes and network.random.random() < 0.005:
            asked, known, *before = checkpoint
            told, kept = collections.Counter(known), []
            outbox = Outbox(network, *before)  # type: ignore[arg-type]
    outbox.acknowledge(kept)
    forget(network, outbox)
    return network


def forget(network: Network, outbox: Outbox) -> None:
    """Brokers have nothing, once all is acknowledged and all are back."""
    network.loss = network.crashes = 0.0
    for _ in range(300):
        network.step()
        outbox.send()
        outbox.collect(0.0)
    for broker in network.brokers.values():
        assert broker.queue.load(network.now).running == 0
        assert not broker.rows


@pytest.mark.parametrize("kind", ["memory", "files", "database"])
def test_nothing_is_lost_or_accepted_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search(1, kind, 400, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "files", "database"])
def test_of_thousands_of_tasks_none_is_lost_or_accepted_twice(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(10):
        search(seed, kind, 2000, monkeypatch)


@pytest.mark.parametrize("kind", ["memory", "files", "database"])
def test_on_a_good_network_each_task_is_run_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(Network, "step", calm(Network.step))
        network = search(1, kind, 400, monkeypatch)
    assert set(network.runs.values()) == {1}


def calm(step: Callable[[Network], None]) -> Callable[[Network], None]:
    def calm_step(network: Network) -> None:
        network.crashes = 0.0  # answers are lost all the same
        step(network)

    return calm_step
