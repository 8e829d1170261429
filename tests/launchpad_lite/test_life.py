"""The state machine of a program's life: by example, and by property in worlds that misbehave."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event as tell, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import courier
from courier import ExceptionReport
from launchpad_lite import _life
from launchpad_lite._events import (
    Action,
    Constructed,
    CutShort,
    DumpStacks,
    EndCalls,
    Ended,
    Event,
    Failed,
    Finish,
    Healthy,
    Heartbeat,
    HostLost,
    Kill,
    KillAsked,
    Leaving,
    LetGo,
    Placed,
    Preempted,
    RequestStop,
    Start,
    StopAsked,
    StopReceived,
    Terminate,
    Tick,
)
from launchpad_lite._life import (
    CAUSE_S,
    LOOK_S,
    OVERSLEPT_S,
    NodeTerms,
    ProgramLife,
)
from launchpad_lite._policies import NEVER, Liveness, RestartPolicy, RestartWhen
from launchpad_lite._result import NodeFailure, Outcome, ProgramResult
from launchpad_lite._timing import DEFAULT
from launchpad_lite.errors import NodeFailedError

TERMINATE_S, GIVE_UP_S = DEFAULT.terminate_s, DEFAULT.give_up_s
BLAME_S, DEAF_S = DEFAULT.blame_s, DEFAULT.unaware_s
#: Floats are not exact.
EPS = 1e-6
#: Restarted at once, without chance.
AT_ONCE = RestartPolicy("on_failure", backoff_s=0.0, jitter=0.0)


RAISED = ExceptionReport.of(ValueError("broke"))


def failure(
    node: str, *, consequence: bool = False, text: str = "broke", raised: bool = False
) -> NodeFailure:
    report = RAISED if raised else None
    return NodeFailure(node, "host", f"{node} {text}", report, is_consequence=consequence)


@dataclass
class Worker:
    """What the life knows, or should, of the newest worker of a node."""

    attempt: int
    started_at: float
    gone: bool = False
    asked_at: float | None = None
    told_at: float | None = None  # by a signal from outside
    failed_at: float | None = None  # and lingers
    #: Whether it is being ended for a reason that says more than how it fails.
    has_verdict: bool = False
    constructed: bool = False
    leaving: bool = False
    #: Since when it is known that it does not listen.
    deaf_at: float = math.inf
    calls_ended: bool = False
    terminated_at: float | None = None
    killed_at: float | None = None
    signs: dict[str, float] = field(default_factory=dict)

    @property
    def is_left_alone(self) -> bool:
        return not self.gone and self.leaves_at is None and not self.is_forced

    @property
    def is_forced(self) -> bool:
        return self.terminated_at is not None or self.killed_at is not None

    @property
    def was_asked(self) -> bool:
        return self.asked_at is not None or self.is_forced

    @property
    def leaves_at(self) -> float | None:
        """Since when it leaves, or should."""
        ends = (self.asked_at, self.told_at, self.failed_at)
        return min((each for each in ends if each is not None), default=None)


class Life:
    """A program's life which checks at each event what must always hold; its clock is `now`."""

    def __init__(
        self,
        *terms: NodeTerms,
        notice_s: float = 10.0,
        blame_s: float = BLAME_S,
        chance: Callable[[], float] = lambda: 0.5,
        now: float = 100.0,
    ) -> None:
        self.terms = {each.name: each for each in terms}
        self.notice_s = math.inf if notice_s < 0 else notice_s
        self.launched_at = self.now = now
        self.blame_s = blame_s
        self.machine = ProgramLife(terms, notice_s, blame_s=blame_s, now=now, chance=chance)
        self.workers: dict[str, Worker] = {}
        self.started: dict[tuple[str, int], float] = {}
        #: Whether no check has failed.
        self.sound = True
        self.stop_at: float | None = None
        self.kill_at: float | None = None
        self.asked_from_outside = False
        #: Since when a node has failed that is not restarted.
        self.doomed_at = math.inf
        #: What the supervisor's sleep adds to limits of all kinds.
        self.slept_s = 0.0
        self.woke_at = -math.inf
        #: Failures that became known before the stop, and those while all stopped.
        self.fed: dict[tuple[str, int], NodeFailure] = {}
        self.late: dict[tuple[str, int], NodeFailure] = {}
        #: Those of workers that had not ended yet.
        self.reported: set[tuple[str, int]] = set()
        #: Those that came of themselves, before the worker could know that it is to end.
        self.fell: set[tuple[str, int]] = set()
        self.dumped: set[tuple[str, int]] = set()
        #: Nodes whose host was lost and that may be started elsewhere; the attempt that was lost.
        self.moving: dict[str, int] = {}
        self._waves = _Waves(self.terms)
        self._result: ProgramResult | None = None

    @property
    def result(self) -> ProgramResult:
        assert self._result is not None, "the program continues"
        return self._result

    @property
    def over(self) -> bool:
        return self._result is not None

    @property
    def share_s(self) -> float:
        return self.notice_s / self._waves.count

    # What happens

    def __call__(self, event: Event) -> list[Action]:
        was_over, was_stopping = self.over, self.machine.stopping
        self.sound = False
        self._see(event, was_stopping=was_stopping)
        actions = self.machine.handle(event, self.now)
        assert not (was_over and actions), "acts after the end"
        if was_stopping or isinstance(event, StopAsked | KillAsked):
            assert not any(isinstance(each, Start) for each in actions), "starts while it stops"
        for action in actions:
            self._check(action)
        if self.stop_at is None and (self.machine.stopping or self.machine.over):
            self.stop_at = self.now
        self._check_waiting()
        self._check_moving()
        self.sound = True
        return actions

    def wait(self, seconds: float) -> list[Action]:
        """Lets time pass, as a supervisor does that wakes at each deadline."""
        actions: list[Action] = []
        until = self.now + seconds
        while (deadline := self.machine.deadline) is not None and deadline <= until:
            assert deadline >= self.now
            self.now = deadline
            actions += self(Tick())
        self.now = until
        return actions

    def oversleep(self, seconds: float, event: Event | None = None) -> list[Action]:
        """Lets time pass while the supervisor sees nothing of it."""
        due = self.machine.deadline
        self.now += seconds
        if due is not None and self.now > due:
            self.slept_s += seconds + OVERSLEPT_S
            if self.now - due > OVERSLEPT_S + EPS:
                self.woke_at = self.now
        return self(Tick() if event is None else event)

    def tick_to_the_end(self) -> ProgramResult:
        """No node ends by itself any more."""
        self.wait(self.notice_s + TERMINATE_S + GIVE_UP_S + EPS)
        return self.result

    # What must hold

    def _see(self, event: Event, *, was_stopping: bool) -> None:
        if isinstance(event, StopAsked | KillAsked):
            self.asked_from_outside |= not was_stopping
            if isinstance(event, KillAsked) and self.kill_at is None:
                self.kill_at = self.now
        elif isinstance(event, HostLost):
            for name in event.nodes:
                worker = self.workers.get(name)
                attempt = None if event.attempts is None else event.attempts[name]
                if worker is not None and not worker.gone and attempt in (None, worker.attempt):
                    self._see_loss(name, worker, was_stopping=was_stopping)
        elif not isinstance(event, Tick):
            worker = self.workers.get(event.node)
            if worker is not None and worker.attempt == event.attempt and not worker.gone:
                self._see_worker(worker, event, was_stopping=was_stopping)

    def _see_loss(self, name: str, worker: Worker, *, was_stopping: bool) -> None:
        worker.gone = True
        policy = self.terms[name].restart
        if was_stopping or self.over or worker.failed_at is not None:
            return
        if policy.when is RestartWhen.NEVER or not policy.moves:
            self.doomed_at = -math.inf  # nothing is to be waited for
        else:
            self.moving[name] = worker.attempt

    def _check_moving(self) -> None:
        """Who was lost and may move is restarted, or the program ends."""
        goes_on = not (self.machine.stopping or self.over)
        for name, attempt in self.moving.items():
            assert not goes_on or self.machine.restarts_of(name) > attempt, f"{name} is lost"
        waiting = [
            name
            for name, worker in self.workers.items()
            if self.machine.restarts_of(name) > worker.attempt
        ]
        assert not (goes_on and waiting) or self.machine.deadline is not None, "nobody starts them"

    def _see_worker(self, worker: Worker, event: Any, *, was_stopping: bool) -> None:
        if isinstance(event, Ended):
            worker.gone = True
            falls = self._see_fall(worker, event)
            may_be_forced = was_stopping and (
                (worker.is_forced and not falls) or worker.has_verdict
            )
            if event.failure is not None and not may_be_forced:
                self._see_failure(event, was_stopping=was_stopping)
        elif isinstance(event, Failed):
            if not (worker.is_forced or worker.has_verdict or worker.failed_at is not None):
                self._see_fall(worker, event)
                worker.failed_at = self.now
                self._see_failure(event, was_stopping=was_stopping)
                self.reported.add((event.node, event.attempt))
            self._see_leaving(worker)
        elif isinstance(event, Leaving):
            self._see_leaving(worker)
        elif isinstance(event, StopReceived):
            if not event.listens:
                worker.deaf_at = min(worker.deaf_at, self.now)
            elif not worker.calls_ended:
                worker.deaf_at = math.inf
        elif isinstance(event, Preempted):
            if worker.is_left_alone:
                worker.told_at = self.now
                never = self.terms[event.node].restart.when is RestartWhen.NEVER
                worker.has_verdict = not never and not was_stopping
                self.asked_from_outside |= never and not was_stopping
        else:
            self._see_sign(worker, event)

    def _see_failure(self, event: Ended | Failed, *, was_stopping: bool) -> None:
        assert event.failure is not None
        key = event.node, event.attempt
        if key in self.reported:
            return  # that is known
        known = self.late if was_stopping else self.fed
        known[key] = event.failure
        if not was_stopping and self.terms[event.node].restart.when is RestartWhen.NEVER:
            self.doomed_at = min(self.doomed_at, self.now)

    def _see_fall(self, worker: Worker, event: Ended | Failed) -> bool:
        key = event.node, event.attempt
        if worker.told_at is None and (event.unasked or not worker.was_asked):
            self.fell.add(key)
        return key in self.fell

    def _see_leaving(self, worker: Worker) -> None:
        worker.leaving = True
        worker.signs.clear()

    def _see_sign(self, worker: Worker, event: Constructed | Healthy | Heartbeat | Placed) -> None:
        if isinstance(event, Placed):
            worker.signs = {"startup": self.now} if event.is_there else {}
            return
        is_first = isinstance(event, Constructed)
        if is_first:
            worker.constructed = True
            worker.signs.pop("startup", None)
        if not worker.constructed or worker.leaving:
            return
        if is_first or isinstance(event, Healthy):
            worker.signs["health"] = self.now
        if is_first or isinstance(event, Heartbeat):
            worker.signs["heartbeat"] = self.now

    def _check(self, action: Action) -> None:
        assert self._result is None, "acts after the end"
        if isinstance(action, Finish):
            self._check_result(action.result)
            self._result = action.result
            return
        if isinstance(action, Start):
            self._check_start(action)
            return
        worker = self.workers[action.node]
        assert not worker.gone, f"{action} to a worker that is gone"
        if isinstance(action, RequestStop):
            self._check_asking(action.node, worker)
        elif isinstance(action, EndCalls):
            self._check_end_of_calls(worker)
        elif isinstance(action, LetGo):
            assert worker.leaving, "it has not done its work"
            assert not self.machine.stopping, "its callers may have more to hand in"
        elif isinstance(action, DumpStacks):
            self.dumped.add((action.node, worker.attempt))
        elif isinstance(action, Terminate):
            self._check_terminate(action.node, worker)
        else:
            assert isinstance(action, Kill)
            assert worker.killed_at is None, "killed twice"
            waited = worker.terminated_at is not None and (
                self.now >= worker.terminated_at + TERMINATE_S - EPS
            )
            assert waited or self.kill_at is not None, "killed too early"
            worker.killed_at = self.now

    def _check_start(self, action: Start) -> None:
        before = self.workers.get(action.node)
        assert self.stop_at is None, "starts while it stops"
        assert before is None or before.gone, "two workers for one node"
        assert action.attempt == (0 if before is None else before.attempt + 1)
        assert self.machine.restarts_of(action.node) == action.attempt
        self.workers[action.node] = Worker(action.attempt, self.now, signs={"startup": self.now})
        self.started[action.node, action.attempt] = self.now

    def _check_asking(self, name: str, worker: Worker) -> None:
        if self.stop_at is None:
            self.stop_at = self.now
        assert worker.is_left_alone, "asked, although it is leaving"
        held_until = self._held_until(name)
        assert self.now >= held_until - EPS, "asked before its caller had its time"
        before = self._waves.before(name)
        latest = self.stop_at + (before * self.share_s if before else 0.0)
        assert self.now <= latest + self.slept_s + EPS, "asked too late"
        worker.asked_at = self.now

    def _held_until(self, name: str) -> float:
        """Returns when the last of its callers has had its time, if none ends before."""
        callers = (self.workers.get(caller) for caller in self._waves.callers(name))
        held = (self._holds_until(each) for each in callers if each is not None)
        return max(held, default=-math.inf)

    def _holds_until(self, worker: Worker) -> float:
        """Returns until when a worker holds up those it calls while all stop."""
        assert self.stop_at is not None
        if worker.gone or worker.is_forced:
            return -math.inf
        latest = self.stop_at + self.notice_s
        return min(self._share_ends(worker), self._deaf_until(worker), latest)

    def _deaf_until(self, worker: Worker) -> float:
        """Returns when the time is over for which one may call that should leave, but is deaf."""
        since = worker.leaves_at
        return math.inf if since is None else max(since, worker.deaf_at + DEAF_S)

    def _share_ends(self, worker: Worker) -> float:
        if worker.leaves_at is None or self.stop_at is None:
            return math.inf
        return max(worker.leaves_at, self.stop_at) + self.share_s

    def _check_end_of_calls(self, worker: Worker) -> None:
        assert worker.leaves_at is not None, "nobody asked it to end"
        assert not worker.is_forced
        assert not worker.calls_ended, "its calls have ended before"
        over_at = min(self._deaf_until(worker), self._share_ends(worker))
        assert worker.deaf_at < math.inf, "it listens"
        assert self.now >= over_at - EPS, "its time is not over"
        worker.calls_ended = True

    def _check_terminate(self, name: str, worker: Worker) -> None:
        assert worker.terminated_at is None, "terminated twice"
        assert worker.killed_at is None
        if self.stop_at is None and worker.leaves_at is None:
            assert (name, worker.attempt) in self.dumped, "its stacks are lost"
            overdue = self._overdue(name, worker, -EPS)
            assert overdue, "it was not hung"
            is_awake = self.now >= self.woke_at + OVERSLEPT_S - EPS
            assert is_awake or max(overdue) >= self.woke_at, "the supervisor slept"
        else:
            assert worker.leaves_at is not None, "ended by force without having been asked"
            since = min(worker.leaves_at, math.inf if self.stop_at is None else self.stop_at)
            assert self.now >= since + self.notice_s - EPS, "ended by force within the notice"
        worker.terminated_at = self.now

    def _overdue(self, name: str, worker: Worker, slack_s: float) -> list[float]:
        """Returns when those signs of life were last given that should have come again."""
        liveness = self.terms[name].liveness
        limits = {
            "startup": liveness.startup_s,
            "health": liveness.health_s,
            "heartbeat": liveness.heartbeat_deadline_s,
        }
        return [
            at
            for sign, at in worker.signs.items()
            if (limit_s := limits[sign]) is not None and self.now >= at + limit_s + slack_s
        ]

    def _check_waiting(self) -> None:
        """Nothing is waited for without end."""
        assert self.machine.over == self.over
        deadline = self.machine.deadline
        if self.over:
            assert deadline is None
            return
        assert deadline is None or deadline > self.now, "time that is over is waited for"
        there = [each for each in self.workers.values() if not self._is_over(each)]
        if self.machine.stopping:
            assert there, "waits for nobody"
            forced = [each for each in there if each.is_forced]
            assert deadline is not None or (math.isinf(self.notice_s) and not forced)
            self._check_waiting_in_turn()
            return
        assert self.now < self.doomed_at + self.blame_s + self.slept_s + EPS, (
            "it has failed, and continues"
        )
        for name, worker in self.workers.items():
            since = worker.leaves_at
            if since is not None and worker.terminated_at is None and not worker.gone:
                latest = since + self.notice_s + self.slept_s + EPS
                assert self.now < latest, f"{name} is to go, and stays"
            if worker.is_left_alone:
                hung = self._overdue(name, worker, self.slept_s + EPS)
                assert not hung, f"{name} is hung, and nobody notices"
        alone = [each for each in there if each.is_left_alone]
        assert deadline is not None or alone or math.isinf(self.notice_s), "waits for nobody"

    def _check_waiting_in_turn(self) -> None:
        """While all stop, each who is not asked is held up, and who is deaf calls no more."""
        for name, worker in self.workers.items():
            if worker.is_left_alone:
                held_until = self._held_until(name) + self.slept_s + EPS
                assert self.now < held_until, f"{name} is not asked, and nobody holds it up"
            elif worker.deaf_at < math.inf and not (worker.gone or worker.is_forced):
                latest = self._deaf_until(worker) + self.slept_s + EPS
                assert worker.calls_ended or self.now < latest, f"{name} is deaf, and continues"

    def _is_over(self, worker: Worker) -> bool:
        """Whether a worker is gone, or given up."""
        if worker.gone or worker.killed_at is None:
            return worker.gone
        given_up_at = worker.killed_at + max(GIVE_UP_S, self.blame_s)
        if self.stop_at is not None:
            given_up_at = min(given_up_at, max(worker.killed_at, self.stop_at) + GIVE_UP_S)
        return self.now >= given_up_at - EPS

    def _check_result(self, result: ProgramResult) -> None:
        stop_at = self.now if self.stop_at is None else self.stop_at
        longest_s = self.notice_s + TERMINATE_S + GIVE_UP_S
        assert self.now <= stop_at + longest_s + self.slept_s + EPS, "too late"
        if self.kill_at is not None:
            assert self.now <= self.kill_at + GIVE_UP_S + self.slept_s + EPS, "too late"
        assert all(map(self._is_over, self.workers.values())), "leaves a worker behind"
        for name, worker in self.workers.items():
            forced = [each for each in (worker.terminated_at, worker.killed_at) if each is not None]
            if any(each > stop_at for each in forced):
                assert name in result.killed, "a slow node is not named"
        assert len(set(result.killed)) == len(result.killed)
        self._check_outcome(result)
        self._check_restarts(result)
        self._check_failures(result)
        self._check_callees_first(result.failures)

    def _check_failures(self, result: ProgramResult) -> None:
        keys = [(each.node, each.attempt) for each in result.failures]
        assert len(set(keys)) == len(keys), "a failure is counted twice"
        for key, known in {**self.fed, **self.late}.items():
            kept = [each for each in result.failures if (each.node, each.attempt) == key]
            again = [each for each in result.restarts if (each.node, each.attempt - 1) == key]
            said = [*kept, *(each.failure for each in again)]
            if key in self.reported:
                right = all(each and known.summary in each.summary for each in said)
                assert right, "how a worker was ended hides how it had failed"
            lives_on = key in self.late or key in self.reported or self.asked_from_outside
            never = self.terms[key[0]].restart.when is RestartWhen.NEVER
            # Who went without a word, and would have been started anew, is not missed at the end.
            went = not never and known.report is None and (key in self.late or key in self.reported)
            if (known.is_consequence or went) and lives_on and not again:
                assert len(said) <= 1
                continue  # nodes that were going already took it with them
            assert len(said) == 1 or (
                len(again) == 1 and kept == [result.failures[0]] == [again[0].failure]
            ), "a failure is lost, or counted twice"

    def _check_callees_first(self, failures: tuple[NodeFailure, ...]) -> None:
        """A node that fell never comes after one that calls it and failed just then, or later."""
        own = [each for each in failures if not each.is_consequence]
        for caller, callee in itertools.combinations(own, 2):  # as they are listed
            if (callee.node, callee.attempt) in self.fell and not caller.host_lost:
                earliest_s = 0.0 if caller.exit_status is not None else -BLAME_S
                is_close = earliest_s + EPS < caller.at_s - callee.at_s < BLAME_S - EPS
                is_below = self._waves.is_below(callee.node, caller.node)
                assert not (is_close and is_below), "a caller stands before its callee"

    def _check_outcome(self, result: ProgramResult) -> None:
        assert (result.outcome is Outcome.FAILED) == bool(result.failures)
        assert result.reason
        order = [each.is_consequence for each in result.failures]
        assert order == sorted(order), "a consequence stands before a cause"
        assert (result.outcome is Outcome.INTERRUPTED) == (result.signum is not None)
        codes = {Outcome.FAILED: 1, Outcome.INTERRUPTED: 128 + (result.signum or 0)}
        assert result.exit_code == codes.get(result.outcome, 0)

    def _check_restarts(self, result: ProgramResult) -> None:
        attempts = dict.fromkeys(self.terms, 0)
        failed: dict[str, list[float]] = {}
        for each in result.restarts:
            policy = self.terms[each.node].restart
            attempts[each.node] += 1
            assert each.attempt == attempts[each.node]
            assert policy.when is not RestartWhen.NEVER
            assert each.failure is not None or policy.when is RestartWhen.ALWAYS
            if each.failure is not None and "from outside" not in each.failure.summary:
                recent = failed.setdefault(each.node, [])
                recent.append(each.at_s)
                since = each.at_s - policy.window_s
                assert sum(at_s > since for at_s in recent) <= policy.max_restarts
                assert policy.moves or not each.failure.host_lost, "moved what is to stay"
            if (started_at := self.started.get((each.node, each.attempt))) is not None:
                waited_s = started_at - self.launched_at - each.at_s
                assert each.delay_s - EPS <= waited_s <= each.delay_s + self.slept_s + EPS


