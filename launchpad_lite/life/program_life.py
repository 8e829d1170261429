"""The life of a launched program: a state machine without I/O.

It decides when a program ends, which nodes restart, how nodes stop, and which node caused a
failure. This module knows no clock, thread or process: events and times come in, actions go out,
and a supervisor obeys.

A program ends when every node with something to run has ended (nodes that only
serve are then stopped), on request, when a node fails beyond its restart policy, or by a signal.

Each node goes through stages of its own, which `docs/architecture.md` draws. When the program
stops, callers go before callees. A node that is hung, or asked from outside to end, goes alone.
"""

import collections
import enum
import math
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
    Failing,
    Finish,
    Healthy,
    Heartbeat,
    HostLost,
    Kill,
    KillAsked,
    Leaving,
    Logged,
    NodeEvent,
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
from launchpad_lite.life.result import NodeFailure, Outcome, ProgramResult, Restart
from launchpad_lite.life.timing import DEFAULT, Timing

MAX_RESTARTS_KEPT = 10_000  # the newest ones, for the result


@dataclass(frozen=True)
class NodeTerms:
    """A node of the program."""

    name: str  # `label[replica]`
    host: str = ""
    calls: tuple[str, ...] = ()  # nodes it calls
    restart: RestartPolicy = NEVER
    liveness: Liveness = field(default_factory=Liveness)


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    BLAMING = enum.auto()  # a node failed, perhaps only because another did
    STOPPING = enum.auto()
    OVER = enum.auto()


class _NodeStage(enum.Enum):
    WAITING = enum.auto()  # to be started, at its deadline
    UP = enum.auto()
    ASKED = enum.auto()
    TERMINATED = enum.auto()
    KILLED = enum.auto()
    ENDED = enum.auto()  # for good


class _By(enum.Enum):
    """The source of a request to end, which may make a node fail."""

    NONE = enum.auto()
    US = enum.auto()
    OUTSIDE = enum.auto()


@dataclass
class _LastStart:
    """The last start of a node."""

    started_at: float = -math.inf
    constructed: bool = False
    #: The deadline of its next sign of life, by the name of the limit.
    signs: dict[str, float] = field(default_factory=dict)
    #: Whether its work was done before it was asked to end; None until then.
    left_unasked: bool | None = None
    asked_by: _By = _By.NONE  # who asked it to end first
    failing: NodeFailure | None = None  # the failure that it announced
    failed: NodeFailure | None = None  # the failure that it reported, before its worker ended
    failed_by_itself: bool = False  # whether its failure had another cause than the request to end
    verdict: NodeFailure | None = None  # why it is ended alone
    #: Whether that follows a request from outside, which is not its fault.
    asked_to_leave: bool = False
    reported: bool = False  # whether its failure was reported

    def note_asked(self) -> None:
        if self.asked_by is _By.NONE:
            self.asked_by = _By.US

    def fails_by_itself(self, *, unasked: bool) -> bool:
        """Returns whether its failure has another cause than a request; `unasked`: as reported."""
        # Our request may not have reached it yet.
        return self.asked_by is _By.NONE or (unasked and self.asked_by is _By.US)


@dataclass
class _Hold:
    """How a node that was asked to end delays the end of others that it calls."""

    ignores_stop: bool = False  # whether its code does not check for the stop
    calls_ended: bool = False  # whether its new calls are refused
    delays_callees: bool = False  # while all stop: whether it delays its callees
    until: float = math.inf  # until when it does
    share_ends: float = math.inf  # until when it may, if it checks for the stop
    callers_left: int = 0  # how many nodes delay it


@dataclass
class _Past:
    """Earlier starts of a node."""

    #: Restarts after failures, within the window of its policy.
    restarts: list[Restart] = field(default_factory=list)
    cause: NodeFailure | None = None  # its last failure, if it was restarted since
    quick_ends: int = 0  # how often it ended well soon after its start, since the last longer run


