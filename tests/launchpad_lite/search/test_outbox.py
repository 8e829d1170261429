"""The outstanding tasks of one model, and its broker."""

import threading
import types
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

import courier
from launchpad_lite.search import _outbox
from launchpad_lite.search._messages import (
    MOST_BYTES,
    Collected,
    Life,
    Load,
    MembersView,
    TaskOutcome,
    TaskState,
    TaskSubmission,
)
from launchpad_lite.search._outbox import Outbox
from launchpad_lite.search._queue import Queue
from launchpad_lite.search._timing import Timing


class Broker:
    """A broker that is called directly."""

    def __init__(self) -> None:
        self.queue = Queue()
        #: Of the newest call, and how long it takes to store a task.
        self.timeout_s, self.takes_s = 0.0, 0.0
        self.submitted: list[int] = []
        #: Of the first call that asks what is here: set when it has come, and when it may go on.
        self.has_come, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.is_lost = True
        #: Whether it has ended.
        self.is_gone = False
        #: Of large tasks: calls that are on their way.
        self.on_the_way: list[Future[int]] = []
        self.futures = types.SimpleNamespace(submit=self.submit_later)

    def submit_later(self, model: str, submissions: Sequence[TaskSubmission]) -> "Future[int]":
        self.on_the_way.append(Future())
        return self.on_the_way[-1]

    def submit(self, model: str, submissions: Sequence[TaskSubmission]) -> int:
        self.submitted.append(len(submissions))
        if self.timeout_s < self.takes_s:
            raise courier.CallTimeoutError("it takes longer")
        return self.queue.submit(model, submissions, 0.0)

    def resume(
        self, model: str, ids: Sequence[str], awaited: Sequence[str] = ()
    ) -> tuple[str, list[str]]:
        if self.is_gone:
            raise courier.ServerLostError("broker")
        if not self.has_come.is_set():
            self.has_come.set()
            self.may_go_on.wait(10)
        return "life", self.queue.resume(model, ids, awaited)

    def cancel(self, model: str, ids: Sequence[str]) -> None:
        self.queue.cancel(model, ids)

    def collect(self, model: str, session: str, *_: Any) -> Collected:
        if self.is_lost or self.is_gone:
            raise courier.CallTimeoutError("nothing comes")
        outcomes, progress = self.queue.collect(model, session)
        return Collected("life", outcomes, progress, Load(), (), self.queue.begun(model))


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def other() -> Broker:
    """One that is chosen when the first one was left."""
    return Broker()


@pytest.fixture
def presence(broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch) -> Any:
    def with_timeout(client: Broker, timeout_s: float) -> Broker:
        client.timeout_s = timeout_s
        return client

    monkeypatch.setattr(courier, "with_timeout", with_timeout)
    return types.SimpleNamespace(
        timing=Timing(),
        member=types.SimpleNamespace(who=types.SimpleNamespace(name="model")),
        view=MembersView(True, dict.fromkeys(["broker", "other"], ("", Load()))),
        choose=lambda avoid: "other" if avoid else "broker",
        client=lambda name: {"broker": broker, "other": other}[name],
        beat=lambda _: True,
    )


@pytest.fixture
def outbox(presence: Any) -> Outbox:
    return Outbox(presence)