class _Waves:
    """Who stops before whom, the slow and plain way."""

    def __init__(self, terms: dict[str, NodeTerms]) -> None:
        below = {name: set(each.calls) for name, each in terms.items()}
        for middle, first in itertools.product(below, below):
            if middle in below[first]:
                below[first] |= below[middle]
        self._below = below
        self._calls = {name: set(each.calls) for name, each in terms.items()}
        self._callers = {name: self._find_callers(name) for name in terms}
        self.count = 1 + max((self.before(name) for name in terms), default=0)

    def _circle(self, name: str) -> set[str]:
        return {name} | {each for each in self._below[name] if name in self._below[each]}

    def is_below(self, name: str, caller: str) -> bool:
        """Tells whether a node is called by another, however far, and does not call it."""
        return name in self._below[caller] and caller not in self._below[name]

    def callers(self, name: str) -> set[str]:
        """Returns who calls a node, or one of its circle, and is not of it."""
        return self._callers[name]

    def _find_callers(self, name: str) -> set[str]:
        circle = self._circle(name)
        return {
            each for each, calls in self._calls.items() if each not in circle and calls & circle
        }

    def before(self, name: str) -> int:
        """Returns how many stop one after the other before a node does."""
        return max((1 + self.before(caller) for caller in self.callers(name)), default=0)


