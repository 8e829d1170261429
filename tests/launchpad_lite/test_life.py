"""The state machine of a program's life: by example, and by property in worlds that misbehave."""

import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from courier import ExceptionReport
from launchpad_lite.life import program_life
from launchpad_lite.life._order import StopOrder
from launchpad_lite.life.events import (
    Action,
    Constructed,
    CutShort,
    Debugged,
    DumpStacks,
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
    Placed,
    Preempted,
    RequestStop,
    Start,
    StopAsked,
    StopReceived,
    Tell,
    Terminate,
    Tick,
)
from launchpad_lite.life.policies import NEVER, Liveness, RestartPolicy, RestartWhen
from launchpad_lite.life.program_life import NodeTerms, ProgramLife
from launchpad_lite.life.result import NodeFailure, Outcome, ProgramResult
from launchpad_lite.life.timing import DEFAULT

TERMINATE_S, GIVE_UP_S = DEFAULT.terminate_s, DEFAULT.give_up_s
BLAME_S, DEAF_S = DEFAULT.blame_s, DEFAULT.unaware_s
#: Floats are not exact.
EPS = 1e-6
RAISED = ExceptionReport.of(ValueError("broke"))
let_go = functools.partial(Tell, method="let_go")
end_calls = functools.partial(Tell, method="end_calls")


def failure(
    node: str, *, consequence: bool = False, text: str = "broke", raised: bool = False
) -> NodeFailure:
    report = RAISED if raised else None
    return NodeFailure(node, "host", f"{node} {text}", report, is_consequence=consequence)


@dataclass
class Worker:
    """What the life knows, or should, of the newest worker of a node."""

    attempt: int
    gone: bool = False
    #: Since when it leaves, or should: it was asked, by us or from outside, or has failed.
    leaves_at: float | None = None
    was_asked: bool = False
    #: Whether it ever did not look at the stop, so that nobody need wait for it.
    is_deaf: bool = False
    leaving: bool = False
    terminated_at: float | None = None
    killed_at: float | None = None

    @property
    def is_forced(self) -> bool:
        return self.terminated_at is not None or self.killed_at is not None

    @property
    def is_left_alone(self) -> bool:
        return not self.gone and self.leaves_at is None and not self.is_forced

    def leave(self, now: float) -> None:
        self.leaves_at = now if self.leaves_at is None else self.leaves_at


