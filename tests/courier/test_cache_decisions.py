"""What a cache decides, in any order of events."""

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import courier
from courier.calls.context import CallContext
from courier.calls.outcomes import Answer, Failure, Later, Value
from courier.values.parcel import Parcel, pack, unpack
from tests.courier.test_cache import Clock, FaultError


class FakePending:
    def __init__(self, key: int, asked_at: float) -> None:
        self.key = key
        self.asked_at = asked_at
        self.reply: Answer | None = None
        self.callback: Callable[[Any], None] | None = None

    def wait(self) -> Answer:
        assert self.reply is not None
        return self.reply

    def when_done(self, callback: Callable[[Any], None]) -> None:
        self.callback = callback

    def wait_until(self, deadline: float | None) -> bool:
        return self.reply is not None

    def hurry(self) -> None: ...

    def cancel(self) -> bool:
        return False


class World:
    """In the place of a connection; calls are answered, and tasks run, when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self.options = types.SimpleNamespace(address="host:1")
        self.clock = clock
        self.pending: list[FakePending] = []
        self.tasks: list[Callable[[], None]] = []
        self.asked: dict[int, list[float]] = {}
        self.refuses = False

    def forward(self, method: str, arguments: Parcel) -> FakePending:
        if self.refuses:
            raise courier.CallCancelledError("closed")
        (key,), _ = unpack(arguments)
        assert all(call.key != key for call in self.pending), "two calls for one key"
        self.pending.append(FakePending(key, self.clock.now))
        self.asked.setdefault(key, []).append(self.clock.now)
        return self.pending[-1]

    def run_aside(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)


class Machine(RuleBasedStateMachine):
    """Callers come and leave, answers come and fail, in any order."""

    refresh_s, stale_s = 4.0, 9.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.world = World(self.clock)
        client = courier.Client("127.0.0.1:1")
        self.cache = courier.Cache(
            client,
            refresh_s=self.refresh_s,
            stale_s=self.stale_s,
            max_bytes=250,
            max_entries=2,
            clock=self.clock,
        )
        self.cache._connection = self.world  # type: ignore[assignment]
        #: Those without an answer: key, when they came, their call.
        self.waiting: dict[int, tuple[int, float, CallContext]] = {}
        self.numbers = itertools.count()
        self.left: set[int] = set()

    def teardown(self) -> None:
        self.world.refuses = False
        while self.world.tasks or self.world.pending:
            while self.world.tasks:
                self.world.tasks.pop(0)()
            if self.world.pending:
                self._answer(0, None)
        assert not self.waiting, "somebody was not answered"
        assert all(not e.waiting and not e.is_asked for e in self.cache._entries.values())

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(refuses=st.booleans())
    def target_can_be_called_or_not(self, refuses: bool) -> None:
        self.world.refuses = refuses

    @rule(key=st.integers(0, 3))
    def somebody_asks(self, key: int) -> None:
        number, came_at = next(self.numbers), self.clock.now
        call = CallContext("m", "test", None)
        before = self.world.asked.get(key, [])[-1:]
        asked_before = len(self.world.asked.get(key, []))
        outcome = self.cache.answer("m", pack(((key,), {})), call)
        if isinstance(outcome, Later):
            self.waiting[number] = (key, came_at, call)
            outcome.then(lambda answer: self._given(number, answer))
            return
        self._check(key, came_at, outcome)
        if len(self.world.asked.get(key, [])) > asked_before and before:
            assert self.clock.now - before[0] >= self.refresh_s, "asked too often while fresh"

    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        if self.waiting:
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            call = self.waiting.pop(number)[2]
            self.left.add(number)
            call.end()

    @rule(data=st.data(), size=st.sampled_from([1, 60, 100, 400]) | st.none())
    def target_answers(self, data: st.DataObject, size: int | None) -> None:
        if self.world.pending:
            self._answer(data.draw(st.integers(0, len(self.world.pending) - 1)), size)

    @rule()
    def aside_goes_on(self) -> None:
        if self.world.tasks:
            self.world.tasks.pop(0)()

    def _answer(self, index: int, size: int | None) -> None:
        pending = self.world.pending.pop(index)
        if size is None:
            pending.reply = Failure.of(FaultError())
        else:
            # Made when it was asked for: the worst that a target can do.
            value = (pending.key, pending.asked_at, "x" * size)
            pending.reply = Value(pack(value))
        assert pending.callback is not None
        pending.callback(pending)

    def _given(self, number: int, answer: Answer) -> None:
        if number in self.left:
            return
        key, came_at, call = self.waiting.pop(number)
        self._check(key, came_at, answer)
        call.end()

    def _check(self, key: int, came_at: float, answer: Answer) -> None:
        if isinstance(answer, Failure):
            return
        assert isinstance(answer, Value)
        its_key, made_at, _ = unpack(answer.parcel)
        assert its_key == key
        is_own = made_at >= came_at
        assert is_own or self.clock.now - made_at <= self.stale_s, "older than allowed"

    @invariant()
    def memory_is_bounded_and_counted(self) -> None:
        kept = self.cache._kept
        assert len(kept) <= 2
        assert self.cache._bytes == sum(entry.size for entry in kept.values()) <= 250
        for key, entry in self.cache._entries.items():
            assert (entry.answer is not None) == (key in kept)
            assert entry.is_asked or entry.answer is not None
            assert entry.is_asked or not entry.waiting


class TestOrdersOfEvents(Machine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=40, stateful_step_count=40, derandomize=True)


@pytest.mark.slow
class TestMoreOrdersOfEvents(Machine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=200, stateful_step_count=40)
