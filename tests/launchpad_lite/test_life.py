"""The state machine of a program's life: by property and by table."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import courier
from courier import ExceptionReport
from launchpad_lite._life import (
    BLAME_S,
    GIVE_UP_S,
    TERMINATE_S,
    Action,
    Constructed,
    Ended,
    Event,
    Finish,
    HostLost,
    Kill,
    KillAsked,
    ProgramLife,
    RequestStop,
    StopAsked,
    Terminate,
    Tick,
)
from launchpad_lite._result import NodeFailure, Outcome, ProgramResult

NAMES = ("a[0]", "a[1]", "b[0]", "b[1]")


def failure(node: str, *, consequence: bool = False) -> NodeFailure:
    return NodeFailure(node, "host", f"{node} broke", is_consequence=consequence)


class Life:
    """A program's life that checks, at each event, what must always hold."""

    def __init__(self, names: tuple[str, ...] = NAMES, notice_s: float = 10.0) -> None:
        self.machine = ProgramLife(names, notice_s)
        self.names = names
        self.notice_s = notice_s
        self.now = 100.0
        self.ended: set[str] = set()
        self.asked: set[str] = set()
        self.killed: set[str] = set()
        self.actions: list[Action] = []
        self.result: ProgramResult | None = None
        self.finished_at = 0.0

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        if isinstance(event, Ended):
            self.ended.add(event.node)
        elif isinstance(event, HostLost):
            self.ended.update(event.nodes)
        was_over = self.machine.over
        actions = self.machine.handle(event, self.now)
        assert not (was_over and actions), "acts after the end"
        for action in actions:
            self._check(action)
        self.actions += actions
        if self.machine.deadline is not None:
            assert self.machine.deadline > self.now, "time that is over is waited for"
        if self.ended >= set(self.names):
            assert self.machine.over, "waits for nobody"
        assert self.machine.over == (self.result is not None)
        return actions

    def _check(self, action: Action) -> None:
        assert self.result is None, "acts after the end"
        if isinstance(action, Finish):
            self.result, self.finished_at = action.result, self.now
            assert set(self.names) <= self.ended | self.killed, "leaves a node behind"
            assert (action.result.outcome is Outcome.FAILED) == bool(action.result.failures)
            assert action.result.reason
            order = [each.is_consequence for each in action.result.failures]
            assert order == sorted(order), "a consequence stands before a cause"
            return
        assert action.node not in self.ended, f"{action} to a node that has ended"
        if isinstance(action, RequestStop):
            assert action.node not in self.asked, f"{action} twice"
            self.asked.add(action.node)
        if isinstance(action, Kill):
            assert action.node not in self.killed, f"{action} twice"
            self.killed.add(action.node)

    def pass_time(self, seconds: float) -> None:
        """As the supervisor: wakes at each deadline."""
        until = self.now + seconds
        while self.machine.deadline is not None and self.machine.deadline <= until:
            self(Tick(), self.machine.deadline - self.now)
        self.now = until

    def tick_to_the_end(self) -> ProgramResult:
        """No node ends by itself any more."""
        self.pass_time(max(0.0, self.notice_s) + TERMINATE_S + GIVE_UP_S + 1e-6)
        assert self.result is not None, "waits too long"
        return self.result


nodes = st.sampled_from(NAMES)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Constructed, nodes, st.booleans()),
    st.builds(Ended, nodes),
    nodes.flatmap(
        lambda node: st.builds(
            Ended, st.just(node), st.builds(failure, st.just(node), consequence=st.booleans())
        )
    ),
    st.builds(StopAsked, st.just("asked"), st.sampled_from([None, 2, 15])),
    st.just(KillAsked()),
    st.builds(
        HostLost,
        st.just("host"),
        st.lists(nodes, unique=True).map(tuple),
        st.just("host is gone"),
    ),
    st.just(Tick()),
)
steps = st.lists(st.tuples(events, st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 20.0])), max_size=30)