@dataclass
class _NodeLife:
    terms: NodeTerms
    stage: _NodeStage = _NodeStage.WAITING
    deadline: float = math.inf  # when its stage ends by itself; infinity: never
    attempt: int = 0
    #: Whether it has something to run; None before its object was first constructed.
    runs: bool | None = None
    worker: _LastStart = field(default_factory=_LastStart)
    hold: _Hold = field(default_factory=_Hold)
    past: _Past = field(default_factory=_Past)

    @property
    def name(self) -> str:
        return self.terms.name

    @property
    def ended(self) -> bool:
        return self.stage is _NodeStage.ENDED

    @property
    def has_worker(self) -> bool:
        return self.stage not in (_NodeStage.WAITING, _NodeStage.ENDED)

    def next_deadline(self) -> float:
        signs = self.worker.signs.values() if self.stage is _NodeStage.UP else ()
        return min(self.deadline, *signs, math.inf)

    def release_at(self) -> float:
        return self.hold.until if self.stage is _NodeStage.ASKED else math.inf


class ProgramLife:
    """The state machine. One call at a time."""

    def __init__(
        self,
        nodes: Iterable[NodeTerms],
        notice_s: float,
        *,
        timing: Timing = DEFAULT,
        blame_s: float | None = None,
        now: float = 0.0,
        ends_when_idle: bool = True,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Begins the life of a program; its nodes are started at the first event.

        With `notice_s`, nodes have so long to end after a request; 0 ends them by force at once,
        below 0 never. `blame_s` are the seconds to wait for the cause when all that is known are
        consequences, and for the end of a worker that cannot be ended by force. With several hosts
        they are longer than it takes to notice that one of them has gone silent. `now` is of a
        clock that never goes back, and `chance` returns numbers evenly distributed from 0 to 1.
        """
        self._nodes = {terms.name: _NodeLife(terms, deadline=now) for terms in nodes}
        self._order = StopOrder({name: node.terms.calls for name, node in self._nodes.items()})
        #: How many nodes have or may have something to run, how many of these have not ended, and
        #: how many of all have not. Counted, because with thousands of nodes a loop over all takes
        #: long.
        self._with_work = self._at_work = self._left = len(self._nodes)
        self._had_work = False  # whether any node ever had something to run
        self._notice_s = math.inf if notice_s < 0 else notice_s
        self._timing = timing
        self._blame_s = timing.blame_s if blame_s is None else blame_s
        self._launched_at = now
        self._ends_when_idle = ends_when_idle
        self._chance = chance
        self._phase = _Phase.RUNNING
        self._phase_ends = math.inf  # when the phase ends by itself
        #: Nothing is due before it. It may be too early after a deadline moves, which does no harm.
        self._next_due = now
        self._looked_at = now
        self._free: list[_NodeLife] = []  # nodes whose callers have ended, to be asked to end
        self._has_limits = any(node.terms.liveness != Liveness() for node in self._nodes.values())
        self._failures: list[NodeFailure] = []  # failures in the order in which they became known
        #: While it waits for the cause of a failure: the nodes that may be the cause.
        self._suspects: set[str] = set()
        # Limited, because a node that always ends well restarts as long as the program runs.
        self._restarts: collections.deque[Restart] = collections.deque(maxlen=MAX_RESTARTS_KEPT)
        self._killed: list[str] = []
        #: The ends of nodes whose calls failed because the program stopped.
        self._cut_short: list[NodeFailure] = []
        self._outcome = Outcome.COMPLETED
        self._reason = "every node that had something to run has ended"
        self._signum: int | None = None

    @property
    def over(self) -> bool:
        return self._phase is _Phase.OVER

    @property
    def stopping(self) -> bool:
        return self._phase is _Phase.STOPPING

    @property
    def failed(self) -> set[str]:
        """Nodes that have failed, and are not restarted."""
        return {failure.node for failure in self._failures}

    @property
    def deadline(self) -> float | None:
        """When to send a `Tick` if no event comes before; None: never."""
        watches = self._has_limits and not self.stopping
        due = min(self._next_due, self._looked_at + self._timing.look_s if watches else math.inf)
        return None if self.over or math.isinf(due) else due

    def waited_for(self) -> dict[str, bool]:
        """Returns nodes that were asked to end and have not, and whether they check for that."""
        return {
            name: not node.hold.ignores_stop
            for name, node in self._nodes.items()
            if node.has_worker and node.stage is not _NodeStage.UP
        }

    def restarts_of(self, name: str) -> int:
        return self._nodes[name].attempt

    def restart_at(self, name: str) -> float:
        """Returns the monotonic time at which a node that waits for its restart is started."""
        return self._nodes[name].deadline

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes an event and returns the actions; `now` is of a clock that never goes back."""
        if self.over:
            return []
        self._extend_limits_after_sleep(now)
        self._looked_at = now
        actions = self._note(event, now)
        # Again, because a deadline may begin the stop, whose requests may be due already.
        while self._free or now >= self._next_due:
            actions += self._ask_those_free(now)
            actions += self._pass_time(now)
        if not self._left:
            actions += self._finish()
        return actions

    # Events

    def _note(self, event: Event, now: float) -> list[Action]:
        match event:
            case StopAsked():
                return self._note_stop(event, now)
            case KillAsked():
                return self._note_kill(now)
            case HostLost():
                return self._note_host(event, now)
            case Tick():
                return []
            case _:
                node = self._nodes[event.node]
                if event.attempt != node.attempt or not node.has_worker:
                    return []  # from a lost worker
                return self._note_of_node(node, event, now)

    def _note_of_node(self, node: _NodeLife, event: NodeEvent, now: float) -> list[Action]:
        match event:
            case Placed():
                node.worker.signs.pop("startup", None)
                if event.is_there:
                    self._expect(node, "startup", now)
            case Constructed():
                self._count(node, -1)
                node.runs, node.worker.constructed = event.runs, True
                self._had_work = self._had_work or event.runs
                self._count(node, 1)
                node.worker.signs.pop("startup", None)
                self._expect(node, "health", now)
                self._expect(node, "heartbeat", now)
                return self._stop_if_idle(now)
            case Healthy():
                self._expect(node, "health", now)
            case Heartbeat():
                self._expect(node, "heartbeat", now)
            case Debugged():
                for sign in list(node.worker.signs):
                    self._expect(node, sign, now)
            case StopReceived():
                hold, limit = node.hold, now + self._timing.unaware_s
                hold.ignores_stop = not event.listens
                until = hold.share_ends if event.listens else min(hold.until, limit)
                hold.until = self._due(until)
            case Preempted():
                return self._note_preemption(node, event, now)
            case Leaving():
                node.worker.left_unasked = event.unasked
                node.worker.signs.clear()
                # While all stop, its callers may still call it: it is asked in its turn.
                return [] if self.stopping else [Tell(node.name, "let_go")]
            case CutShort():
                self._cut_short.append(self._stamped(node, event.failure, now))
            case Failing():
                node.worker.failing = event.failure
            case Failed():
                return self._note_report(node, event, now)
            case Ended():
                return self._note_end(node, event, now)
            case Logged():
                pass  # what it says decides nothing
        return []

    def _note_report(self, node: _NodeLife, event: Failed, now: float) -> list[Action]:
        """Takes the failure of a node whose worker may end late: threads, exit functions."""
        worker = node.worker
        is_up = node.stage in (_NodeStage.UP, _NodeStage.ASKED)
        if not is_up or worker.verdict is not None or worker.failed is not None:
            return []
        failure = event.failure
        worker.failed = self._stamped(node, failure, now)
        # Its server closes, and its callers notice, before it can report its failure.
        unasked = event.unasked or bool(worker.left_unasked)
        worker.failed_by_itself = worker.fails_by_itself(unasked=unasked)
        if self.stopping and node.stage is _NodeStage.UP:
            self._limit_hold(node, now)  # it gets no request any more
        self._enter(node, _NodeStage.ASKED, min(node.deadline, now + self._notice_s))
        if self.stopping:
            self._note_reported(node)
            return []
        if self._may_start_again(node, now):
            return []
        worker.reported = True
        return self._note_failure(self._with_history(node, failure, now), now)

    def _note_reported(self, node: _NodeLife) -> None:
        """Takes the report of a node that will not be restarted, because all stop."""
        if node.worker.failed is not None and not node.worker.reported:
            node.worker.reported = True
            self._note_late_failure(node, node.worker.failed, is_verdict=False)

    def _note_end(self, node: _NodeLife, event: Ended, now: float) -> list[Action]:
        worker = node.worker
        worker.failed_by_itself |= worker.fails_by_itself(unasked=event.unasked)
        worker.asked_to_leave |= event.wants_restart
        forced = node.stage in (_NodeStage.TERMINATED, _NodeStage.KILLED)
        failure = self._judge(node, worker.failing or event.failure, event)
        verdict, worker.verdict = worker.verdict, None
        self._enter(node, _NodeStage.ENDED)
        if worker.reported:
            return []
        died_at = now - event.dead_s
        if failure is not None and worker.failed is None:
            failure = self._stamped(node, failure, died_at)
        if self.stopping:
            # A worker that we ended by force did not fail, unless we did so after a failure.
            counts = verdict is not None or worker.failed_by_itself or not forced
            if failure is not None and counts:
                self._note_late_failure(node, failure, is_verdict=verdict is not None)
            return []
        if failure is None:
            if node.terms.restart.when is RestartWhen.ALWAYS:
                self._forget_restarts(node, now)
                self._start_again(node, None, now)
            return self._stop_if_idle(now)
        if event.for_good:
            return self._note_failure(failure, now)
        if self._may_start_again(node, now):
            self._start_again(node, failure, now)
            return []
        return self._note_failure(self._with_history(node, failure, died_at), now)

    def _judge(
        self, node: _NodeLife, failure: NodeFailure | None, event: Ended
    ) -> NodeFailure | None:
        """Returns how a node failed; our reason for ending it says more than its exit status."""
        if node.worker.failed is not None:
            return replace(node.worker.failed, stacks=event.stacks)
        verdict = node.worker.verdict
        if verdict is None:
            return failure and replace(failure, calls=event.calls)
        failure = replace(failure or verdict, stacks=event.stacks, calls=event.calls)
        return replace(failure, summary=verdict.summary, is_consequence=False)

    def _stamped(self, node: _NodeLife, failure: NodeFailure, now: float) -> NodeFailure:
        return replace(failure, attempt=node.attempt, at_s=now - self._launched_at)

    def _with_history(self, node: _NodeLife, failure: NodeFailure, now: float) -> NodeFailure:
        return replace(self._stamped(node, failure, now), restarts=tuple(node.past.restarts))

    def _may_start_again(self, node: _NodeLife, now: float) -> bool:
        policy = node.terms.restart
        if policy.when is RestartWhen.NEVER:
            return False
        self._forget_restarts(node, now)
        return node.worker.asked_to_leave or len(node.past.restarts) < policy.max_restarts

    def _forget_restarts(self, node: _NodeLife, now: float) -> None:
        since = now - self._launched_at - node.terms.restart.window_s
        node.past.restarts = [restart for restart in node.past.restarts if restart.at_s > since]

    def _note_late_failure(
        self, node: _NodeLife, failure: NodeFailure, *, is_verdict: bool
    ) -> None:
        # While all stop, calls between nodes fail; that alone is no failure. Nor is the end of a
        # node that we would have restarted, unless it reports an error: its state may be lost. But
        # it may have made others fail.
        dispensable = node.terms.restart.when is not RestartWhen.NEVER
        went = is_verdict or failure.report is None
        is_none = failure.is_consequence or (dispensable and went)
        if not is_none or self._outcome is Outcome.FAILED:
            self._failures.append(failure)
        elif failure.is_consequence:
            self._cut_short.append(failure)

    def _start_again(self, node: _NodeLife, failure: NodeFailure | None, now: float) -> None:
        counts = failure is not None and not node.worker.asked_to_leave
        policy = node.terms.restart
        if now - node.worker.started_at >= policy.max_backoff_s:
            node.past.quick_ends = 0
        elif failure is None:
            node.past.quick_ends += 1
        soon = len(node.past.restarts) + counts + node.past.quick_ends
        delay_s = policy.delay_s(soon, self._chance())
        node.attempt += 1
        restart = Restart(node.name, node.attempt, now - self._launched_at, delay_s, failure)
        self._restarts.append(restart)
        if counts:
            node.past.restarts.append(restart)
        node.past.cause, node.worker = failure, _LastStart()
        self._enter(node, _NodeStage.WAITING, now + delay_s)
        if node.name in self._suspects and failure is not None and not failure.is_consequence:
            self._blame_within(self._timing.blame_s, now)

    def _note_failure(self, failure: NodeFailure, now: float) -> list[Action]:
        gone = self._gone_below(failure.node) if failure.is_consequence else []
        if gone:
            text = f"{failure.summary} (it calls {', '.join(gone)}, which had ended)"
            failure = replace(failure, summary=text)
        self._failures.append(failure)
        if not failure.is_consequence:
            return self._stop(now, Outcome.FAILED, "")  # its cause may still become known
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.BLAMING
            self._suspects = self._order.below(failure.node)
            is_explained = gone or self._cause_among_restarts(failure)
            self._blame_within(self._timing.blame_s if is_explained else self._blame_s, now)
        return []

    def _blame_within(self, seconds: float, now: float) -> None:
        """Waits so long for the cause, but not longer than planned before."""
        self._phase_ends = self._due(min(self._phase_ends, now + min(seconds, self._blame_s)))

    def _gone_below(self, name: str) -> list[str]:
        failed = self.failed
        callees = self._nodes[name].terms.calls
        return [each for each in callees if self._nodes[each].ended and each not in failed]

    def _note_preemption(self, node: _NodeLife, event: Preempted, now: float) -> list[Action]:
        if node.stage is not _NodeStage.UP:
            return []
        node.worker.asked_by = _By.OUTSIDE
        told = signal.Signals(event.signum).name
        if self.stopping or node.terms.restart.when is RestartWhen.NEVER:
            # It notices the request itself.
            self._enter(node, _NodeStage.ASKED, node.deadline)
            self._limit_hold(node, now)
            return self._note_stop(StopAsked(f"{told} to {node.name}", event.signum), now)
        text = f"it was asked from outside to end, by {told}"
        node.worker.verdict = NodeFailure(node.name, node.terms.host, text)
        node.worker.asked_to_leave = True
        self._enter(node, _NodeStage.ASKED, now + self._notice_s)
        return []

    def _note_stop(self, event: StopAsked, now: float) -> list[Action]:
        if self.stopping:
            return []
        # Nodes that failed only because others were ending count as not failed.
        since = now - self._launched_at - self._timing.blame_s
        known, self._failures = self._failures, []
        for failure in known:
            is_none = failure.is_consequence and failure.at_s >= since
            (self._cut_short if is_none else self._failures).append(failure)
        self._signum = event.signum
        return self._stop(now, event.outcome, event.reason)

    def _note_kill(self, now: float) -> list[Action]:
        self._note_stop(StopAsked("asked to end at once"), now)
        return [
            action
            for node in self._nodes.values()
            # A second request must not delay the end.
            if node.has_worker and node.stage is not _NodeStage.KILLED
            for action in self._kill(node, now)
        ]

    def _note_host(self, event: HostLost, now: float) -> list[Action]:
        lost = [node for name in event.nodes if _was_there(node := self._nodes[name], event)]
        if self.stopping:
            # During an orderly stop, hosts may go; else a lost one may be the cause.
            if self._outcome is Outcome.FAILED or self._failures:
                self._failures += [
                    self._loss(node, event, now) for node in lost if node.worker.failed is None
                ]
            for node in lost:
                self._enter(node, _NodeStage.ENDED)
            return []
        for node in lost:
            if node.worker.reported:
                self._enter(node, _NodeStage.ENDED)
        moving = [node for node in lost if not node.ended and self._may_move(node, now)]
        bound = [node for node in lost if not node.ended and not self._may_move(node, now)]
        if bound:
            # First the nodes that end the program, then those that only end with it.
            for node in bound + moving:
                self._lose(node, event, now)
            return self._stop(now, Outcome.FAILED, event.reason)
        for node in moving:
            if node.has_worker:
                self._move(node, event, now)
        return []

    def _may_move(self, node: _NodeLife, now: float) -> bool:
        return node.terms.restart.moves and self._is_granted(node, now)

    def _is_granted(self, node: _NodeLife, now: float) -> bool:
        return node.stage is _NodeStage.WAITING or self._may_start_again(node, now)

    def _lose(self, node: _NodeLife, event: HostLost, now: float) -> None:
        """Ends a node with its host, and the program with it."""
        if node.has_worker or not self._may_move(node, now):
            failure = node.worker.failed or self._loss(node, event, now)
            if not self._is_granted(node, now):
                failure = replace(failure, restarts=tuple(node.past.restarts))
            self._failures.append(failure)
        node.worker.reported = True
        self._enter(node, _NodeStage.ENDED)

    def _move(self, node: _NodeLife, event: HostLost, now: float) -> None:
        verdict, node.worker.verdict = node.worker.verdict, None
        if node.worker.asked_to_leave and verdict is not None:
            # A machine that is withdrawn sends SIGTERM first.
            failure = self._stamped(node, verdict, now)
        else:
            # Its node looked hung only because its host was silent.
            failure = node.worker.failed or self._loss(node, event, now)
        self._start_again(node, failure, now)

    def _loss(self, node: _NodeLife, event: HostLost, now: float) -> NodeFailure:
        failure = NodeFailure(node.name, event.host, event.reason, host_lost=True)
        return self._stamped(node, failure, now)

    def _stop_if_idle(self, now: float) -> list[Action]:
        if self._phase is not _Phase.RUNNING or not self._ends_when_idle:
            return []
        if not (self._with_work or self._had_work) or self._at_work:
            return []
        return self._stop(now, Outcome.COMPLETED, self._reason)

    # Time

    def _pass_time(self, now: float) -> list[Action]:
        if now < self._next_due:
            return []
        actions: list[Action] = []
        if self._phase is _Phase.BLAMING and now >= self._phase_ends:
            actions += self._stop(now, Outcome.FAILED, "")  # the cause may still become known
        for node in self._nodes.values():
            if node.next_deadline() <= now:
                actions += self._next_stage(node, now)
            if node.release_at() <= now:
                actions += self._let_go(node)
        releases = (node.release_at() for node in self._nodes.values())
        deadlines = (node.next_deadline() for node in self._nodes.values())
        phase_ends = self._phase_ends if self._phase is _Phase.BLAMING else math.inf
        self._next_due = min(phase_ends, *releases, *deadlines, math.inf)
        return actions

    def _next_stage(self, node: _NodeLife, now: float) -> list[Action]:
        if node.stage is _NodeStage.WAITING:
            self._enter(node, _NodeStage.UP)
            node.worker.started_at, node.hold = now, _Hold()
            self._expect(node, "startup", now)
            return [Start(node.name, node.attempt, node.past.cause)]
        if node.stage is _NodeStage.UP and self.stopping:
            # If the notice is over already, ask nodes before ending them by force.
            return [self._ask(node, now), *self._terminate(node, now)]
        if node.stage is _NodeStage.UP:
            node.worker.verdict = NodeFailure(node.name, node.terms.host, _hung(node))
            # It may wait for another node, which ends when its calls to this one fail.
            ends_all = not self._may_start_again(node, now)
            others = [
                DumpStacks(each.name)
                for each in self._nodes.values()
                if ends_all and each is not node and each.has_worker
            ]
            return [*others, *self._terminate(node, now)]
        if node.stage is _NodeStage.ASKED:
            return self._terminate(node, now)
        if node.stage is _NodeStage.TERMINATED:
            return self._kill(node, now)
        return self._give_up(node, now)

    def _terminate(self, node: _NodeLife, now: float) -> list[Action]:
        actions = [*self._dump_before_force(node), Terminate(node.name)]
        node.worker.note_asked()
        self._enter(node, _NodeStage.TERMINATED, now + self._timing.terminate_s)
        self._note_force(node)
        return actions

    def _dump_before_force(self, node: _NodeLife) -> list[Action]:
        """Asks a node, once, to write down its stacks before it is ended by force."""
        if node.stage not in (_NodeStage.UP, _NodeStage.ASKED):
            return []  # asked already, before SIGTERM
        # They were written down when the program failed.
        if self.stopping and self._outcome is Outcome.FAILED:
            return []
        return [DumpStacks(node.name)]

    def _kill(self, node: _NodeLife, now: float) -> list[Action]:
        actions = [*self._dump_before_force(node), Kill(node.name)]
        # Its host may be lost, which becomes known later; then it can start on another one.
        node.worker.note_asked()
        give_up_s = (
            self._timing.give_up_s if self.stopping else max(self._timing.give_up_s, self._blame_s)
        )
        self._enter(node, _NodeStage.KILLED, now + give_up_s)
        self._note_force(node)
        return actions

    def _note_force(self, node: _NodeLife) -> None:
        if self.stopping and node.name not in self._killed:
            self._killed.append(node.name)

    def _give_up(self, node: _NodeLife, now: float) -> list[Action]:
        verdict = node.worker.verdict or (None if node.worker.reported else node.worker.failed)
        node.worker.reported = True
        self._enter(node, _NodeStage.ENDED)
        if self.stopping:
            self._note_force(node)
        if verdict is None:
            return []  # reported before, or all stop
        verdict = self._stamped(node, verdict, now)
        if self.stopping:
            self._note_late_failure(node, verdict, is_verdict=True)
            return []
        # With another one there would be two at one address.
        text = f"{verdict.summary}; it cannot be ended by force, so it cannot be restarted"
        return self._note_failure(replace(verdict, summary=text), now)

    def _enter(self, node: _NodeLife, stage: _NodeStage, deadline: float = math.inf) -> None:
        self._count(node, -1)
        node.stage, node.deadline = stage, self._due(deadline)
        self._count(node, 1)
        node.worker.signs.clear()
        if stage not in (_NodeStage.UP, _NodeStage.ASKED):
            self._release(node)

    def _count(self, node: _NodeLife, by: int) -> None:
        has_work = node.runs is not False
        self._with_work += by * has_work
        self._at_work += by * (has_work and not node.ended)
        self._left += by * (not node.ended)

    def _expect(self, node: _NodeLife, sign: str, now: float) -> None:
        """Begins to wait for the next sign of life, if it has a limit."""
        liveness = node.terms.liveness
        limit_s = {
            "startup": liveness.startup_s,
            "health": liveness.health_s,
            "heartbeat": liveness.heartbeat_deadline_s,
        }[sign]
        # While all stop, other nodes may not be there any more to keep a node's code going. The
        # constructor has a limit of its own.
        due = node.worker.constructed or sign == "startup"
        is_at_work = node.stage is _NodeStage.UP and node.worker.left_unasked is None
        if limit_s is not None and due and is_at_work and not self.stopping:
            node.worker.signs[sign] = self._due(now + limit_s)

    def _due(self, at: float) -> float:
        """Notes a deadline, and returns it."""
        self._next_due = min(self._next_due, at)
        return at

    def _extend_limits_after_sleep(self, now: float) -> None:
        """Extends the limits of nodes if this process slept: their signs of life are queued."""
        if self.deadline is None or now - self.deadline <= self._timing.overslept_s:
            return
        slept_s = now - self._looked_at
        for node in self._nodes.values():
            # Signs given meanwhile come after this event.
            node.worker.signs = {
                sign: max(at + slept_s, now + self._timing.overslept_s)
                for sign, at in node.worker.signs.items()
            }

    # The end

    def _stop(self, now: float, outcome: Outcome, reason: str) -> list[Action]:
        self._outcome, self._reason = outcome, reason
        self._phase, self._phase_ends = _Phase.STOPPING, now + self._notice_s
        actions: list[Action] = []
        for node in self._nodes.values():
            self._note_reported(node)
            if node.stage is _NodeStage.WAITING:
                self._enter(node, _NodeStage.ENDED)
                continue
            node.worker.signs.clear()
            if node.stage in (_NodeStage.UP, _NodeStage.ASKED):
                node.deadline = self._due(min(node.deadline, self._phase_ends))
                node.hold.delays_callees = not node.hold.calls_ended
            elif node.stage is _NodeStage.KILLED:
                node.deadline = self._due(min(node.deadline, now + self._timing.give_up_s))
            if node.stage is _NodeStage.ASKED:
                self._limit_hold(node, now)
            if node.has_worker and outcome is Outcome.FAILED:
                actions.append(DumpStacks(node.name))
        for name, node in self._nodes.items():
            node.hold.callers_left = sum(
                self._nodes[each].hold.delays_callees for each in self._order.callers[name]
            )
            if not node.hold.callers_left:
                self._free.append(node)
        return actions + self._ask_those_free(now)

    def _ask_those_free(self, now: float) -> list[Action]:
        free, self._free = self._free, []
        return [self._ask(node, now) for node in free if node.stage is _NodeStage.UP]

    def _ask(self, node: _NodeLife, now: float) -> Action:
        node.worker.note_asked()
        self._enter(node, _NodeStage.ASKED, node.deadline)
        self._limit_hold(node, now)
        interrupts = self._outcome in (Outcome.INTERRUPTED, Outcome.FAILED)
        return RequestStop(node.name, interrupts)

    def _limit_hold(self, node: _NodeLife, now: float) -> None:
        # Each wave has its share, so that the last one has some of the notice, too.
        node.hold.share_ends = now + self._notice_s / self._order.waves
        node.hold.until = self._due(min(node.hold.until, node.hold.share_ends))

    def _let_go(self, node: _NodeLife) -> list[Action]:
        """Ends the time in which a node that was asked to end delays others."""
        node.hold.until = math.inf
        self._release(node)
        if not node.hold.ignores_stop or node.hold.calls_ended:
            return []
        node.hold.calls_ended = True
        return [Tell(node.name, "end_calls")]

    def _release(self, node: _NodeLife) -> None:
        if node.hold.delays_callees:
            node.hold.delays_callees = False
            for name in self._order.callees[node.name]:
                callee = self._nodes[name]
                callee.hold.callers_left -= 1
                if not callee.hold.callers_left:
                    self._free.append(callee)

    def _finish(self) -> list[Action]:
        self._phase = _Phase.OVER
        failures = self._first_cause_first()
        if failures and (self._outcome is not Outcome.FAILED or not self._reason):
            self._reason = failures[0].headline()
        result = ProgramResult(
            self._outcome if not failures else Outcome.FAILED,
            tuple(failures),
            self._reason,
            self._signum if not failures else None,
            tuple(self._killed),
            tuple(self._restarts),
            tuple(self._cut_short),
        )
        return [Finish(result)]

    def _first_cause_first(self) -> list[NodeFailure]:
        consequences = [each for each in self._failures if each.is_consequence]
        failures = self._callees_first([each for each in self._failures if not each.is_consequence])
        failures += consequences
        cause = self._cause_among_restarts(failures[0]) if failures else None
        return failures if cause is None else [cause, *failures]

    def _callees_first(self, failures: list[NodeFailure]) -> list[NodeFailure]:
        """Orders nodes that failed by themselves before their callers that failed soon after.

        The loss of a connection is known sooner than the end of a process with all its children.
        Other failures stay in the order in which they became known.
        """
        first = {
            each.node: each for each in failures if self._nodes[each.node].worker.failed_by_itself
        }
        below = {each.node: self._order.below(each.node) | {each.node} for each in failures}
        place = {each.node: at for at, each in enumerate(failures)}
        # A caller reaches more nodes than its callees. Callers first, so that a node is put before
        # the first that failed because of it, also indirectly.
        for each in sorted(failures, key=lambda each: -len(below[each.node])):
            for name in below[each.node] & first.keys():
                may_be = _may_have_caused(first[name], each, self._timing.blame_s)
                if may_be and each.node not in below[name]:
                    place[name] = min(place[name], place[each.node])
        return sorted(failures, key=lambda each: (place[each.node], len(below[each.node])))

    def _cause_among_restarts(self, failure: NodeFailure) -> NodeFailure | None:
        """Returns the last failure of a callee that has restarted since."""
        below = self._order.below(failure.node)
        within_s = max(self._timing.cause_s, self._blame_s)
        for restart in reversed(self._restarts):
            cause = restart.failure
            if cause is None or cause.is_consequence or restart.node not in below:
                continue
            if failure.is_consequence:
                is_cause = abs(failure.at_s - restart.at_s) < within_s
            else:
                may_be = _may_have_caused(cause, failure, self._timing.blame_s)
                is_cause = may_be and failure.node not in self._order.below(restart.node)
            if is_cause:
                return cause
        return None


def _may_have_caused(cause: NodeFailure, failure: NodeFailure, within_s: float) -> bool:
    """Returns whether a node may have failed because of a callee, without reporting that."""
    if failure.host_lost:
        return False
    was_killed = failure.exit_status is not None and failure.exit_status < 0
    # Reactions to the loss of a connection may be reported first; a signal is none.
    earliest_s = 0.0 if was_killed else -within_s
    return earliest_s <= failure.at_s - cause.at_s < within_s


def _was_there(node: _NodeLife, event: HostLost) -> bool:
    """Returns whether the last start of a node was on a lost host, and has not ended."""
    if node.ended or event.attempts is None:
        return not node.ended
    # A waiting node has the number of its next start, if it was started before.
    last = node.attempt if node.has_worker else max(0, node.attempt - 1)
    return event.attempts[node.name] == last


def _hung(node: _NodeLife) -> str:
    liveness = node.terms.liveness
    sign = min(node.worker.signs, key=lambda each: node.worker.signs[each])
    if sign == "startup":
        return f"it is hung: its constructor took longer than {liveness.startup_s:g} s"
    if sign == "health":
        return (
            f"it is hung: it answered no health check for {liveness.health_s:g} s, or all threads of "
            "its server were taken by calls that did not end while others waited"
        )
    return f"it is hung: it did not call lp.heartbeat() for {liveness.heartbeat_s:g} s"