class Life:
    """A program's life which checks at each event what must always hold; its clock is `now`."""

    def __init__(
        self,
        *terms: NodeTerms,
        notice_s: float = 10.0,
        blame_s: float = BLAME_S,
        chance: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self.terms = {each.name: each for each in terms}
        self.notice_s = math.inf if notice_s < 0 else notice_s
        self.launched_at = self.now = 100.0
        self.blame_s = blame_s
        self.machine = ProgramLife(terms, notice_s, blame_s=blame_s, now=self.now, chance=chance)
        self.workers: dict[str, Worker] = {}
        self.started: dict[tuple[str, int], float] = {}
        #: Whether no check has failed.
        self.sound = True
        self.stop_at: float | None = None
        self.kill_at: float | None = None
        #: Since when a node has failed that is not restarted.
        self.doomed_at = math.inf
        #: What the supervisor's sleep adds to limits of all kinds.
        self.slept_s = 0.0
        #: Workers that failed of themselves before the stop, or were lost with their host.
        self.failed: set[tuple[str, int]] = set()
        self._order = StopOrder({each.name: each.calls for each in terms})
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
        return self.notice_s / self._order.waves

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
            self.slept_s += seconds + DEFAULT.overslept_s
        return self(Tick() if event is None else event)

    def tick_to_the_end(self) -> ProgramResult:
        """No node ends by itself any more."""
        self.wait(self.notice_s + TERMINATE_S + GIVE_UP_S + EPS)
        return self.result

    def _see(self, event: Event, *, was_stopping: bool) -> None:
        if isinstance(event, KillAsked):
            self.kill_at = self.now if self.kill_at is None else self.kill_at
        elif isinstance(event, HostLost):
            for name in event.nodes:
                worker = self.workers.get(name)
                attempt = None if event.attempts is None else event.attempts[name]
                if worker is not None and not worker.gone and attempt in (None, worker.attempt):
                    if not was_stopping:
                        self._see_failure(name, worker, is_consequence=False)
                    worker.gone = True
        elif not isinstance(event, StopAsked | Tick):
            worker = self.workers.get(event.node)
            if worker is not None and worker.attempt == event.attempt and not worker.gone:
                self._see_worker(worker, event, was_stopping=was_stopping)

    def _see_worker(self, worker: Worker, event: Any, *, was_stopping: bool) -> None:
        if isinstance(event, Ended | Failed) and event.failure is not None:
            # Who lingers may yet be lost, or end with all the others, before it is restarted.
            counts = isinstance(event, Ended) or self._never_restarts(event.node)
            if counts and not was_stopping:
                self._see_failure(event.node, worker, event.failure.is_consequence)
        if isinstance(event, Ended):
            worker.gone = True
        elif isinstance(event, Failed | Leaving):
            worker.leaving = True
            if isinstance(event, Failed) and not worker.is_forced:
                worker.leave(self.now)
        elif isinstance(event, StopReceived):
            worker.is_deaf |= not event.listens
        elif isinstance(event, Preempted) and worker.is_left_alone:
            worker.leave(self.now)

    def _never_restarts(self, name: str) -> bool:
        return self.terms[name].restart.when is RestartWhen.NEVER

    def _see_failure(self, name: str, worker: Worker, is_consequence: bool) -> None:
        if worker.is_left_alone:
            if not is_consequence:
                self.failed.add((name, worker.attempt))
            if self._never_restarts(name):
                self.doomed_at = min(self.doomed_at, self.now)

    # What must hold

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
        elif action == end_calls(action.node):
            assert worker.leaves_at is not None, "nobody asked it to end"
            assert worker.is_deaf, "it listens"
            assert not worker.is_forced
        elif action == let_go(action.node):
            assert worker.leaving, "it has not done its work"
            assert not self.machine.stopping, "its callers may have more to hand in"
        elif isinstance(action, Terminate):
            self._check_terminate(action.node, worker)
        elif isinstance(action, Kill):
            assert worker.killed_at is None, "killed twice"
            waited = worker.terminated_at is not None and (
                self.now >= worker.terminated_at + TERMINATE_S - EPS
            )
            assert waited or self.kill_at is not None, "killed too early"
            worker.killed_at, worker.was_asked = self.now, True

    def _check_start(self, action: Start) -> None:
        before = self.workers.get(action.node)
        assert before is None or before.gone, "two workers for one node"
        assert action.attempt == (0 if before is None else before.attempt + 1)
        assert self.machine.restarts_of(action.node) == action.attempt
        self.workers[action.node] = Worker(action.attempt)
        self.started[action.node, action.attempt] = self.now

    def _check_asking(self, name: str, worker: Worker) -> None:
        if self.stop_at is None:
            self.stop_at = self.now
        assert worker.is_left_alone, "asked, although it is leaving"
        held_until = self._held_until(name, by_the_deaf=False)
        assert self.now >= held_until - EPS, "asked before its caller had its time"
        worker.leaves_at, worker.was_asked = self.now, True

    def _held_until(self, name: str, *, by_the_deaf: bool) -> float:
        """Returns until when it waits for its callers, who may have more for it, if none ends."""
        assert self.stop_at is not None
        held_until = -math.inf
        for caller in self._order.callers[name]:
            worker = self.workers.get(caller)
            if worker is None or worker.gone or worker.is_forced:
                continue
            if by_the_deaf or not worker.is_deaf:
                leaves_at = math.inf if worker.leaves_at is None else worker.leaves_at
                share_ends = max(leaves_at, self.stop_at) + self.share_s
                held_until = max(held_until, min(share_ends, self.stop_at + self.notice_s))
        return held_until

    def _check_terminate(self, name: str, worker: Worker) -> None:
        assert not worker.is_forced, "terminated twice, or after it was killed"
        if self.stop_at is None and worker.leaves_at is None:
            assert self.terms[name].liveness != Liveness(), "it cannot be hung"
        else:
            assert worker.leaves_at is not None, "ended by force without having been asked"
            since = min(worker.leaves_at, math.inf if self.stop_at is None else self.stop_at)
            assert self.now >= since + self.notice_s - EPS, "ended by force within the notice"
        worker.terminated_at, worker.was_asked = self.now, True

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
            assert not all(self._is_over(each, EPS) for each in self.workers.values()), (
                "waits for nobody"
            )
            is_limited = not math.isinf(self.notice_s) or any(each.is_forced for each in there)
            assert deadline is not None or not is_limited
            for name, worker in self.workers.items():
                latest = self._held_until(name, by_the_deaf=True) + self.slept_s + EPS
                assert not worker.is_left_alone or self.now < latest, f"nobody holds {name} up"
            return
        doomed_at = self.doomed_at + self.blame_s + self.slept_s + EPS
        assert self.now < doomed_at, "it has failed, and continues"
        for name, worker in self.workers.items():
            if worker.leaves_at is not None and worker.terminated_at is None and not worker.gone:
                latest = worker.leaves_at + self.notice_s + self.slept_s + EPS
                assert self.now < latest, f"{name} is to go, and stays"
        waiting = [
            name
            for name, each in self.workers.items()
            if self.machine.restarts_of(name) > each.attempt
        ]
        assert deadline is not None or not waiting, "nobody starts them"
        alone = [each for each in there if each.is_left_alone]
        assert deadline is not None or alone or math.isinf(self.notice_s), "waits for nobody"

    def _is_over(self, worker: Worker, slack_s: float = -EPS) -> bool:
        """Whether a worker is gone, or given up."""
        if worker.gone or worker.killed_at is None:
            return worker.gone
        given_up_at = worker.killed_at + max(GIVE_UP_S, self.blame_s)
        if self.stop_at is not None:
            given_up_at = min(given_up_at, max(worker.killed_at, self.stop_at) + GIVE_UP_S)
        return self.now >= given_up_at + slack_s

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
        self._check_failures(result)
        self._check_restarts(result)

    def _check_failures(self, result: ProgramResult) -> None:
        failures = [(each.node, each.attempt) for each in result.failures]
        assert len(set(failures)) == len(failures), "a failure is counted twice"
        mended = [(each.node, each.attempt - 1) for each in result.restarts if each.failure]
        assert self.failed <= {*failures, *mended}, "a failure is lost"
        order = [each.is_consequence for each in result.failures]
        assert order == sorted(order), "a consequence stands before a cause"
        assert result.reason
        assert (result.outcome is Outcome.FAILED) == bool(failures)
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
            if each.failure and not re.search("from outside|start again", each.failure.summary):
                recent = failed.setdefault(each.node, [])
                recent.append(each.at_s)
                since = each.at_s - policy.window_s
                assert sum(at_s > since for at_s in recent) <= policy.max_restarts
                assert policy.moves or not each.failure.host_lost, "moved what is to stay"
            if (started_at := self.started.get((each.node, each.attempt))) is not None:
                waited_s = started_at - self.launched_at - each.at_s
                assert each.delay_s - EPS <= waited_s <= each.delay_s + self.slept_s + EPS


# By example: what is done


@dataclass(frozen=True)
class Story:
    """What is done at each event, and while so many seconds pass; None: something or other.

    The end of the program stands as its outcome.
    """

    nodes: Sequence[NodeTerms | str]
    steps: Sequence[tuple[Event | float, Sequence[Action | Outcome] | None]]
    notice_s: float = 10.0
    blame_s: float = BLAME_S


def begun(*terms: NodeTerms | str, notice_s: float = 10.0, blame_s: float = BLAME_S) -> Life:
    """Returns a life whose nodes have just been started."""
    nodes = [NodeTerms(each) if isinstance(each, str) else each for each in terms]
    life = Life(*nodes, notice_s=notice_s, blame_s=blame_s)
    assert life(Tick()) == [Start(each.name, 0) for each in nodes]
    return life


def step(life: Life, event: Event | float) -> list[Action | Outcome]:
    actions = life.wait(event) if isinstance(event, float) else life(event)
    return [each.result.outcome if isinstance(each, Finish) else each for each in actions]


def forced(name: str, how: type[Terminate | Kill] = Terminate) -> list[Action]:
    """Returns what is done to a node that is ended by force: first it shows where it is."""
    return [DumpStacks(name), how(name)]


def broke(node: str, attempt: int = 0, *, consequence: bool = False) -> Ended:
    return Ended(node, attempt, failure(node, consequence=consequence))


def policy(when: Any = "on_failure", max_restarts: int = 3, **options: Any) -> RestartPolicy:
    """Without chance, and at once if nothing else is said."""
    return RestartPolicy(when, max_restarts, **{"backoff_s": 0.0, "jitter": 0.0, **options})


def limited(name: str, restart: RestartPolicy = NEVER, **limits: Any) -> NodeTerms:
    return NodeTerms(name, restart=restart, liveness=Liveness(**limits))


AT_ONCE = policy()
#: Stays on its host.
BOUND = policy(moves=False)
GONE = "the host far is gone"
CHAIN = (NodeTerms("c"), NodeTerms("b", calls=("c",)), NodeTerms("a", calls=("b",)))
RESTARTS = NodeTerms("a", restart=AT_ONCE)
HANGS = limited("a", AT_ONCE, startup_s=5.0)
STOP = StopAsked("x")
FAR_IS_LOST = HostLost("far", ("b",), GONE)
A_IS_LOST = HostLost("far", ("a",), GONE)

STORIES = {
    # When a program ends
    "it ends when all nodes with something to run have ended": Story(
        ["run", "late", "serve"],
        [
            (Constructed("run", 0, True), []),
            (Constructed("serve", 0, False), []),
            (Ended("run", 0), []),
            (Constructed("late", 0, True), []),
            (Ended("late", 0), [RequestStop("serve")]),
            (Ended("serve", 0), [Outcome.COMPLETED]),
        ],
    ),
    "it ends when those that ran only serve": Story(
        ["a", "b"],
        [
            (Constructed("a", 0, True), []),
            (Constructed("b", 0, True), []),
            (Constructed("a", 0, False), []),
            (Constructed("b", 0, False), [RequestStop("a"), RequestStop("b")]),
        ],
    ),
    "one that only serves never ends by itself": Story(
        ["a", "b"],
        [
            (Constructed("a", 0, False), []),
            (Constructed("b", 0, False), []),
            (1e6, []),
            (Ended("a", 0), []),
            (STOP, [RequestStop("b")]),
        ],
    ),
    "one that only serves, and was restarted before it did, never ends by itself": Story(
        [RESTARTS], [(broke("a"), [Start("a", 1)]), (Constructed("a", 1, False), []), (1e6, [])]
    ),
    "nodes are asked, then terminated, then killed, then given up": Story(
        ["good", "bad"],
        [
            (STOP, [RequestStop("good"), RequestStop("bad")]),
            (1.0, []),
            (Ended("good", 0), []),
            (1.9, []),
            (0.2, forced("bad")),
            (TERMINATE_S, [Kill("bad")]),
            (GIVE_UP_S, [Outcome.STOPPED]),
        ],
        notice_s=3.0,
    ),
    "notice zero ends nodes by force at once": Story(
        ["a"],
        [
            (STOP, [RequestStop("a"), *forced("a")]),
            (broke("a"), [Outcome.STOPPED]),  # who is ended by force does not fail
        ],
        notice_s=0.0,
    ),
    "a negative notice never ends nodes by force": Story(
        ["a"],
        [(STOP, [RequestStop("a")]), (1e9, []), (KillAsked(), forced("a", Kill))],
        notice_s=-1.0,
    ),
    # In which order nodes stop
    "a caller that listens holds up those it calls for its share of the notice": Story(
        CHAIN,
        [
            (STOP, [RequestStop("a")]),
            (StopReceived("a", 0, listens=True), []),
            (9.9, []),
            (0.2, [RequestStop("b")]),
            (9.7, []),
            (0.2, [RequestStop("c")]),
            (9.8, []),
            (0.3, [*forced("c"), *forced("b"), *forced("a")]),
        ],
        notice_s=30.0,
    ),
    "a caller that does not listen holds up those it calls for a moment only": Story(
        CHAIN,
        [
            (STOP, [RequestStop("a")]),
            (StopReceived("a", 0, listens=False), []),
            (DEAF_S - EPS, []),
            (StopReceived("a", 0, listens=False), []),  # saying it again does not prolong it
            (2 * EPS, [end_calls("a"), RequestStop("b")]),
            (StopReceived("a", 0, listens=False), []),
            (2 * DEAF_S, []),  # its calls have ended already
        ],
        notice_s=-1.0,
    ),
    "a caller that listens after all gets its share of the notice back": Story(
        CHAIN,
        [
            (STOP, [RequestStop("a")]),
            (StopReceived("a", 0, listens=False), []),
            (DEAF_S / 2, []),
            (StopReceived("a", 0, listens=True), []),
            (10.0 - DEAF_S / 2 - EPS, []),
            (2 * EPS, [RequestStop("b")]),
        ],
        notice_s=30.0,
    ),
    "callers that are known to be deaf are asked one after the other at once": Story(
        CHAIN,
        [
            *((StopReceived(name, 0, listens=False), []) for name in "abc"),
            (DEAF_S, []),
            (STOP, [does(name) for name in "abc" for does in (RequestStop, end_calls)]),
        ],
    ),
    "how an earlier worker heard the stop says nothing of the new one": Story(
        [NodeTerms("server"), NodeTerms("actor", calls=("server",), restart=AT_ONCE)],
        [
            (Preempted("actor", 0, 15), []),
            (StopReceived("actor", 0, listens=False), []),
            (Ended("actor", 0), [Start("actor", 1)]),
            (60.0, []),
            (Preempted("actor", 1, 15), []),
            (STOP, []),
            (4.9, []),
            (0.2, [RequestStop("server")]),
        ],
    ),
    "a node that has done its work keeps the program alive and is asked in its turn": Story(
        CHAIN,
        [
            *((Constructed(name, 0, True), []) for name in "abc"),
            (Leaving("a", 0), [let_go("a")]),
            (Leaving("c", 0), [let_go("c")]),
            (100.0, []),
            (STOP, [RequestStop("a")]),
            (Leaving("b", 0), []),  # its callers may have more for it
            (Ended("a", 0), [RequestStop("b")]),
        ],
        notice_s=90.0,
    ),
    # Hosts
    **{
        f"a lost host stops nodes that cannot be restarted: {named}": Story(
            ["a", NodeTerms("b", restart=restart), "c"],
            [
                (Ended("a", 0), []),
                (FAR_IS_LOST, [DumpStacks("c"), RequestStop("c")]),
                (FAR_IS_LOST, []),
                (Ended("c", 0), [Outcome.FAILED]),
            ],
        )
        for named, restart in {
            "never": NEVER, "bound": BOUND, "too often": policy("always", 0)
        }.items()
    },
    "nodes of a lost host are restarted as those that failed": Story(
        [NodeTerms("a", restart=policy(max_restarts=1, backoff_s=1.0)), "b"],
        [
            (A_IS_LOST, []),
            (broke("a"), []),  # said by the worker that was lost
            (1.0, [Start("a", 1)]),
            (broke("a", 1), [DumpStacks("b"), RequestStop("b")]),  # that is one too many
        ],
    ),
    "the loss of a host does not touch nodes that were restarted elsewhere": Story(
        [RESTARTS, "b"],
        [
            (broke("a"), [Start("a", 1)]),
            (HostLost("far", ("a",), GONE, {"a": 0}), []),
            (HostLost("far", ("a",), GONE, {"a": 1}), [Start("a", 2)]),
        ],
    ),
    "a node that waits for its restart when its host is lost needs no other restart": Story(
        [NodeTerms("a", restart=policy(max_restarts=1, backoff_s=5.0)), "b"],
        [(broke("a"), []), (HostLost("far", ("a",), GONE, {"a": 0}), []), (5.0, [Start("a", 1)])],
    ),
    # Restarts
    "restarts wait ever longer": Story(
        [NodeTerms("a", restart=policy(backoff_s=1.0)), "b"],
        [
            *(
                each
                for attempt, delay_s in enumerate([1.0, 2.0, 4.0])
                for each in (
                    (broke("a", attempt), []),
                    (delay_s - EPS, []),
                    (2 * EPS, [Start("a", attempt + 1)]),
                )
            ),
            (broke("a", 3), [DumpStacks("b"), RequestStop("b")]),
        ],
    ),
    "failures that are longer ago than the window are forgotten": Story(
        [NodeTerms("a", restart=policy(max_restarts=1, window_s=10.0))],
        [
            each
            for attempt in range(5)
            for each in ((broke("a", attempt), [Start("a", attempt + 1)]), (10.1, []))
        ],
    ),
    "a node that ended well is restarted only if it always is": Story(
        [NodeTerms("always", restart=policy("always", 0)), RESTARTS],
        [
            *((Ended("always", n), [Start("always", n + 1)]) for n in range(5)),
            (Ended("a", 0), []),
            (broke("always", 5), [Outcome.FAILED]),
        ],
    ),
    "a node that ends well at once again and again is restarted ever later": Story(
        [NodeTerms("a", restart=policy("always", 0, backoff_s=1.0, max_backoff_s=5.0))],
        [
            each
            for attempt, delay_s in enumerate([1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 1.0, 2.0])
            for each in (
                (Ended("a", attempt), []),
                (delay_s - EPS, []),
                (2 * EPS, [Start("a", attempt + 1)]),
                (5.0 if attempt == 4 else EPS, []),  # at last it has run for long
            )
        ],
    ),
    "failures before the window do not delay restarts of a node that ended well": Story(
        [NodeTerms("a", restart=policy("always", window_s=10.0, backoff_s=1.0))],
        [
            *(
                each
                for attempt in range(3)
                for each in ((broke("a", attempt), []), (4.0, [Start("a", attempt + 1)]))
            ),
            (100.0, []),
            (Ended("a", 3), []),
            (1.0, [Start("a", 4)]),
        ],
    ),
    "what an earlier worker says is not taken for the new one's": Story(
        [HANGS],
        [
            (broke("a"), [Start("a", 1)]),
            *((stale, []) for stale in (Ended("a", 0), broke("a"), Preempted("a", 0, 15))),
            (Constructed("a", 0, True), []),
            (5.0, forced("a")),
        ],
    ),
    # Workers that take long to end after the node failed: threads go on, exit functions wait
    "a failed node that never ends by itself does not keep the program from failing": Story(
        ["a", "b"],
        [
            (Failed("a", 0, failure("a")), [DumpStacks("a"), DumpStacks("b"), RequestStop("b")]),
            (Ended("b", 0), []),
            (3.0, [Terminate("a")]),
            (TERMINATE_S, [Kill("a")]),
            (GIVE_UP_S, [Outcome.FAILED]),
        ],
        notice_s=3.0,
    ),
    "a failed node that lingers is ended by force after the notice and restarted once": Story(
        [RESTARTS, "b"],
        [
            (Failed("a", 0, failure("a")), []),
            (Failed("a", 0, failure("a")), []),
            (3.0 - EPS, []),
            (2 * EPS, forced("a")),
            (TERMINATE_S, [Kill("a")]),
            (Ended("a", 0, failure("a", text="was killed")), [Start("a", 1)]),
        ],
        notice_s=3.0,
    ),
    "a failed node that ends by itself is restarted once it has": Story(
        [RESTARTS],
        [
            (Failed("a", 0, failure("a")), []),
            (5.0, []),
            (Ended("a", 0), [Start("a", 1)]),
            (100.0, []),  # nothing of the notice is left
        ],
    ),
    "failures of nodes that linger count for the policy": Story(
        [NodeTerms("a", restart=policy(max_restarts=1)), "b"],
        [
            (Failed("a", 0, failure("a")), []),
            (broke("a"), [Start("a", 1)]),
            (Failed("a", 1, failure("a")), [DumpStacks("a"), DumpStacks("b"), RequestStop("b")]),
        ],
    ),
    # Hung nodes
    **{
        f"a node without a sign of life is ended by force: {limit}": Story(
            [limited("a", **{limit: 5.0})],
            [
                (Constructed("a", 0, True), []),
                *((4.9, []), (sign, [])) * 3,
                (4.9, []),
                (0.7, forced("a")),
                (TERMINATE_S, [Kill("a")]),
                (broke("a"), [Outcome.FAILED]),
            ],
        )
        for limit, sign in {"health_s": Healthy("a", 0), "heartbeat_s": Heartbeat("a", 0)}.items()
    },
    "a node that is debugged is not hung": Story(
        [limited("a", startup_s=5.0, health_s=5.0, heartbeat_s=5.0)],
        [
            *((4.9, []), (Debugged("a", 0, "train.py:3"), [])) * 2,
            (Constructed("a", 0, True), []),
            *((4.9, []), (Debugged("a", 0, ""), [])) * 2,
            (5.3, forced("a")),
        ],
    ),
    "signs that come too late do not save a hung node": Story(
        [limited("a", startup_s=5.0)],
        [(5.0, forced("a")), (Constructed("a", 0, True), []), (TERMINATE_S, [Kill("a")])],
    ),
    **{
        f"a node on its way out need not show that it lives: {type(goes).__name__}": Story(
            [limited("a", AT_ONCE, health_s=2.0, heartbeat_s=2.0, startup_s=2.0), "b"],
            [
                (Constructed("a", 0, True), []),
                (1.0, []),
                (goes, None),
                *((late, []) for late in (Constructed("a", 0, True), Healthy("a", 0))),
                (Heartbeat("a", 0), []),
                (9.9, []),
                (broke("a"), [Start("a", 1)]),
                (2.1, forced("a")),  # the new one must show it
            ],
        )
        for goes in (Leaving("a", 0), Failed("a", 0, failure("a")))
    },
    "a node that waits for its turn to stop need not show that it goes on": Story(
        [NodeTerms("actor", calls=("replay",)), limited("replay", heartbeat_s=1.0)],
        [
            (Constructed("replay", 0, False), []),
            (STOP, [RequestStop("actor")]),
            (Heartbeat("replay", 0), []),
            (4.9, []),
            (Ended("actor", 0), [RequestStop("replay")]),
        ],
    ),
    "a constructor takes no time while its node has no host": Story(
        [HANGS],
        [
            (Placed("a", 0, is_there=False), []),
            (100.0, []),
            (Placed("a", 0, is_there=True), []),
            (4.9, []),
            (0.2, forced("a")),
        ],
    ),
    # Nodes that are asked from outside to end
    "a node without a policy stops the program in order": Story(
        CHAIN,
        [
            (Preempted("c", 0, 15), [RequestStop("a")]),
            (Preempted("c", 0, 15), []),
            (Ended("a", 0), [RequestStop("b")]),  # c asks itself
            (Ended("b", 0), []),
            (Ended("c", 0), [Outcome.INTERRUPTED]),
        ],
    ),
    "a node with a policy leaves and is restarted, which counts as no failure": Story(
        [NodeTerms("a", restart=policy(max_restarts=1, backoff_s=1.0)), "b"],
        [
            *(
                each
                for attempt, ended in enumerate(
                    [Ended("a", 0), broke("a", 1), broke("a", 2, consequence=True)]
                )
                for each in (
                    (Preempted("a", attempt, 15), []),
                    (9.0, []),
                    (ended, []),
                    (1.0, [Start("a", attempt + 1)]),
                )
            ),
            (broke("a", 3), []),
            (1.0, [Start("a", 4)]),
            (broke("a", 4), [DumpStacks("b"), RequestStop("b")]),
        ],
    ),
    "a node that ends to start again is restarted, which counts as no failure": Story(
        [NodeTerms("a", restart=policy(max_restarts=0, backoff_s=1.0))],
        [
            *(
                each
                for attempt in range(3)
                for each in (
                    (Ended("a", attempt, failure("a", text="to start again"), wants_restart=True), []),
                    (1.0, [Start("a", attempt + 1)]),
                )
            ),
            (broke("a", 3), [Outcome.FAILED]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_what_is_done_at_each_event(story: Story) -> None:
    life = begun(*story.nodes, notice_s=story.notice_s, blame_s=story.blame_s)
    for number, (event, expected) in enumerate(story.steps):
        actions = step(life, event)
        assert expected is None or actions == expected, (number, event)


# By example: how the program ended, and whose fault it was


def fell(node: str, *, dead_s: float = 0.0) -> Ended:
    """It failed before anybody asked it to end, and was dead for a while when that was known."""
    return Ended(node, 0, failure(node), dead_s=dead_s, unasked=True)


def lingers(node: str, *, unasked: bool = False) -> Failed:
    return Failed(node, 0, failure(node), unasked)


def play(life: Life, *steps: Event | float) -> ProgramResult:
    """Has events happen, with seconds between them; nothing more happens after the last."""
    for each in steps:
        step(life, each)
    return life.result if life.over else life.tick_to_the_end()


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
SERVER_HANGS = (CALLS[0], NodeTerms("server", liveness=Liveness(startup_s=5.0)))
FOLLOWS, CALLER_FOLLOWS = broke("a", consequence=True), broke("caller", consequence=True)
ABC_IS_LOST = HostLost("far", ("a", "b", "c"), GONE)
CALLER_IS_LOST = HostLost("far", ("caller",), GONE)
WAS_KILLED = Ended("a", 0, failure("a", text="was killed"))
FITS_NO_HOST = Ended("a", 1, failure("a", text="fits no host"), for_good=True)
CALLER_WAS_KILLED = Ended("caller", 0, NodeFailure.of_exit("caller", "host", -9))


@dataclass(frozen=True)
class Case:
    """Who is named, the cause first, after events with seconds between them; what is said of it."""

    named: str
    steps: Sequence[Event | float]
    nodes: Sequence[NodeTerms | str] = CALLS
    notice_s: float = 10.0
    blame_s: float = BLAME_S
    says: str = ""


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
        "caller", [broke("server"), DEFAULT.cause_s + 1, CALLER_FOLLOWS, BLAME_S], RESTARTED
    ),
    "a callee that died of the stop": Case("caller server", [broke("caller"), broke("server")]),
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
    "a failure of a worker that is ended by force after it": Case(
        "a", [lingers("a"), 10.0, WAS_KILLED, Ended("b", 0)], "ab", says="a broke"
    ),
    "a failure while all stop of a worker that is ended by force after it": Case(
        "a", [STOP, lingers("a"), lingers("a"), 10.0, WAS_KILLED], "a", says="a broke"
    ),
    "a failure that was to be mended when somebody asked for the stop": Case(
        "a",
        [Failed("a", 0, failure("a", raised=True)), 1.0, STOP, 9.0, WAS_KILLED],
        [RESTARTS],
        says="a broke",
    ),
    "a server that hangs": Case(
        "a",
        [Constructed("a", 0, True), 5.0, WAS_KILLED],
        [limited("a", health_s=5.0)],
        says="it answered no health check for 5 s",
    ),
    "code that hangs": Case(
        "a",
        [Constructed("a", 0, True), 5.5, WAS_KILLED],
        [limited("a", heartbeat_s=5.0)],
        says="it did not call lp.heartbeat() for 5 s",
    ),
    "a hung node that cannot be ended": Case(
        "a",
        [5.0 + TERMINATE_S + GIVE_UP_S, Ended("b", 0)],
        [HANGS, "b"],
        says="cannot be ended by force",
    ),
    "a node for which no host is left, whatever its policy": Case(
        "a", [A_IS_LOST, FITS_NO_HOST, Ended("b", 0)], [RESTARTS, "b"], says="fits no host"
    ),
    "a node that was to be restarted on the host that is lost": Case(
        "a",
        [broke("a"), HostLost("far", ("a",), GONE, {"a": 0}), Ended("b", 0)],
        [NodeTerms("a", restart=policy(backoff_s=5.0, moves=False)), "b"],
        says=GONE,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_first_cause_is_named_first(case: Case) -> None:
    life = begun(*case.nodes, notice_s=case.notice_s, blame_s=case.blame_s)
    result = play(life, *case.steps)
    assert [each.node for each in result.failures] == case.named.split()
    assert result.failures[0].summary in result.reason
    assert case.says in result.reason
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


TOLD = "it was asked from outside to end, by SIGTERM"
HUNG = "it is hung: its constructor took longer than 5 s"
HISTORIES: dict[str, tuple[list[NodeTerms], Sequence[Event | float], list[str | None]]] = {
    "nodes that ended well": (
        [NodeTerms("a", restart=policy("always"))],
        [Ended("a", 0), Ended("a", 1), broke("a", 2)],
        [None, None, "a broke"],
    ),
    "a worker that was ended by force when it lingered": (
        [RESTARTS],
        [lingers("a"), 10.0, WAS_KILLED],
        ["a broke"],
    ),
    "a node that failed when it was told to go": (
        [RESTARTS],
        [Preempted("a", 0, 15), lingers("a"), broke("a")],
        [TOLD],
    ),
    "a node that failed when it was found to hang": (
        [HANGS],
        [5.0, lingers("a"), broke("a")],
        [HUNG],
    ),
    "a node that was told to go before its host went": (
        [RESTARTS],
        [Preempted("a", 0, 15), A_IS_LOST, A_IS_LOST],
        [TOLD, GONE],
    ),
    "a node that looked hung because its host was silent": ([HANGS], [9.0, A_IS_LOST], [GONE]),
}


@pytest.mark.parametrize(("nodes", "steps", "whys"), HISTORIES.values(), ids=HISTORIES.keys())
def test_the_history_says_why_nodes_were_restarted(
    nodes: list[NodeTerms], steps: Sequence[Event | float], whys: list[str | None]
) -> None:
    result = play(begun(*nodes, blame_s=10.0), *steps, STOP)
    failures = [each.failure for each in result.restarts]
    assert [each and each.summary for each in failures] == whys
    assert not any(each.is_consequence for each in failures if each is not None)


def test_a_second_stop_changes_nothing() -> None:
    result = play(begun("a"), StopAsked("first", 2), 5.0, StopAsked("second", 15), Ended("a", 0))
    assert (result.reason, result.signum) == ("first", 2)
    assert (result.outcome, result.exit_code) == (Outcome.INTERRUPTED, 130)


def test_a_program_says_why_it_ended() -> None:
    ended = play(begun("a"), Constructed("a", 0, True), Ended("a", 0))
    assert ended.reason == "every node that had something to run has ended"
    told = play(begun("a"), Preempted("a", 0, 15), Ended("a", 0))
    assert (told.reason, told.exit_code) == ("SIGTERM to a", 143)
    assert play(begun("a"), A_IS_LOST).reason == GONE


def test_a_node_that_fails_too_often_fails_the_program_with_its_history() -> None:
    life = begun(NodeTerms("a", restart=policy(max_restarts=2)), "b")
    result = play(life, 3.0, broke("a"), broke("a", 1), 4.0, broke("a", 2), Ended("b", 0))
    (failed,) = result.failures
    assert (failed.attempt, failed.at_s) == (2, 7.0)
    assert failed.restarts == result.restarts
    assert [each.at_s for each in failed.restarts] == [3.0, 3.0]
    assert "no more than 2" in failed.describe()
    lost = play(begun(NodeTerms("a", restart=policy(max_restarts=1))), broke("a"), A_IS_LOST)
    assert "a broke" in lost.failures[0].describe()


def test_a_failure_dates_from_the_death_or_the_report_of_its_worker() -> None:
    # What it started would not end.
    result = play(begun(*CALLS), 5.0, broke("caller"), 2.0, fell("server", dead_s=2.1))
    assert result.failures[0].at_s == pytest.approx(4.9)
    result = play(begun("a"), 2.0, lingers("a"), 1.0, broke("a"))
    assert [each.at_s for each in result.failures] == [2.0]


def test_who_ends_by_a_call_that_fails_while_all_stop_is_named_and_did_not_fail() -> None:
    follows = failure("b", consequence=True)
    result = play(
        begun("a", "b", "c"),
        *(Failed("a", 0, failure("a", consequence=True)), STOP, CutShort("b", 0, follows)),
        *(Ended("a", 0), Ended("b", 0), broke("c", consequence=True)),
    )
    assert [each.node for each in result.cut_short] == ["a", "b", "c"]
    assert (result.outcome, result.failures, result.exit_code) == (Outcome.STOPPED, (), 0)


def test_the_stacks_of_a_hung_node_are_kept() -> None:
    result = play(begun(limited("a", startup_s=5.0)), 5.0, Ended("a", 0, stacks="in a loop"))
    assert result.failures[0].stacks == "in a loop"


def test_a_node_that_was_killed_before_the_stop_and_given_up_after_it_is_named() -> None:
    life = begun(RESTARTS, notice_s=3.0)
    assert play(life, Preempted("a", 0, 15), 3.0 + TERMINATE_S, STOP).killed == ("a",)


# By example: a supervisor that sleeps


def test_who_wakes_when_the_notice_is_over_asks_before_it_ends_by_force() -> None:
    life = begun(*CHAIN, notice_s=9.0)
    life(STOP)
    actions = life.oversleep(20.0)
    asked = [each for each in actions if isinstance(each, RequestStop)]
    assert sorted(asked, key=lambda each: each.node) == [RequestStop("b"), RequestStop("c")]
    assert {each.node for each in actions if isinstance(each, Terminate)} == {"a", "b", "c"}


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
    # Somebody looks now and then, or a suspension would not be seen.
    assert life.machine.deadline == life.now + DEFAULT.look_s
    life.wait(10.0)
    assert life.oversleep(39.0) == []  # all slept, the node too
    assert life.wait(38.0) == []
    assert DumpStacks("a") in life.wait(5.0)


# Many nodes

#: A star, and all who call all; those that end last stand last, so that who looks for one that has
#: not ended looks at all.
STAR = (*(NodeTerms(f"a{at}", calls=("z",)) for at in range(2_999)), NodeTerms("z"))
DENSE_CALLEES = tuple(f"z{at}" for at in range(300))
DENSE = (
    *(NodeTerms(f"a{at}", calls=DENSE_CALLEES) for at in range(300)),
    *map(NodeTerms, DENSE_CALLEES),
)


@pytest.mark.parametrize("terms", [STAR, DENSE], ids=["star", "dense"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_each_event_costs_little_however_many_nodes_there_are(
    terms: tuple[NodeTerms, ...], is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    class CountedNode(program_life._NodeLife):
        def __getattribute__(self, name: str) -> Any:
            next(looks)
            return super().__getattribute__(name)

    monkeypatch.setattr(program_life, "_NodeLife", CountedNode)
    machine = ProgramLife(terms, 10.0)
    asked = [each.name for each in terms]
    assert machine.handle(Tick(), 0.0) == [Start(name, 0) for name in asked]
    for name in asked:
        machine.handle(Constructed(name, 0, True), 1.0)
    if is_stopped:
        stop = machine.handle(STOP, 2.0)
        asked = [each.node for each in stop if isinstance(each, RequestStop)]
    for name in asked:  # grows
        machine.handle(StopReceived(name, 0, listens=True), 2.0)
        for action in machine.handle(Ended(name, 0), 2.0):
            if isinstance(action, RequestStop):
                asked.append(action.node)
    assert machine.over
    assert len(asked) == len(terms)
    assert next(looks) < 200 * len(terms) + 10 * sum(len(each.calls) for each in terms)


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

    @initialize(
        terms=programs(),
        notice_s=st.sampled_from([10.0, 0.0, 0.3, -1.0, 2.0]),
        blame_s=st.sampled_from([BLAME_S, 10.0]),
        seed=st.integers(0, 3),
    )
    def begin(self, terms: list[NodeTerms], notice_s: float, blame_s: float, seed: int) -> None:
        chance = random.Random(seed).random
        self.life = Life(*terms, notice_s=notice_s, blame_s=blame_s, chance=chance)
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
                self.living[action.node] = action.attempt

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
        how=st.sampled_from(["well", "failed", "raised", "consequence", "for good"]),
        dead_s=st.sampled_from([0.0, 0.1, 0.6]),
        at_once=st.booleans(),
    )
    def a_worker_ends(self, name: str, how: str, dead_s: float, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            node, attempt = picked
            del self.living[node]
            failed = failure(node, consequence=how == "consequence", raised=how == "raised")
            worker = self.life.workers[node]
            ended = Ended(
                node,
                attempt,
                None if how == "well" else failed,
                # There was no host for it, so it reported nothing before.
                for_good=how == "for good" and at_once and not worker.leaving,
                dead_s=dead_s,
                unasked=not worker.was_asked,
            )
            self._say(ended, at_once)

    @rule(name=names, consequence=st.booleans(), raised=st.booleans(), at_once=st.booleans())
    def a_worker_reports_its_failure_and_lingers(
        self, name: str, consequence: bool, raised: bool, at_once: bool
    ) -> None:
        if (picked := self._pick(name)) is not None:
            failed = failure(picked[0], consequence=consequence, text="broke early", raised=raised)
            unasked = not self.life.workers[picked[0]].was_asked
            self._say(Failed(*picked, failed, unasked), at_once)

    @rule(
        name=names,
        says=st.sampled_from([
            (Leaving,), (Constructed, True), (Constructed, False), (Healthy,), (Heartbeat,),
            (Preempted, 2), (Preempted, 15),
        ]),
        at_once=st.booleans(),
    )  # fmt: skip
    def a_worker_says_how_it_is(self, name: str, says: Any, at_once: bool) -> None:
        if (picked := self._pick(name)) is not None:
            kind, *what = says
            self._say(kind(*picked, *what), at_once)

    @rule(name=names, listens=st.booleans(), at_once=st.booleans())
    def a_worker_hears_the_stop(self, name: str, listens: bool, at_once: bool) -> None:
        picked = self._pick(name)
        if picked is not None and not self.life.workers[picked[0]].is_left_alone:
            self._say(StopReceived(*picked, listens), at_once)

    @rule(members=st.sets(names, min_size=1), rare=st.integers(0, 3), at_once=st.booleans())
    def a_host_is_lost(self, members: set[str], rare: int, at_once: bool) -> None:
        lost = {
            name: self.living.pop(name) for name in members if rare == 0 and name in self.living
        }
        if lost:
            self._say(HostLost("h", tuple(lost), "h is gone", lost), at_once)

    @precondition(lambda self: self.outbox)
    @rule(index=st.integers(0, 1000))
    def news_arrive(self, index: int) -> None:
        self._tell(self.outbox.pop(index % len(self.outbox)))

    @precondition(lambda self: self.heard)
    @rule(index=st.integers(0, 1000))
    def news_arrive_again(self, index: int) -> None:
        event = self.heard[index % len(self.heard)]
        if not isinstance(event, StopAsked | KillAsked):
            self._obey(self.life(event))

    @rule(signum=st.sampled_from([None, 2, 15]), rare=st.integers(0, 3))
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
        tell(f"{life.result.outcome}")
        assert life.machine.handle(Tick(), life.now) == []


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_happens_in_whichever_order_all_promises_hold(examples: int) -> None:
    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=examples, stateful_step_count=40)
    )