def test_tasks_that_are_too_large_for_one_call_take_several(outbox: Outbox, broker: Broker) -> None:
    outbox.add([TaskSubmission(str(number), bytes(MOST_BYTES // 2)) for number in range(5)])
    assert outbox.send()
    assert broker.submitted == [2, 2, 1]


def test_a_thread_that_asks_what_a_broker_has_loses_no_task_that_another_one_sends(
    outbox: Outbox, broker: Broker
) -> None:
    broker.may_go_on.clear()
    collecting = threading.Thread(target=outbox.collect, args=(0.0,))
    collecting.start()
    assert broker.has_come.wait(10)
    outbox.add([TaskSubmission("new", b"")])
    sending = threading.Thread(target=outbox.send)
    sending.start()
    sending.join(0.2)
    broker.may_go_on.set()
    collecting.join()
    sending.join()
    assert broker.queue.load(0.0).queued == 1


def test_a_task_that_takes_long_to_arrive_arrives(outbox: Outbox, broker: Broker) -> None:
    broker.takes_s = 60.0
    outbox.add([TaskSubmission("large", bytes(MOST_BYTES))])
    assert any(outbox.send() for _ in range(8))
    assert broker.queue.load(0.0).queued == 1


def test_others_pass_a_large_task_that_is_on_its_way(outbox: Outbox, broker: Broker) -> None:
    large = [TaskSubmission(str(number), bytes(MOST_BYTES + 1)) for number in range(2)]
    outbox.add(large)
    assert not outbox.send()
    outbox.add([TaskSubmission("small", b"")])
    assert not outbox.send()
    assert broker.queue.missing("model", ["0", "small"]) == ["0"]
    for number in range(2):
        assert len(broker.on_the_way) == number + 1, "one after the other, each once"
        broker.on_the_way[-1].set_result(1)
        is_sent = outbox.send()
    assert is_sent


def test_a_large_task_that_was_lost_on_its_way_is_sent_again(
    outbox: Outbox, broker: Broker
) -> None:
    outbox.add([TaskSubmission("large", bytes(MOST_BYTES + 1))])
    assert not outbox.send()
    broker.on_the_way[0].set_exception(courier.ServerLostError("broker"))
    assert not outbox.send()
    assert not outbox.send()
    broker.on_the_way[1].set_result(1)
    assert outbox.send()


def test_a_task_begins_once_and_counts_as_running_while_it_has_a_worker(
    outbox: Outbox, broker: Broker
) -> None:
    broker.is_lost = False
    worker = Life("worker", "life")
    outbox.add([TaskSubmission("1", b""), TaskSubmission("2", b"")])
    outbox.send()
    one, _ = broker.queue.take(worker, (), ("python",), 2, 0.0)
    outbox.collect(0.0)
    assert (outbox.begun, outbox.running) == (["1", "2"], 2)
    broker.queue.give_back(worker, {one.id: one.token})
    outbox.collect(0.0)
    assert (outbox.begun, outbox.running) == ([], 1)
    broker.is_lost = True
    outbox.collect(0.0)  # what was answered may be lost: it comes again
    broker.is_lost = False
    broker.queue.take(worker, ("2",), ("python",), 2, 0.0)
    outbox.collect(0.0)
    assert (outbox.begun, outbox.running) == ([], 2)
    outbox.cancel(["1", "2"])
    assert outbox.running == 0


def test_a_full_broker_gets_the_newest_code_of_its_tasks_before_new_ones(
    presence: Any, broker: Broker
) -> None:
    old, new = (TaskSubmission(key, b"") for key in ("old", "new"))
    before = Queue()
    before.submit("model", [old], 0.0)
    broker.queue = Queue(max_queued=1)
    broker.queue.restore(before.take_changes().new, 0.0)
    outbox = Outbox(presence, {"old": old}, "broker")
    outbox.add([new])
    assert not outbox.send()
    worker = Life("worker", "life")
    assert [each.id for each in broker.queue.take(worker, (), ("python",), 2, 0.0)] == ["old"]
    assert outbox.send()


def test_tasks_of_a_lost_broker_go_to_another_one_and_its_outcomes_count_when_it_is_back(
    outbox: Outbox, broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None, now=0.0)
    monkeypatch.setattr(_outbox, "time", clock)
    worker = Life("worker", "life")

    def finished(at: Broker, key: str) -> None:
        given = {each.id: each.token for each in at.queue.take(worker, (), ("python",), 9, 0.0)}
        at.queue.finish(TaskOutcome(key, given[key], TaskState.DONE))

    def collected() -> list[str]:
        clock.now += Timing().patience_s
        return [each.id for each in outbox.collect(0.0)[0]]

    outbox.add([TaskSubmission("1", b""), TaskSubmission("2", b"")])
    assert outbox.send()
    finished(broker, "1")
    broker.is_lost = other.is_lost = False
    broker.is_gone = True
    for _ in range(4):
        assert collected() == []
    assert outbox.broker == "other"
    finished(other, "2")
    assert collected() == ["2"]
    broker.is_gone = False
    assert collected() == ["1"]
    assert broker.queue.missing("model", ["1", "2"]) == ["1", "2"]
    assert other.queue.missing("model", ["1"]) == ["1"]
    assert len(outbox) == 0