@settings(max_examples=400, deadline=None)
@given(steps=steps, notice_s=st.sampled_from([0.0, 0.3, 10.0, -1.0]))
def test_no_order_of_events_breaks_a_life(
    steps: list[tuple[Event, float]], notice_s: float
) -> None:
    life = Life(notice_s=notice_s)
    for event, after_s in steps:
        life(event, after_s)
    if life.result is None:
        life(StopAsked("the end"))
    if notice_s < 0:
        life(KillAsked())
    life.tick_to_the_end()


@settings(max_examples=200, deadline=None)
@given(steps=steps, notice_s=st.sampled_from([0.0, 0.3, 10.0]))
def test_nothing_that_happens_after_a_stop_puts_off_the_end(
    steps: list[tuple[Event, float]], notice_s: float
) -> None:
    life = Life(notice_s=notice_s)
    life(StopAsked("at first"))
    started_at = life.now
    for event, after_s in steps:
        life.pass_time(after_s)
        life(event)
    life.tick_to_the_end()
    assert life.finished_at - started_at <= notice_s + TERMINATE_S + GIVE_UP_S + 1e-6


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.builds(Constructed, nodes, st.booleans()) | st.just(Tick()), max_size=20))
def test_a_program_does_not_end_as_long_as_nothing_ends_or_asks(steps: list[Event]) -> None:
    life = Life()
    for event in steps:
        assert life(event, 1000.0) == []


# By table


def test_a_program_ends_when_all_nodes_with_something_to_run_have_ended() -> None:
    life = Life(("run", "other", "serve"))
    for node, runs in (("run", True), ("other", True), ("serve", False)):
        assert life(Constructed(node, runs)) == []
    assert life(Ended("run")) == []
    assert life(Ended("other")) == [RequestStop("serve")]
    assert life(Ended("serve")) == [
        Finish(ProgramResult(Outcome.COMPLETED, reason=life.machine._reason))
    ]


def test_a_node_that_is_not_constructed_yet_keeps_the_program_alive() -> None:
    life = Life(("run", "late"))
    life(Constructed("run", True))
    assert life(Ended("run")) == []
    assert life(Constructed("late", False)) == [RequestStop("late")]


def test_a_program_that_only_serves_never_ends_by_itself() -> None:
    life = Life(("a", "b"))
    life(Constructed("a", False))
    life(Constructed("b", False))
    assert life(Tick(), 1e6) == []
    assert life(Ended("a")) == []
    assert life.machine.deadline is None
    assert life(StopAsked("lp.stop()")) == [RequestStop("b")]


def finish_of(life: Life, *events: Event) -> ProgramResult:
    for event in events:
        life(event)
    return life.result or life.tick_to_the_end()


def test_a_consequence_that_arrives_before_its_cause_is_listed_after_it() -> None:
    life = Life(("a", "b", "c"))
    assert life(Ended("a", failure("a", consequence=True))) == []
    assert life(Ended("b", failure("b")), BLAME_S / 2) == [RequestStop("c")]
    result = finish_of(life, Ended("c", failure("c", consequence=True)))
    assert [each.node for each in result.failures] == ["b", "a", "c"]
    assert result.outcome is Outcome.FAILED
    assert "b broke" in result.reason
    assert result.exit_code == 1


def test_a_consequence_without_a_cause_fails_the_program_after_a_moment() -> None:
    life = Life(("a", "b"))
    assert life(Ended("a", failure("a", consequence=True))) == []
    assert life(Tick(), BLAME_S) == [RequestStop("b")]
    assert finish_of(life, Ended("b")).failures == (failure("a", consequence=True),)


def test_consequences_alone_are_the_reason_when_all_have_ended() -> None:
    life = Life(("a",))
    result = finish_of(life, Ended("a", failure("a", consequence=True)))
    assert result.outcome is Outcome.FAILED
    assert "a broke" in result.reason