def begun(*terms: NodeTerms | str, notice_s: float = 10.0, **options: Any) -> Life:
    """Returns a life whose nodes have just been started."""
    nodes = [NodeTerms(each) if isinstance(each, str) else each for each in terms]
    life = Life(*nodes, notice_s=notice_s, **options)
    assert life(Tick()) == [Start(each.name, 0) for each in nodes]
    return life


def forced(name: str, how: type[Terminate | Kill] = Terminate) -> list[Action]:
    """Returns what is done to a node that is ended by force: first it shows where it is."""
    return [DumpStacks(name), how(name)]


def finish_of(life: Life, *events: Event) -> ProgramResult:
    for each in events:
        life(each)
    return life.result if life.over else life.tick_to_the_end()


def of(kind: type, actions: list[Action]) -> list[Any]:
    return [each for each in actions if isinstance(each, kind)]


# When a program ends


def test_nodes_are_started_at_the_first_event() -> None:
    life = Life(NodeTerms("a"), NodeTerms("b"))
    assert life.machine.deadline == life.now
    assert life(Tick()) == [Start("a", 0), Start("b", 0)]
    assert life.machine.deadline is None


def test_a_program_without_nodes_is_over_at_once() -> None:
    assert finish_of(Life(), Tick()).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("first", [StopAsked("early"), KillAsked()])
def test_a_stop_before_the_start_starts_nothing(first: Event) -> None:
    life = Life(NodeTerms("a"))
    (finish,) = life(first)
    assert isinstance(finish, Finish)
    assert finish.result.outcome is Outcome.STOPPED


def test_a_program_ends_when_all_nodes_with_something_to_run_have_ended() -> None:
    life = begun("run", "other", "serve")
    for node, runs in (("run", True), ("other", True), ("serve", False)):
        assert life(Constructed(node, 0, runs)) == []
    assert life(Ended("run", 0)) == []
    assert life(Ended("other", 0)) == [RequestStop("serve")]
    life(Ended("serve", 0))
    reason = "every node that had something to run has ended"
    assert life.result == ProgramResult(Outcome.COMPLETED, reason=reason)


def test_a_program_ends_when_those_that_ran_only_serve() -> None:
    life = begun(NodeTerms("a"), NodeTerms("b"), NodeTerms("c"))
    for name, runs in (("a", True), ("b", True), ("c", False)):
        assert life(Constructed(name, 0, runs)) == []
    assert life(Constructed("a", 0, False)) == []
    assert {type(action) for action in life(Constructed("b", 0, False))} == {RequestStop}


def test_a_node_that_is_not_constructed_yet_keeps_the_program_alive() -> None:
    life = begun("run", "late")
    life(Constructed("run", 0, True))
    assert life(Ended("run", 0)) == []
    assert life(Constructed("late", 0, False)) == [RequestStop("late")]


def test_a_program_that_only_serves_never_ends_by_itself() -> None:
    life = begun("a", "b")
    life(Constructed("a", 0, False))
    life(Constructed("b", 0, False))
    assert life.wait(1e6) == []
    assert life(Ended("a", 0)) == []
    assert life.machine.deadline is None
    assert life(StopAsked("lp.stop()")) == [RequestStop("b")]


def test_a_second_stop_changes_nothing() -> None:
    life = begun("a")
    life(StopAsked("first", 2))
    deadline = life.machine.deadline
    life.wait(5.0)
    assert life(StopAsked("second", 15)) == []
    assert life.machine.deadline == deadline
    result = finish_of(life, Ended("a", 0))
    assert (result.reason, result.signum) == ("first", 2)
    assert (result.outcome, result.exit_code) == (Outcome.INTERRUPTED, 130)


def test_asking_again_for_the_kill_does_not_put_off_the_end() -> None:
    life = begun("a")
    assert life(KillAsked()) == forced("a", Kill)
    life.now += GIVE_UP_S / 2
    assert life(KillAsked()) == []
    life.now += GIVE_UP_S / 2
    (finish,) = life(KillAsked())
    assert isinstance(finish, Finish)
    assert finish.result.killed == ("a",)


def test_stopping_asks_then_terminates_then_kills_then_gives_up() -> None:
    life = begun("good", "bad", notice_s=3.0)
    assert life(StopAsked("x")) == [RequestStop("good"), RequestStop("bad")]
    life.wait(1.0)
    assert life(Ended("good", 0)) == []
    assert life.wait(1.9) == []
    assert life.wait(0.2) == forced("bad")
    assert life.wait(TERMINATE_S) == [Kill("bad")]
    (finish,) = life.wait(GIVE_UP_S)
    assert isinstance(finish, Finish)
    assert finish.result.killed == ("bad",)
    assert finish.result.outcome is Outcome.STOPPED


def test_notice_zero_ends_nodes_by_force_at_once() -> None:
    life = begun("a", notice_s=0.0)
    assert life(StopAsked("x")) == [RequestStop("a"), *forced("a")]
    result = finish_of(life, Ended("a", 0, failure("a")))
    assert result.outcome is Outcome.STOPPED  # who is ended by force does not fail
    assert result.killed == ("a",)


def test_a_negative_notice_never_ends_nodes_by_force() -> None:
    life = begun("a", notice_s=-1.0)
    assert life(StopAsked("x")) == [RequestStop("a")]
    assert life.wait(1e9) == []
    assert life(KillAsked()) == forced("a", Kill)


# Many nodes