def test_consequences_of_an_orderly_stop_are_no_failures() -> None:
    life = Life(("a", "b"))
    life(StopAsked("lp.stop()"))
    result = finish_of(life, Ended("a", failure("a", consequence=True)), Ended("b"))
    assert result == ProgramResult(Outcome.STOPPED, reason="lp.stop()")


def test_a_failure_of_its_own_while_stopping_fails_the_program_and_is_the_reason() -> None:
    life = Life(("a", "b"))
    life(StopAsked("lp.stop()"))
    result = finish_of(life, Ended("a", failure("a")), Ended("b"))
    assert result.outcome is Outcome.FAILED
    assert "a broke" in result.reason


def test_a_second_stop_changes_nothing() -> None:
    life = Life(("a",))
    life(StopAsked("first", 2))
    deadline = life.machine.deadline
    assert life(StopAsked("second", 15), 5.0) == []
    assert life.machine.deadline == deadline
    result = finish_of(life, Ended("a"))
    assert (result.reason, result.signum) == ("first", 2)
    assert (result.outcome, result.exit_code) == (Outcome.INTERRUPTED, 130)


def test_asking_again_for_the_kill_does_not_put_off_the_end() -> None:
    life = Life(("a",))
    assert life(KillAsked()) == [Kill("a")]
    assert life(KillAsked(), GIVE_UP_S / 2) == []
    (finish,) = life(KillAsked(), GIVE_UP_S / 2)
    assert isinstance(finish, Finish)
    assert finish.result.killed == ("a",)


def test_stopping_asks_then_terminates_then_kills_then_gives_up() -> None:
    life = Life(("good", "bad"), notice_s=3.0)
    assert life(StopAsked("x")) == [RequestStop("good"), RequestStop("bad")]
    assert life(Ended("good"), 1.0) == []
    assert life(Tick(), 1.9) == []
    assert life(Tick(), 0.2) == [Terminate("bad")]
    assert life(Tick(), TERMINATE_S) == [Kill("bad")]
    (finish,) = life(Tick(), GIVE_UP_S)
    assert isinstance(finish, Finish)
    assert finish.result.killed == ("bad",)
    assert finish.result.outcome is Outcome.STOPPED


def test_notice_zero_ends_nodes_by_force_at_once() -> None:
    life = Life(("a",), notice_s=0.0)
    assert life(StopAsked("x")) == [RequestStop("a"), Terminate("a")]
    result = finish_of(life, Ended("a", failure("a")))
    assert result.outcome is Outcome.STOPPED  # who is ended by force does not fail
    assert result.killed == ("a",)


def test_a_negative_notice_never_ends_nodes_by_force() -> None:
    life = Life(("a",), notice_s=-1.0)
    assert life(StopAsked("x")) == [RequestStop("a")]
    assert life(Tick(), 1e9) == []
    assert life(KillAsked()) == [Kill("a")]


def test_a_lost_host_fails_its_nodes_and_stops_the_others() -> None:
    life = Life(("a", "b", "c"))
    life(Ended("a"))
    lost = HostLost("far", ("a", "b"), "the host far is gone")
    assert life(lost) == [RequestStop("c")]
    result = finish_of(life, Ended("c"))
    assert result.failures == (NodeFailure("b", "far", "the host far is gone"),)
    assert result.reason == "the host far is gone"


def test_a_host_that_is_lost_while_stopping_is_no_failure() -> None:
    life = Life(("a",))
    life(StopAsked("x"))
    assert finish_of(life, HostLost("far", ("a",), "gone")).outcome is Outcome.STOPPED


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (courier.ServerLostError("gone"), True),
        (courier.ServerUnreachableError("gone"), True),
        (courier.CallCancelledError("closed"), True),
        (courier.CallTimeoutError("slow"), False),
        (ValueError("mine"), False),
    ],
)
def test_errors_of_calls_to_lost_nodes_are_consequences(error: Any, is_consequence: bool) -> None:
    report = ExceptionReport.of(error)
    assert NodeFailure.of_exception("a", "host", report).is_consequence is is_consequence