#: A star, and all who call all; those that end last stand last, so that who looks for one that has
#: not ended looks at all.
STAR = (*(NodeTerms(f"a{at}", calls=("z",)) for at in range(2_999)), NodeTerms("z"))
DENSE_CALLEES = tuple(f"z{at}" for at in range(300))
DENSE = (
    *(NodeTerms(f"a{at}", calls=DENSE_CALLEES) for at in range(300)),
    *map(NodeTerms, DENSE_CALLEES),
)


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how often anything of any node was looked at from now on."""
    looks = itertools.count()

    class CountedNode(_life._Node):
        def __getattribute__(self, name: str) -> Any:
            next(looks)
            return super().__getattribute__(name)

    monkeypatch.setattr(_life, "_Node", CountedNode)
    return lambda: next(looks)


@pytest.mark.parametrize("terms", [STAR, DENSE], ids=["star", "dense"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_each_event_costs_little_however_many_nodes_there_are(
    terms: tuple[NodeTerms, ...], is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = counted(monkeypatch)
    machine = ProgramLife(terms, 10.0)
    asked = [each.name for each in terms]
    assert machine.handle(Tick(), 0.0) == [Start(name, 0) for name in asked]
    for name in asked:
        machine.handle(Constructed(name, 0, True), 1.0)
    if is_stopped:
        asked = [each.node for each in of(RequestStop, machine.handle(StopAsked("x"), 2.0))]
    for name in asked:  # grows
        machine.handle(StopReceived(name, 0, listens=True), 2.0)
        for action in machine.handle(Ended(name, 0), 2.0):
            if isinstance(action, RequestStop):
                asked.append(action.node)
    assert machine.over
    assert len(asked) == len(terms)
    calls = sum(len(each.calls) for each in terms)
    assert looks() < 200 * len(terms) + 10 * calls


# In which order nodes stop

CHAIN = (NodeTerms("c"), NodeTerms("b", calls=("c",)), NodeTerms("a", calls=("b",)))


def test_callers_stop_before_those_they_call() -> None:
    life = begun(*CHAIN, notice_s=30.0)
    assert life(StopAsked("x")) == [RequestStop("a")]
    assert life(Ended("c", 0)) == []  # it may go first, if it likes to
    assert life(Ended("a", 0)) == [RequestStop("b")]
    assert len(of(Finish, life(Ended("b", 0)))) == 1


def test_a_caller_that_listens_holds_up_those_it_calls_for_its_share_of_the_notice() -> None:
    life = begun(*CHAIN, notice_s=30.0)
    life(StopAsked("x"))
    life(StopReceived("a", 0, listens=True))
    assert life.wait(9.9) == []
    assert life.wait(0.2) == [RequestStop("b")]
    assert life.wait(9.7) == []
    assert life.wait(0.2) == [RequestStop("c")]
    assert life.wait(9.8) == []
    assert life.wait(0.3) == [*forced("c"), *forced("b"), *forced("a")]


def test_a_caller_that_does_not_listen_holds_up_those_it_calls_for_a_moment_only() -> None:
    life = begun(*CHAIN, notice_s=-1.0)
    life(StopAsked("x"))
    life(StopReceived("a", 0, listens=False))
    assert life.wait(DEAF_S - EPS) == []
    life(StopReceived("a", 0, listens=False))  # saying it again does not prolong it
    assert life.wait(2 * EPS) == [EndCalls("a"), RequestStop("b")]
    life(StopReceived("a", 0, listens=False))
    assert life.wait(2 * DEAF_S) == []  # its calls have ended already


def test_a_caller_that_listens_after_all_gets_its_share_of_the_notice_back() -> None:
    life = begun(*CHAIN, notice_s=30.0)
    life(StopAsked("x"))
    life(StopReceived("a", 0, listens=False))
    life.wait(DEAF_S / 2)
    life(StopReceived("a", 0, listens=True))
    assert life.wait(10.0 - DEAF_S / 2 - EPS) == []
    assert life.wait(2 * EPS) == [RequestStop("b")]


def test_a_row_of_callers_that_are_known_to_be_deaf_is_asked_without_a_further_event() -> None:
    names = ["a", "b", "c", "d", "e"]
    life = begun(
        *(
            NodeTerms(name, calls=() if name == "e" else (names[at + 1],))
            for at, name in enumerate(names)
        )
    )
    for name in names:  # they knew it before we did
        life(StopReceived(name, 0, listens=False))
    life.wait(DEAF_S)
    actions = life(StopAsked("x"))
    assert [each.node for each in of(RequestStop, actions)] == names
    assert [each.node for each in of(EndCalls, actions)] == names


def test_a_circle_stops_together_and_after_all_who_call_into_it() -> None:
    life = begun(
        NodeTerms("x", calls=("y",)), NodeTerms("y", calls=("x",)), NodeTerms("p", calls=("x",))
    )
    assert life(StopAsked("x")) == [RequestStop("p")]
    assert life(Ended("p", 0)) == [RequestStop("x"), RequestStop("y")]


def test_without_notice_all_are_asked_before_they_are_ended_by_force() -> None:
    life = begun(*CHAIN, notice_s=0.0)
    actions = life(StopAsked("x"))
    assert {each.node for each in of(RequestStop, actions)} == {"a", "b", "c"}
    assert {each.node for each in of(Terminate, actions)} == {"a", "b", "c"}


def test_who_wakes_when_the_notice_is_over_asks_before_it_ends_by_force() -> None:
    life = begun(*CHAIN, notice_s=9.0)
    life(StopAsked("x"))
    actions = life.oversleep(20.0)
    assert {each.node for each in of(RequestStop, actions)} == {"b", "c"}
    assert {each.node for each in of(Terminate, actions)} == {"a", "b", "c"}


# Whose fault it is


def broke(node: str, *, consequence: bool = False) -> Ended:
    return Ended(node, 0, failure(node, consequence=consequence))


def fell(node: str, *, dead_s: float = 0.0) -> Ended:
    """It failed before anybody asked it to end, and was dead for a while when that was known."""
    return Ended(node, 0, failure(node), dead_s=dead_s, unasked=True)


def lingers(node: str, *, unasked: bool = False) -> Failed:
    return Failed(node, 0, failure(node), unasked)


def play(life: Life, *steps: Event | float) -> ProgramResult:
    """Has events happen, with seconds between them; nothing more happens after the last."""
    for each in steps:
        if isinstance(each, float):
            life.wait(each)
        else:
            life(each)
    return life.result if life.over else life.tick_to_the_end()


def named(result: ProgramResult) -> list[str]:
    return [each.node for each in result.failures]


#: Stays on its host.
BOUND = dataclasses.replace(AT_ONCE, moves=False)
GONE = "the host far is gone"
#: Who fails since a call was lost says so, or answers it in words of its own.
CALLS = (NodeTerms("caller", calls=("server",)), NodeTerms("server"))
RESTARTED = (CALLS[0], NodeTerms("server", restart=AT_ONCE))
CIRCLE = (NodeTerms("a", calls=("b",)), NodeTerms("b", calls=("a",)))
FAR_CALLEE = (
    NodeTerms("actor", calls=("proxy",)),
    NodeTerms("proxy", calls=("learner",)),
    NodeTerms("learner", restart=AT_ONCE),
    NodeTerms("stranger", restart=AT_ONCE),
)
MIXED = (NodeTerms("a", restart=AT_ONCE), NodeTerms("b", restart=BOUND), *map(NodeTerms, "cd"))
HANGS = NodeTerms("a", restart=AT_ONCE, liveness=Liveness(startup_s=5.0))
SERVER_HANGS = (CALLS[0], NodeTerms("server", liveness=Liveness(startup_s=5.0)))
FOLLOWS, CALLER_FOLLOWS = broke("a", consequence=True), broke("caller", consequence=True)
FAR_IS_LOST = HostLost("far", ("b",), GONE)
ABC_IS_LOST = HostLost("far", ("a", "b", "c"), GONE)
CALLER_IS_LOST = HostLost("far", ("caller",), GONE)
CALLER_WAS_KILLED = Ended("caller", 0, NodeFailure.of_exit("caller", "host", -9))


@dataclass(frozen=True)
class Case:
    """Who is named, the cause first, after events with seconds between them."""

    named: str
    steps: Sequence[Event | float]
    nodes: Sequence[NodeTerms | str] = CALLS
    notice_s: float = 10.0
    blame_s: float = BLAME_S


CASES = {
    "a consequence that is known before its cause": Case(
        "b a c", [FOLLOWS, BLAME_S / 2, broke("b"), broke("c", consequence=True)], "abc"
    ),
    "consequences alone": Case("a", [FOLLOWS], "a"),
    "a cause that becomes known while all stop": Case("b a", [FOLLOWS, BLAME_S, broke("b")], "ab"),
    "a host whose loss becomes known while all stop": Case(
        "b a", [FOLLOWS, BLAME_S, FAR_IS_LOST], "ab"
    ),
    "a host whose loss becomes known seconds after calls to it fail": Case(
        "b a", [FOLLOWS, 8.0, FAR_IS_LOST, Ended("c", 0)], "abc", blame_s=10.0
    ),
    "a cause that has been mended": Case(
        "b a",
        [FOLLOWS, 8.0, FAR_IS_LOST, BLAME_S, Ended("b", 1)],
        [NodeTerms("a", calls=("b",)), NodeTerms("b", restart=AT_ONCE)],
        blame_s=10.0,
    ),
    "a host with nodes that cannot be restarted, which stand first": Case(
        "b c a d", [broke("d", consequence=True), ABC_IS_LOST], MIXED
    ),
    "a consequence whose cause was waited for long before somebody asked for the stop": Case(
        "a", [FOLLOWS, 5.0, StopAsked("x", 2), Ended("b", 0)], "ab", blame_s=10.0
    ),
    "a failure of its own while all stop": Case(
        "a", [StopAsked("x", 2), broke("a"), Ended("b", 0)], "ab"
    ),
    "a callee far below that is started anew": Case(
        "learner actor", [broke("learner"), broke("actor", consequence=True), BLAME_S], FAR_CALLEE
    ),
    "a stranger that is started anew": Case(
        "actor", [broke("stranger"), broke("actor", consequence=True), BLAME_S], FAR_CALLEE
    ),
    "a callee that was started anew long ago": Case(
        "caller", [broke("server"), CAUSE_S + 1, CALLER_FOLLOWS, BLAME_S], RESTARTED
    ),
    "a callee that died of the stop": Case("caller server", [broke("caller"), broke("server")]),
    "a callee that was being asked when it failed of its own": Case(
        "server caller", [broke("caller"), lingers("server", unasked=True), broke("server")]
    ),
    "a callee that failed when it was asked": Case(
        "caller server", [broke("caller"), lingers("server"), broke("server")]
    ),
    "a callee that was asked after it left, before it said why": Case(
        "server caller",
        [Leaving("server", 0, True), broke("caller"), lingers("server"), broke("server")],
    ),
    "a callee that left when it was asked": Case(
        "caller server",
        [Leaving("server", 0, False), broke("caller"), lingers("server"), broke("server")],
    ),
    "a callee that left in time and was ended by force": Case(
        "caller", [Leaving("server", 0, True), broke("caller"), 1.0, broke("server")], notice_s=1.0
    ),
    "a callee that fell before it was asked, by what we did": Case(
        "server caller", [lingers("caller"), broke("server"), broke("caller")]
    ),
    "a callee that fell just after its caller failed": Case(
        "server caller", [lingers("caller"), BLAME_S - EPS, fell("server")], notice_s=30.0
    ),
    "a callee that fell long after its caller failed": Case(
        "caller server", [lingers("caller"), BLAME_S + EPS, fell("server")], notice_s=30.0
    ),
    "a callee that fell just before its caller failed": Case(
        "server caller", [broke("caller"), fell("server", dead_s=BLAME_S - EPS)]
    ),
    "a callee that fell long before its caller failed": Case(
        "caller server", [broke("caller"), fell("server", dead_s=BLAME_S + EPS)]
    ),
    "a caller that was killed after its callee fell": Case(
        "server caller", [CALLER_WAS_KILLED, 0.05, fell("server", dead_s=0.1)]
    ),
    "a caller that was killed before its callee fell": Case(
        "caller server", [CALLER_WAS_KILLED, 0.05, fell("server")]
    ),
    "the last callee of a row, while a stranger keeps its place": Case(
        "c b a stranger",
        [
            *(lingers(each, unasked=True) for each in ("a", "stranger", "b", "c")),
            *map(broke, "abc"),
        ],
        [*CHAIN, "stranger"],
    ),
    "a row of callees, the first caller of which failed long before": Case(
        "c b a",
        [
            *itertools.chain(*((lingers(each, unasked=True), 0.8 * BLAME_S) for each in "abc")),
            *map(broke, "abc"),
        ],
        CHAIN,
        notice_s=30.0,
    ),
    "a callee that followed from something itself": Case(
        "caller server",
        [broke("caller"), Ended("server", 0, failure("server", consequence=True), unasked=True)],
    ),
    "nodes that call each other, in the order in which they failed": Case(
        "a b", [broke("a"), fell("b", dead_s=0.1)], CIRCLE
    ),
    "a callee that was ended by force": Case(
        "caller", [broke("caller"), broke("server")], notice_s=0.0
    ),
    "a callee that fell before it was ended by force": Case(
        "server caller", [broke("caller"), fell("server")], notice_s=0.0
    ),
    "a callee that was asked from outside to end": Case(
        "caller server", [Preempted("server", 0, 15), lingers("caller"), fell("server")]
    ),
    "a callee that is started anew, just before": Case(
        "server caller", [fell("server"), broke("caller"), Ended("server", 1)], RESTARTED
    ),
    "a callee that is started anew, longer before": Case(
        "caller", [fell("server"), BLAME_S + EPS, broke("caller"), Ended("server", 1)], RESTARTED
    ),
    "a callee of which an earlier worker fell": Case(
        "caller server",
        [fell("server"), 60.0, broke("caller"), Ended("server", 1, failure("server", raised=True))],
        RESTARTED,
    ),
    "a lost host, before callees that fall meanwhile": Case(
        "caller server", [CALLER_IS_LOST, fell("server", dead_s=0.1)]
    ),
    "a hang that was found before the stop": Case(
        "server caller", [5.0, CALLER_FOLLOWS, BLAME_S, Ended("server", 0)], SERVER_HANGS
    ),
    "a preemption": Case(
        "server caller", [Preempted("server", 0, 15), CALLER_FOLLOWS, BLAME_S], RESTARTED
    ),
    "a node that lingers, was to be mended, and of which another failed": Case(
        "server caller", [lingers("server"), CALLER_FOLLOWS, 3.0], RESTARTED, notice_s=3.0
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_first_cause_is_named_first(case: Case) -> None:
    life = begun(*case.nodes, notice_s=case.notice_s, blame_s=case.blame_s)
    result = play(life, *case.steps)
    assert named(result) == case.named.split()
    assert result.failures[0].summary in result.reason
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)


NO_FAULTS: dict[str, tuple[Sequence[NodeTerms | str], Sequence[Event | float]]] = {
    "a consequence before somebody asks for the stop": ("ab", [FOLLOWS, StopAsked("x")]),
    "a consequence before somebody asks for the end": ("ab", [FOLLOWS, KillAsked()]),
    "a consequence of the stop": ("ab", [StopAsked("x"), FOLLOWS, Ended("b", 0)]),
    "a host that is lost while all stop": ("b", [StopAsked("x"), FAR_IS_LOST]),
    "a hang that would have been mended": ([HANGS], [5.0, StopAsked("x"), Ended("a", 0)]),
    "a failure while all stop that would have been mended": (
        [NodeTerms("a", restart=AT_ONCE)],
        [StopAsked("x"), broke("a")],
    ),
}


@pytest.mark.parametrize(("nodes", "steps"), NO_FAULTS.values(), ids=NO_FAULTS.keys())
def test_who_asks_for_the_stop_takes_what_follows_with_it(
    nodes: Sequence[NodeTerms | str], steps: Sequence[Event | float]
) -> None:
    result = play(begun(*nodes), *steps)
    assert (result.outcome, result.failures) == (Outcome.STOPPED, ())


def test_a_consequence_without_a_cause_fails_the_program_after_a_moment() -> None:
    life = begun("a", "b")
    assert life(FOLLOWS) == []
    assert life.wait(BLAME_S) == [DumpStacks("b"), RequestStop("b")]
    result = finish_of(life, Ended("b", 0))
    assert result.failures == (failure("a", consequence=True),)


def test_the_failure_of_a_callee_dates_from_its_death() -> None:
    life = begun(*CALLS)
    # What it started would not end.
    result = play(life, 5.0, broke("caller"), 2.0, fell("server", dead_s=2.1))
    assert named(result) == ["server", "caller"]
    assert result.failures[0].at_s == pytest.approx(4.9)


def test_failures_know_their_attempt_and_time() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy(max_restarts=1, backoff_s=0)))
    life.wait(3.0)
    life(Ended("a", 0, failure("a")))
    life.wait(4.0)
    result = finish_of(life, Ended("a", 1, failure("a")))
    assert [(each.attempt, each.at_s) for each in result.failures] == [(1, 7.0)]


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


# Hosts


@pytest.mark.parametrize("policy", [NEVER, BOUND, RestartPolicy("always", max_restarts=0)])
def test_a_lost_host_fails_nodes_that_cannot_be_restarted_and_stops_the_others(
    policy: RestartPolicy,
) -> None:
    life = begun("a", NodeTerms("b", restart=policy), "c")
    life(Ended("a", 0))
    lost = HostLost("far", ("a", "b"), GONE)
    assert life(lost) == [DumpStacks("c"), RequestStop("c")]
    assert life(lost) == []
    result = finish_of(life, Ended("c", 0))
    assert result.failures == (NodeFailure("b", "far", GONE, host_lost=True),)
    assert result.reason == GONE


def test_nodes_of_a_lost_host_are_started_anew_like_those_that_failed() -> None:
    policy = RestartPolicy("on_failure", max_restarts=1, backoff_s=1.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy), "b")
    assert life(HostLost("far", ("a",), GONE)) == []
    assert life(Ended("a", 0, failure("a"))) == []  # said by the worker that was lost
    (start,) = life.wait(1.0)
    assert start == Start("a", 1)
    assert start.cause == NodeFailure("a", "far", GONE, host_lost=True)
    life(Ended("a", 1, failure("a")))  # that is one too many
    result = finish_of(life, Ended("b", 0))
    assert [each.summary for each in result.failures] == ["a broke"]
    assert [each.failure for each in result.failures[0].restarts] == [start.cause]


def test_nothing_is_done_to_workers_of_a_lost_host() -> None:
    slow = RestartPolicy(backoff_s=1000.0, max_backoff_s=1000.0)
    life = begun(NodeTerms("a", restart=slow), "b")
    life(HostLost("far", ("a",), GONE))
    assert life(KillAsked()) == forced("b", Kill)
    assert finish_of(life, Ended("b", 0)).outcome is Outcome.STOPPED


def test_the_loss_of_a_host_does_not_touch_nodes_that_were_started_elsewhere_since() -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE), "b")
    assert life(Ended("a", 0, failure("a"))) == [Start("a", 1)]
    assert life(HostLost("far", ("a",), GONE, {"a": 0})) == []
    assert life(HostLost("far", ("a",), GONE, {"a": 1})) == [Start("a", 2)]


@pytest.mark.parametrize(("policy", "goes_on"), [(True, True), (False, False)])
def test_a_node_that_waits_for_its_restart_when_its_host_is_lost_needs_no_other(
    policy: bool, goes_on: bool
) -> None:
    slow = RestartPolicy(max_restarts=1, backoff_s=5.0, jitter=0.0, moves=policy)
    life = begun(NodeTerms("a", restart=slow), "b")
    life(Ended("a", 0, failure("a")))
    life(HostLost("far", ("a",), GONE, {"a": 0}))
    assert life.machine.stopping is not goes_on
    if goes_on:
        assert life.wait(5.0) == [Start("a", 1)]
    else:
        (failed,) = finish_of(life, Ended("b", 0)).failures
        assert (failed.summary, failed.restarts) == (GONE, ())


def test_a_node_for_which_no_host_is_left_fails_the_program_whatever_its_policy() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy("always", 1000, backoff_s=0.0)), "b")
    assert life(HostLost("far", ("a",), GONE)) == [Start("a", 1)]
    life(Ended("a", 1, failure("a", text="fits no host"), for_good=True))
    (failed,) = finish_of(life, Ended("b", 0)).failures
    assert failed.summary == "a fits no host"
    assert failed.restarts == ()


def test_nodes_that_were_told_to_go_before_their_host_went_did_not_fail() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy(max_restarts=1, backoff_s=0.0)), "b")
    life(Preempted("a", 0, 15))
    assert life(HostLost("far", ("a",), GONE)) == [Start("a", 1)]
    assert life(HostLost("near", ("a",), GONE)) == [Start("a", 2)]
    why = [
        each.failure.summary for each in finish_of(life, StopAsked("x")).restarts if each.failure
    ]
    assert why == ["it was asked from outside to end, by SIGTERM", GONE]


def test_a_node_that_looked_hung_since_its_host_was_silent_is_started_elsewhere() -> None:
    terms = NodeTerms("a", restart=AT_ONCE, liveness=Liveness(startup_s=2.0))
    life = begun(terms, "b", blame_s=10.0)
    life.wait(8.0)
    (start,) = life(HostLost("far", ("a",), GONE))
    assert start == Start("a", 1)
    assert start.cause == NodeFailure("a", "far", GONE, at_s=8.0, host_lost=True)


# How it reads


def test_the_loss_of_a_host_is_told_once_however_many_nodes_were_on_it() -> None:
    nodes = [f"actor[{index}]" for index in range(20)]
    life = begun(*nodes, "learner[0]")
    life(HostLost("far", tuple(nodes), GONE))
    failures = finish_of(life, Ended("learner[0]", 0, failure("learner[0]"))).failures
    text = str(NodeFailedError(failures[0], failures[1:]))
    assert text.startswith(f"20 nodes on far failed: {GONE}\n")
    assert text.count(GONE) == 1
    assert all(node in text for node in nodes)
    followed = str(NodeFailedError(failures[-1], failures[:-1])).partition("What followed:")[2]
    assert followed == f"\n  actor[0], actor[1], actor[2] and 17 more on far failed: {GONE}"


def test_nodes_that_are_lost_with_their_last_restart_show_their_history() -> None:
    once = RestartPolicy(max_restarts=1, backoff_s=0.0)
    life = begun(NodeTerms("a", restart=once), "b")
    life(Ended("a", 0, failure("a")))
    life(HostLost("far", ("a", "b"), GONE))
    text = str(NodeFailedError(life.result.failures[0], life.result.failures[1:]))
    assert "a: Its restart policy allows no more than 1" in text
    assert "a broke" in text


# Restarts


def test_a_node_that_fails_is_restarted_after_a_back_off_that_grows() -> None:
    policy = RestartPolicy("on_failure", max_restarts=3, backoff_s=1.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy), "b")
    for attempt, delay_s in enumerate([1.0, 2.0, 4.0]):
        assert life(Ended("a", attempt, failure("a"))) == []
        assert life.machine.restarts_of("a") == attempt + 1
        assert life.wait(delay_s - EPS) == []
        assert life.wait(2 * EPS) == [Start("a", attempt + 1)]


def test_a_node_that_fails_too_often_fails_the_program_with_its_history() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy(max_restarts=2, backoff_s=0.0)), "b")
    texts = ["first", "second", "third"]
    for attempt, text in enumerate(texts):
        life(Ended("a", attempt, failure("a", text=text)))
    result = finish_of(life, Ended("b", 0))
    (failed,) = result.failures
    assert failed.summary == "a third"
    assert failed.restarts == result.restarts
    before = [each.failure.summary for each in result.restarts if each.failure is not None]
    assert before == ["a first", "a second"]
    assert "no more than 2" in failed.describe()


def test_failures_that_are_longer_ago_than_the_window_are_forgotten() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=10.0, backoff_s=0.0)
    life = begun(NodeTerms("a", restart=policy))
    for attempt in range(5):
        assert life(Ended("a", attempt, failure("a"))) == [Start("a", attempt + 1)]
        life.wait(10.1)
    assert len(finish_of(life, StopAsked("x"), Ended("a", 5)).restarts) == 5


def test_a_node_that_ended_well_is_restarted_only_if_it_always_is() -> None:
    always = RestartPolicy("always", max_restarts=0, backoff_s=0.0)
    life = begun(NodeTerms("always", restart=always), NodeTerms("a", restart=AT_ONCE))
    for attempt in range(5):
        life(Constructed("always", attempt, True))
        assert life(Ended("always", attempt)) == [Start("always", attempt + 1)]
    assert life(Ended("a", 0)) == []
    assert not life.machine.stopping
    result = finish_of(life, Ended("always", 5, failure("always")))
    assert [each.failure for each in result.restarts] == [None] * 5
    assert result.outcome is Outcome.FAILED


def test_failures_before_the_window_do_not_delay_restarts_of_a_node_that_ended_well() -> None:
    policy = RestartPolicy("always", window_s=10.0, backoff_s=1.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy))
    for attempt in range(3):
        life(Ended("a", attempt, failure("a")))
        life.wait(4.0)
    life.wait(100.0)
    life(Ended("a", 3))
    assert life.wait(1.0) == [Start("a", 4)]


def test_a_node_that_ends_well_at_once_again_and_again_is_restarted_ever_later() -> None:
    policy = RestartPolicy("always", max_restarts=0, backoff_s=1.0, max_backoff_s=5.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy))
    for attempt, delay_s in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        life(Ended("a", attempt))
        assert life.wait(delay_s - EPS) == []
        assert life.wait(2 * EPS) == [Start("a", attempt + 1)]
    life.wait(5.0)  # now it has run for long
    for attempt, delay_s in enumerate([1.0, 1.0, 2.0], start=5):
        life(Ended("a", attempt))
        assert life.wait(delay_s) == [Start("a", attempt + 1)]


def test_what_an_earlier_worker_says_is_not_taken_for_the_new_ones() -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE, liveness=Liveness(startup_s=5.0)))
    assert life(Ended("a", 0, failure("a"))) == [Start("a", 1)]
    for stale in (Ended("a", 0), Ended("a", 0, failure("a")), Preempted("a", 0, 15)):
        assert life(stale) == []
    life(Constructed("a", 0, True))
    assert DumpStacks("a") in life.wait(5.0)


def test_a_node_that_waits_for_its_restart_is_not_started_once_the_program_stops() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy(backoff_s=5.0)), "b")
    life(Ended("a", 0, failure("a")))
    assert life(StopAsked("x")) == [RequestStop("b")]
    assert life.wait(6.0) == []
    result = finish_of(life, Ended("b", 0))
    assert result.outcome is Outcome.STOPPED
    assert len(result.restarts) == 1


# Workers that take long to end after the node failed: threads go on, exit functions wait


def test_a_failed_node_that_never_ends_by_itself_does_not_keep_the_program_from_failing() -> None:
    life = begun("a", "b", notice_s=3.0)
    assert life(Failed("a", 0, failure("a"))) == [
        DumpStacks("a"),
        DumpStacks("b"),
        RequestStop("b"),
    ]
    life(Ended("b", 0))
    assert life.wait(3.0) == [Terminate("a")]
    assert life.wait(TERMINATE_S) == [Kill("a")]
    result = finish_of(life, Ended("a", 0, failure("a", text="was killed")))
    assert [each.summary for each in result.failures] == ["a broke"]
    assert "a broke" in result.reason
    assert result.killed == ("a",)


def test_a_failed_node_that_lingers_is_ended_by_force_after_the_notice_and_restarted_once() -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=0.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy), "b", notice_s=3.0)
    for _ in range(2):
        assert life(Failed("a", 0, failure("a"))) == []
    assert life.wait(3.0 - EPS) == []
    assert life.wait(2 * EPS) == forced("a")
    assert life.wait(TERMINATE_S) == [Kill("a")]
    assert life(Ended("a", 0, failure("a", text="was killed"))) == [Start("a", 1)]
    (restart,) = finish_of(life, StopAsked("x"), Ended("a", 1), Ended("b", 0)).restarts
    assert restart.failure is not None
    assert restart.failure.summary == "a broke"


@pytest.mark.parametrize("ended", [None, failure("a"), failure("a", text="was killed")])
def test_a_failure_that_is_told_again_at_the_end_counts_once(ended: NodeFailure | None) -> None:
    life = begun("a", "b")
    life.wait(2.0)
    for _ in range(2):
        life(Failed("a", 0, failure("a")))
    life.wait(1.0)
    (failed,) = finish_of(life, Ended("a", 0, ended), Ended("b", 0)).failures
    assert (failed.summary, failed.at_s) == ("a broke", 2.0)


@pytest.mark.parametrize("ended", [None, failure("a")])
def test_a_failed_node_that_ends_by_itself_is_restarted_once_it_has(
    ended: NodeFailure | None,
) -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE))
    assert life(Failed("a", 0, failure("a"))) == []
    assert life.wait(5.0) == []
    assert life(Ended("a", 0, ended)) == [Start("a", 1)]
    assert life.wait(100.0) == []  # nothing of the notice is left


def test_failures_of_nodes_that_linger_count_for_the_policy() -> None:
    life = begun(NodeTerms("a", restart=RestartPolicy(max_restarts=1, backoff_s=0.0)), "b")
    life(Failed("a", 0, failure("a", text="first")))
    life(Ended("a", 0, failure("a", text="first")))
    assert RequestStop("b") in life(Failed("a", 1, failure("a", text="second")))
    (failed,) = finish_of(life, Ended("a", 1), Ended("b", 0)).failures
    assert failed.summary == "a second"
    assert [each.failure.summary for each in failed.restarts if each.failure] == ["a first"]


@pytest.mark.parametrize("ended", [None, failure("a", text="was killed")])
def test_a_failure_while_all_stop_counts_even_if_the_worker_is_ended_by_force(
    ended: NodeFailure | None,
) -> None:
    life = begun("a", notice_s=3.0)
    life(StopAsked("x"))
    for _ in range(2):
        assert life(Failed("a", 0, failure("a"))) == []
    assert life.wait(3.0) == forced("a")
    result = finish_of(life, Ended("a", 0, ended))
    assert [each.summary for each in result.failures] == ["a broke"]
    assert result.outcome is Outcome.FAILED


@pytest.mark.parametrize("ended", [None, failure("a", text="was killed")])
def test_a_failure_that_was_to_be_mended_when_somebody_asked_for_the_stop_counts(
    ended: NodeFailure | None,
) -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE), notice_s=3.0)
    life(Failed("a", 0, failure("a", raised=True)))
    life.wait(1.0)
    assert life(StopAsked("x")) == []
    assert life.wait(2.0) == forced("a")  # its notice began when it failed
    result = finish_of(life, Ended("a", 0, ended))
    assert [each.summary for each in result.failures] == ["a broke"]
    assert result.restarts == ()


@pytest.mark.parametrize("why", [Preempted("a", 0, 15), Tick()])
def test_a_failure_of_a_node_that_is_being_ended_already_says_nothing_new(why: Event) -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE, liveness=Liveness(startup_s=5.0)))
    life.wait(0.0 if isinstance(why, Preempted) else 5.0)
    life(why)
    assert life(Failed("a", 0, failure("a"))) == []
    assert life(Ended("a", 0, failure("a"))) == [Start("a", 1)]
    (restart,) = finish_of(life, StopAsked("x"), Ended("a", 1)).restarts
    assert restart.failure is not None
    assert "broke" not in restart.failure.summary


# Hung nodes


def limited(name: str, restart: RestartPolicy = NEVER, **limits: Any) -> NodeTerms:
    return NodeTerms(name, restart=restart, liveness=Liveness(**limits))


@pytest.mark.parametrize(
    ("limit", "sign", "text"),
    [
        ("startup_s", None, "its constructor took longer than 5 s"),
        ("health_s", Healthy("a", 0), "it answered no health check for 5 s"),
        ("heartbeat_s", Heartbeat("a", 0), "it did not call lp.heartbeat() for 5 s"),
    ],
)
def test_a_hung_node_shows_its_stacks_and_is_ended_by_force(
    limit: str, sign: Event | None, text: str
) -> None:
    life = begun(limited("a", NEVER, **{limit: 5.0}))
    if sign is not None:
        life(Constructed("a", 0, True))
        for _ in range(5):
            assert life.wait(4.9) == []
            life(sign)
    assert life.wait(4.9) == []
    assert life.wait(0.4) == forced("a")
    assert life.wait(TERMINATE_S) == [Kill("a")]
    result = finish_of(life, Ended("a", 0, failure("a"), stacks="in a loop"))
    assert text in result.failures[0].summary
    assert result.failures[0].stacks == "in a loop"


def test_a_hung_node_is_restarted_by_its_policy() -> None:
    life = begun(limited("a", AT_ONCE, startup_s=5.0))
    life.wait(5.0)
    assert life(Ended("a", 0)) == [Start("a", 1)]
    assert life.wait(4.9) == []
    assert life.wait(0.2) == forced("a")


def test_a_hung_node_that_cannot_be_ended_fails_the_program_and_is_not_restarted() -> None:
    life = begun(limited("thread", AT_ONCE, startup_s=5.0), "b")
    actions = life.wait(5.0 + TERMINATE_S + GIVE_UP_S)
    assert of(Start, actions) == []
    assert RequestStop("b") in actions
    result = finish_of(life, Ended("b", 0))
    assert "cannot be ended by force" in result.reason


def test_signs_that_come_too_late_do_not_save_a_hung_node() -> None:
    life = begun(limited("a", startup_s=5.0))
    life.wait(5.0)
    life(Constructed("a", 0, True))
    assert life.wait(TERMINATE_S) == [Kill("a")]


def test_a_node_that_waits_for_its_turn_to_stop_need_not_show_that_it_goes_on() -> None:
    life = begun(NodeTerms("actor", calls=("replay",)), limited("replay", heartbeat_s=1.0))
    life(Constructed("replay", 0, False))
    life(StopAsked("x"))
    assert life.wait(4.9) == []
    assert life(Ended("actor", 0)) == [RequestStop("replay")]


@pytest.mark.parametrize("goes", [Leaving("a", 0), Failed("a", 0, failure("a"))])
def test_a_node_on_its_way_out_need_not_show_that_it_lives(goes: Event) -> None:
    life = begun(limited("a", AT_ONCE, health_s=2.0, heartbeat_s=2.0, startup_s=2.0), "b")
    life(Constructed("a", 0, True))
    life.wait(1.0)
    life(goes)
    for late in (Constructed("a", 0, True), Healthy("a", 0), Heartbeat("a", 0)):
        life(late)
    assert life.wait(9.9) == []
    assert life(Ended("a", 0, failure("a"))) == [Start("a", 1)]
    assert DumpStacks("a") in life.wait(2.1)  # the new one must show it


def test_a_node_that_leaves_keeps_the_program_alive_and_is_asked_to_end_in_its_turn() -> None:
    life = begun(*CHAIN)
    for name in ("a", "b", "c"):
        life(Constructed(name, 0, True))
        assert life(Leaving(name, 0)) == [LetGo(name)]
    assert life.wait(100.0) == []
    assert life(StopAsked("x")) == [RequestStop("a")]


def test_a_node_that_leaves_while_all_stop_serves_on_until_its_callers_have_ended() -> None:
    life = begun(*CHAIN, notice_s=90.0)
    for name in ("a", "b", "c"):
        life(Constructed(name, 0, True))
    life(StopAsked("lp.stop() in b[0]"))
    assert life(Leaving("b", 0)) == []
    assert life(Ended("a", 0)) == [RequestStop("b")]


def test_who_ends_by_a_call_that_fails_while_all_stop_is_named_and_did_not_fail() -> None:
    life = begun("a", "b", "c")
    life(Failed("a", 0, failure("a", consequence=True)))
    life(StopAsked("x"))
    life(CutShort("b", 0, failure("b", consequence=True)))
    result = finish_of(
        life, Ended("a", 0), Ended("b", 0), Ended("c", 0, failure("c", consequence=True))
    )
    assert [each.node for each in result.cut_short] == ["a", "b", "c"]
    assert (result.outcome, result.failures, result.exit_code) == (Outcome.STOPPED, (), 0)


def test_a_constructor_takes_no_time_while_its_node_has_no_host() -> None:
    life = begun(limited("a", AT_ONCE, startup_s=5.0))
    life(Placed("a", 0, is_there=False))
    assert life.wait(100.0) == []
    life(Placed("a", 0, is_there=True))
    assert life.wait(4.9) == []
    assert DumpStacks("a") in life.wait(0.2)


@pytest.mark.parametrize("awake_s", [0.0, 3.0, 4.9])
@pytest.mark.parametrize("asleep_s", [4.5, 5.05, 5.5, 60.0, 1e6])
def test_a_supervisor_that_overslept_takes_no_node_for_hung(
    awake_s: float, asleep_s: float
) -> None:
    life = begun(limited("a", health_s=5.0), limited("b", health_s=5.0))
    for name in ("a", "b"):
        life(Constructed(name, 0, True))
    life.wait(awake_s)
    # What the nodes said meanwhile is heard one after the other.
    assert life.oversleep(asleep_s, Healthy("a", 0)) == []
    life.now += 0.01
    assert life(Healthy("b", 0)) == []
    assert life.wait(4.9) == []
    assert Terminate("a") in life.wait(0.2)


def test_after_a_suspension_nodes_have_as_much_time_left_as_before() -> None:
    life = begun(limited("a", health_s=50.0))
    life(Constructed("a", 0, True))
    life.wait(10.0)
    assert life.oversleep(39.0) == []  # all slept, the node too
    assert life.wait(38.0) == []
    assert DumpStacks("a") in life.wait(5.0)


def test_somebody_looks_now_and_then_as_long_as_nodes_have_limits() -> None:
    life = begun(limited("a", health_s=50.0))
    life(Constructed("a", 0, True))
    assert life.machine.deadline == life.now + LOOK_S


# Preemption


def test_a_preempted_node_without_a_policy_stops_the_program_in_order() -> None:
    life = begun(*CHAIN)
    assert life(Preempted("c", 0, 15)) == [RequestStop("a")]
    assert life(Preempted("c", 0, 15)) == []
    assert life(Ended("a", 0)) == [RequestStop("b")]  # c asks itself
    result = finish_of(life, Ended("b", 0), Ended("c", 0))
    assert (result.outcome, result.exit_code) == (Outcome.INTERRUPTED, 143)
    assert result.reason == "SIGTERM to c"


@pytest.mark.parametrize("ended", [None, failure("a"), failure("a", consequence=True)])
def test_a_preempted_node_with_a_policy_leaves_and_is_restarted(ended: NodeFailure | None) -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE), "b")
    assert life(Preempted("a", 0, 15)) == []
    life.wait(9.0)
    assert life(Ended("a", 0, ended)) == [Start("a", 1)]
    life(StopAsked("x"))
    (restart,) = finish_of(life, Ended("a", 1), Ended("b", 0)).restarts
    assert restart.failure is not None
    assert restart.failure.summary == "it was asked from outside to end, by SIGTERM"
    assert not restart.failure.is_consequence


def test_a_preemption_is_no_failure_that_counts() -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=1.0, jitter=0.0)
    life = begun(NodeTerms("a", restart=policy), "b")
    for attempt in range(5):
        life(Preempted("a", attempt, 15))
        life(Ended("a", attempt))
        assert life.wait(1.0) == [Start("a", attempt + 1)]
    life(Ended("a", 5, failure("a")))
    assert life.wait(1.0) == [Start("a", 6)]
    life(Ended("a", 6, failure("a")))
    (failed,) = finish_of(life, Ended("b", 0)).failures
    assert [restart.attempt for restart in failed.restarts] == [6]


def test_a_preempted_node_that_does_not_leave_is_ended_by_force_and_restarted() -> None:
    life = begun(NodeTerms("a", restart=AT_ONCE), notice_s=3.0)
    life(Preempted("a", 0, 15))
    assert life.wait(3.0) == forced("a")
    assert life.wait(TERMINATE_S) == [Kill("a")]
    assert life(Ended("a", 0)) == [Start("a", 1)]


def test_a_node_that_was_killed_before_the_stop_and_given_up_after_it_is_named() -> None:
    life = begun(NodeTerms("thread", restart=AT_ONCE), notice_s=3.0)
    life(Preempted("thread", 0, 15))
    life.wait(3.0 + TERMINATE_S)
    life(StopAsked("x"))
    assert life.tick_to_the_end().killed == ("thread",)


def test_how_an_earlier_worker_heard_the_stop_says_nothing_of_the_new_one() -> None:
    life = begun(NodeTerms("server"), NodeTerms("actor", calls=("server",), restart=AT_ONCE))
    life(Preempted("actor", 0, 15))
    life(StopReceived("actor", 0, listens=False))
    life(Ended("actor", 0))
    life.wait(60.0)
    life(Preempted("actor", 1, 15))
    assert life(StopAsked("x")) == []
    assert life.wait(4.9) == []
    assert life.wait(0.2) == [RequestStop("server")]


# By property

NAMES = ("a", "b", "c", "d", "e")
names = st.sampled_from(NAMES)
policies = st.one_of(
    st.just(NEVER),
    st.builds(
        RestartPolicy,
        when=st.sampled_from(["on_failure", "always"]),
        max_restarts=st.sampled_from([0, 1, 2, 5]),
        window_s=st.sampled_from([2.0, 600.0, math.inf]),
        backoff_s=st.sampled_from([0.1, 0.0, 1.0]),
        max_backoff_s=st.sampled_from([30.0, 0.5]),
        jitter=st.sampled_from([0.2, 0.0, 1.0]),
        moves=st.sampled_from([True, True, False]),
    ),
)
limits = st.sampled_from([None, None, 0.3, 2.0, 8.0])
livenesses = st.builds(Liveness, health_s=limits, heartbeat_s=limits, startup_s=limits)
notices = st.sampled_from([10.0, 0.0, 0.3, -1.0, 2.0])
signals = st.sampled_from([None, 2, 15])
blames = st.sampled_from([BLAME_S, 10.0])
HOSTS = ("h1", "h2", "h3")


class Places:
    """On which host each worker is: on one that is not lost, as long as there is one."""

    def __init__(self) -> None:
        self._left = list(HOSTS)
        self._host: dict[str, str] = {}

    def place(self, start: Start) -> bool:
        """Finds a host; tells whether there is one."""
        if self._left:
            self._host[start.node] = self._left[(ord(start.node) + start.attempt) % len(self._left)]
        return bool(self._left)

    def lose(self, host: str, living: dict[str, int]) -> HostLost:
        """Returns what is told of the loss of a host; `living`: the attempts of all workers."""
        self._left = [each for each in self._left if each != host]
        lost = {name: attempt for name, attempt in living.items() if self._host[name] == host}
        return HostLost(host, tuple(lost), f"{host} is gone", lost)


def no_host(start: Start) -> Ended:
    return Ended(start.node, start.attempt, failure(start.node, text="no host"), for_good=True)


@st.composite
def programs(draw: st.DrawFn) -> list[NodeTerms]:
    """Programs of some nodes that call each other, in circles too."""
    members = NAMES[: draw(st.integers(1, len(NAMES)))]
    calls = st.lists(st.sampled_from(members), max_size=3).map(tuple)
    return [
        NodeTerms(name, "host", draw(calls), draw(policies), draw(livenesses)) for name in members
    ]


class AnyOrder(RuleBasedStateMachine):
    """A world in which everything may happen at any time, is told late, twice, or out of order.

    `Life` checks; so does the world that no second worker of a node lives beside the first.
    """

    @initialize(terms=programs(), notice_s=notices, blame_s=blames, seed=st.integers(0, 3))
    def begin(self, terms: list[NodeTerms], notice_s: float, blame_s: float, seed: int) -> None:
        chance = random.Random(seed).random
        self.life = Life(*terms, notice_s=notice_s, blame_s=blame_s, chance=chance)
        self.places = Places()
        self.names = [each.name for each in terms]
        #: The attempt of each node of which a worker really lives.
        self.living: dict[str, int] = {}
        self.outbox: list[Event] = []
        self.heard: list[Event] = []
        if seed:
            self._tell(Tick())

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.node not in self.living, "two live workers for one node"
                if self.places.place(action):
                    self.living[action.node] = action.attempt
                else:
                    self.outbox.append(no_host(action))

    def _tell(self, event: Event) -> None:
        self.heard.append(event)
        self._obey(self.life(event))

    def _say(self, event: Event, at_once: bool) -> None:
        if at_once:
            self._tell(event)
        else:
            self.outbox.append(event)

    def _pick(self, name: str) -> tuple[str, int] | None:
        living = sorted(self.living.items())
        return living[NAMES.index(name) % len(living)] if living else None

    @rule(
        name=names,
        how=st.sampled_from(["well", "failed", "raised", "consequence"]),
        dead_s=st.sampled_from([0.0, 0.1, 0.6]),
        at_once=st.booleans(),
    )
    def a_worker_ends(self, name: str, how: str, dead_s: float, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            node, attempt = picked
            del self.living[node]
            failed = None
            if how != "well":
                failed = failure(node, consequence=how == "consequence", raised=how == "raised")
            unasked = not self.life.workers[node].was_asked
            self._say(Ended(node, attempt, failed, dead_s=dead_s, unasked=unasked), at_once)

    @rule(name=names, consequence=st.booleans(), raised=st.booleans(), at_once=st.booleans())
    def a_worker_reports_its_failure_and_lingers(
        self, name: str, consequence: bool, raised: bool, at_once: bool
    ) -> None:
        if (picked := self._pick(name)) is not None:
            failed = failure(picked[0], consequence=consequence, text="broke early", raised=raised)
            unasked = not self.life.workers[picked[0]].was_asked
            self._say(Failed(*picked, failed, unasked), at_once)

    @rule(name=names, at_once=st.booleans())
    def a_worker_has_done_its_work_and_lingers(self, name: str, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            self._say(Leaving(*picked), at_once)

    @rule(name=names, runs=st.booleans(), at_once=st.booleans())
    def a_worker_is_constructed(self, name: str, runs: bool, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            self._say(Constructed(*picked, runs), at_once)

    @rule(name=names, kind=st.sampled_from([Healthy, Heartbeat]), at_once=st.booleans())
    def a_worker_shows_that_it_lives(self, name: str, kind: Any, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            self._say(kind(*picked), at_once)

    @rule(name=names, listens=st.booleans(), at_once=st.booleans())
    def a_worker_hears_the_stop(self, name: str, listens: bool, at_once: bool) -> None:
        picked = self._pick(name)
        if picked is not None and not self.life.workers[picked[0]].is_left_alone:
            self._say(StopReceived(*picked, listens), at_once)

    @rule(name=names, signum=st.sampled_from([2, 15]), at_once=st.booleans())
    def a_worker_is_preempted(self, name: str, signum: int, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            self._say(Preempted(*picked, signum), at_once)

    @precondition(lambda self: self.outbox)
    @rule(index=st.integers(0, 1000))
    def news_arrive(self, index: int) -> None:
        self._tell(self.outbox.pop(index % len(self.outbox)))

    def _old_news(self) -> list[Any]:
        attempts = {name: worker.attempt for name, worker in self.life.workers.items()}
        kinds = (Constructed, Leaving, Failed, Ended, Healthy, Heartbeat, Preempted, StopReceived)
        told = [each for each in self.heard if isinstance(each, kinds)]
        return [each for each in told if each.attempt < attempts[each.node]]

    @precondition(lambda self: self._old_news())
    @rule(index=st.integers(0, 1000))
    def news_of_an_earlier_worker_arrive_again(self, index: int) -> None:
        old = self._old_news()
        self._obey(self.life(old[index % len(old)]))

    @precondition(lambda self: self.heard)
    @rule(index=st.integers(0, 1000))
    def news_arrive_again(self, index: int) -> None:
        event = self.heard[index % len(self.heard)]
        if not isinstance(event, StopAsked | KillAsked):
            self._obey(self.life(event))

    @rule(host=st.sampled_from(HOSTS), rare=st.integers(0, 3), at_once=st.booleans())
    def a_host_is_lost(self, host: str, rare: int, at_once: bool) -> None:
        if rare == 0:
            event = self.places.lose(host, self.living)
            for name in event.nodes:
                del self.living[name]
            self._say(event, at_once)

    @rule(signum=signals, rare=st.integers(0, 3))
    def somebody_stops_the_program(self, signum: int | None, rare: int) -> None:
        if rare == 0:
            self._tell(StopAsked("asked", signum))

    @rule(rare=st.integers(0, 7))
    def somebody_kills_the_program(self, rare: int) -> None:
        if rare == 0:
            self._tell(KillAsked())

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 1.0, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self._obey(self.life.wait(seconds))

    @rule(seconds=st.sampled_from([0.1, 0.9, 2.0, 100.0]), rare=st.integers(0, 1))
    def the_supervisor_oversleeps(self, seconds: float, rare: int) -> None:
        if rare == 0:
            self._obey(self.life.oversleep(seconds))

    @invariant()
    def nobody_lives_unknown(self) -> None:
        for node, attempt in self.living.items():
            assert self.life.workers[node].attempt == attempt

    def teardown(self) -> None:
        """Whatever happened, a stop leads to the end, even if no worker ever ends by itself."""
        if not hasattr(self, "life") or not self.life.sound:
            return
        life = self.life
        self._tell(StopAsked("the end"))
        life.wait(30.0)
        if math.isinf(life.notice_s) and not life.over:
            self._tell(KillAsked())
            life.wait(GIVE_UP_S)
        result = life.result
        tell(f"{result.outcome}")
        assert life.machine.handle(Tick(), life.now) == []


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_happens_in_whichever_order_all_promises_hold(examples: int) -> None:
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(max_examples=examples, stateful_step_count=40),
    )
