"""The life of a launched program: a state machine without I/O.

Everything that decides when a program ends, which nodes are restarted, how
nodes are stopped and whose fault a failure is, lives here. This module knows no
clock, thread or process: events and times come in, actions go out, and a
supervisor obeys.

A program ends when every node with something to run has ended (nodes that only
serve are then stopped), when anybody asks for it, when a node fails beyond its
restart policy, or by a signal.

Each node goes through stages of its own: asked to end, after the notice SIGTERM,
after another `Timing.terminate_s` killed, after `give_up_s` given up. When the program
stops all go that way, callers before those they call. A node that is hung, or
that was asked from outside to end, ends alone. When a host is lost, its
nodes have ended without any of that; where they restart is the
supervisor's business.
"""

import collections
import enum
import math
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
    NodeEvent,
    Placed,
    Preempted,
    RequestStop,
    Start,
    StopAsked,
    Terminate,
    Tick,
)
from launchpad_lite._order import StopOrder
from launchpad_lite._policies import NEVER, Liveness, RestartPolicy, RestartWhen
from launchpad_lite._result import WORK_DONE, NodeFailure, Outcome, ProgramResult, Restart
from launchpad_lite._timing import DEFAULT, Timing

#: Seconds for which the failure of a node that was restarted can be the cause of another's.
CAUSE_S = 10.0
#: Restarts that are remembered for the result, the newest ones.
MAX_RESTARTS_KEPT = 10_000
#: Who looks at a deadline later than this was asleep; nodes are not to blame for it.
OVERSLEPT_S = 1.0
#: How often the clock is checked while nodes have limits, to notice a suspended machine.
LOOK_S = 1.0


@dataclass(frozen=True)
class NodeTerms:
    """What must be known of a node.

    Attributes:
        name: `label[replica]`.
        host: Where it runs, for people.
        calls: Nodes it calls.
        restart: Whether it is restarted.
        liveness: How it shows that it is not hung.
    """

    name: str
    host: str = ""
    calls: tuple[str, ...] = ()
    restart: RestartPolicy = NEVER
    liveness: Liveness = field(default_factory=Liveness)


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    BLAMING = enum.auto()  # something failed, perhaps only because something else did
    STOPPING = enum.auto()
    OVER = enum.auto()


class _Stage(enum.Enum):
    WAITING = enum.auto()  # to be started, at its deadline
    UP = enum.auto()
    ASKED = enum.auto()
    TERMINATED = enum.auto()
    KILLED = enum.auto()
    ENDED = enum.auto()  # for good


@dataclass
class _Node:
    terms: NodeTerms
    stage: _Stage = _Stage.WAITING
    attempt: int = 0
    #: None until its object was there for the first time.
    runs: bool | None = None
    #: When its stage is over by itself; infinity: never.
    deadline: float = math.inf
    #: Whether its object is there, of this attempt.
    constructed: bool = False
    #: Whether its work is done, so that nothing is expected of it but to end.
    leaving: bool = False
    #: Whether it was before it was asked to end.
    left_unasked: bool = False
    #: Whether its code does not look at the stop it was asked for.
    ignores_stop: bool = False
    #: Whether its new calls are refused.
    calls_ended: bool = False
    #: While all stop: whether it holds up those it calls, until when, and how many hold it up.
    delays_callees: bool = False
    delays_until: float = math.inf
    share_ends: float = math.inf
    callers_left: int = 0
    #: By when it must show a sign of life, by the name of the limit.
    signs: dict[str, float] = field(default_factory=dict)
    #: How it said that it failed, before its worker ended.
    failed: NodeFailure | None = None
    #: Whether that is known to all.
    reported: bool = False
    #: Whether it was asked to end, by us or from outside: it may fail because of that.
    asked: bool = False
    warned: bool = False
    #: Whether it failed of neither.
    failed_by_itself: bool = False
    #: Why it alone is being ended.
    verdict: NodeFailure | None = None
    #: Whether that is because it was asked to from outside, which is no fault of its own.
    asked_to_leave: bool = False
    #: How it failed last, if it was restarted since.
    cause: NodeFailure | None = None
    #: Its restarts after failures, as far back as its policy looks.
    recent: list[Restart] = field(default_factory=list)
    #: When it was started last, and how often it ended well soon after, without a longer run since.
    started_at: float = -math.inf
    quick_ends: int = 0

    @property
    def name(self) -> str:
        return self.terms.name

    @property
    def ended(self) -> bool:
        return self.stage is _Stage.ENDED

    @property
    def has_worker(self) -> bool:
        return self.stage not in (_Stage.WAITING, _Stage.ENDED)

    def fails_by_itself(self, *, unasked: bool) -> bool:
        """Returns whether it failed by itself, not because it was asked to end; `unasked`: as reported."""
        # What we ask may have been on its way.
        return not self.warned and (unasked or not self.asked)

    def next_deadline(self) -> float:
        signs = self.signs.values() if self.stage is _Stage.UP else ()
        return min(self.deadline, *signs, math.inf)


class ProgramLife:
    """Decides. One call at a time."""

    def __init__(
        self,
        nodes: Iterable[NodeTerms],
        notice_s: float,
        *,
        timing: Timing = DEFAULT,
        blame_s: float | None = None,
        now: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Begins the life of a program; its nodes are started at the first event.

        Args:
            nodes: All of them.
            notice_s: Seconds nodes have to end after the program was asked to; 0 ends them by
                force at once, below 0 never.
            timing: How long it waits for what.
            blame_s: Seconds to wait for the cause when all that is known are consequences, and
                for the end of a worker that cannot be ended by force. With several hosts: longer
                than it takes to notice that one of them has gone silent. None: as `timing` says.
            now: Seconds of a clock that never goes back.
            chance: Returns numbers evenly distributed from 0 to 1.
        """
        self._nodes = {terms.name: _Node(terms, deadline=now) for terms in nodes}
        self._order = StopOrder({name: node.terms.calls for name, node in self._nodes.items()})
        #: How many nodes have or may have something to run, how many of these have not ended, and
        #: how many of all have not. Counted, because with thousands each look at all is felt.
        self._with_work = self._at_work = self._left = len(self._nodes)
        #: Whether any node ever said that it has something to run.
        self._had_work = False
        self._notice_s = math.inf if notice_s < 0 else notice_s
        self._timing = timing
        self._blame_s = timing.blame_s if blame_s is None else blame_s
        self._launched_at = now
        self._chance = chance
        self._phase = _Phase.RUNNING
        #: When the phase is over by itself.
        self._phase_ends = math.inf
        #: Nothing is due before it; what is put off leaves it early, which does no harm.
        self._next_due = now
        self._looked_at = now
        #: Nodes whose callers have ended, to be asked to end.
        self._free: list[_Node] = []
        self._has_limits = any(node.terms.liveness != Liveness() for node in self._nodes.values())
        #: In the order in which they became known.
        self._failures: list[NodeFailure] = []
        #: While the cause of a failure is waited for: the nodes it can be looked for in.
        self._suspects: set[str] = set()
        # A node that always ends well is started again for as long as the program runs.
        self._restarts: collections.deque[Restart] = collections.deque(maxlen=MAX_RESTARTS_KEPT)
        self._killed: list[str] = []
        #: How nodes ended whose calls failed because the program stopped.
        self._cut_short: list[NodeFailure] = []
        self._outcome = Outcome.COMPLETED
        self._reason = "every node that had something to run has ended"
        self._signum: int | None = None

    @property
    def over(self) -> bool:
        """Whether the program has ended."""
        return self._phase is _Phase.OVER

    @property
    def stopping(self) -> bool:
        """Whether the program is ending."""
        return self._phase is _Phase.STOPPING

    @property
    def failed(self) -> set[str]:
        """The nodes that have failed, and are not restarted."""
        return {failure.node for failure in self._failures}

    @property
    def deadline(self) -> float | None:
        """When to send a `Tick` if nothing happens before; None: never."""
        watches = self._has_limits and not self.stopping
        due = min(self._next_due, self._looked_at + LOOK_S if watches else math.inf)
        return None if self.over or math.isinf(due) else due

    def waited_for(self) -> dict[str, bool]:
        """Returns the nodes that were asked to end and have not, and whether they look at that."""
        return {
            name: not node.ignores_stop
            for name, node in self._nodes.items()
            if node.has_worker and node.stage is not _Stage.UP
        }

    def restarts_of(self, name: str) -> int:
        """Returns how often a node was restarted."""
        return self._nodes[name].attempt

    def restart_at(self, name: str) -> float:
        """Returns the monotonic time at which a node that waits for its restart is started."""
        return self._nodes[name].deadline

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes in what happened and returns what to do.

        Args:
            event: What happened.
            now: Seconds of a clock that never goes back.
        """
        if self.over:
            return []
        self._forgive_oversleeping(now)
        self._looked_at = now
        actions = self._note(event, now)
        # Again, because what time brings may be the stop, and what is asked may be due already.
        while self._free or now >= self._next_due:
            actions += self._ask_those_free(now)
            actions += self._pass_time(now)
        if not self._left:
            actions += self._finish()
        return actions

    # What happened

    def _note(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, StopAsked):
            return self._note_stop(event, now)
        if isinstance(event, KillAsked):
            return self._note_kill(now)
        if isinstance(event, HostLost):
            return self._note_host(event, now)
        if isinstance(event, Tick):
            return []
        node = self._nodes[event.node]
        if event.attempt != node.attempt or not node.has_worker:
            return []  # said by a worker that is gone
        return self._note_of_node(node, event, now)

    def _note_of_node(self, node: _Node, event: NodeEvent, now: float) -> list[Action]:
        liveness = node.terms.liveness
        if isinstance(event, Ended):
            return self._note_end(node, event, now)
        if isinstance(event, Preempted):
            return self._note_preemption(node, event, now)
        if isinstance(event, Failed):
            return self._note_report(node, event, now)
        if isinstance(event, Leaving):
            node.leaving, node.left_unasked = True, event.unasked
            node.signs.clear()
            # While all stop, its callers may have more to hand in: it is asked in its turn.
            return [] if self.stopping else [LetGo(node.name)]
        if isinstance(event, CutShort):
            self._cut_short.append(self._stamped(node, event.failure, now))
            return []
        if isinstance(event, Constructed):
            self._count(node, -1)
            node.runs, node.constructed = event.runs, True
            self._had_work = self._had_work or event.runs
            self._count(node, 1)
            node.signs.pop("startup", None)
            self._expect(node, "health", liveness.health_s, now)
            self._expect(node, "heartbeat", liveness.heartbeat_deadline_s, now)
            return self._stop_if_idle(now)
        if isinstance(event, Placed):
            node.signs.pop("startup", None)
            if event.is_there:
                self._expect(node, "startup", liveness.startup_s, now)
        elif isinstance(event, Healthy):
            self._expect(node, "health", liveness.health_s, now)
        elif isinstance(event, Heartbeat):
            self._expect(node, "heartbeat", liveness.heartbeat_deadline_s, now)
        else:
            node.ignores_stop = not event.listens
            until = (
                min(node.delays_until, now + self._timing.unaware_s)
                if node.ignores_stop
                else node.share_ends
            )
            node.delays_until = self._due(until)
        return []

    def _note_report(self, node: _Node, event: Failed, now: float) -> list[Action]:
        """Takes in how a node failed whose worker may take long to end: threads, exit functions."""
        if (
            node.stage not in (_Stage.UP, _Stage.ASKED)
            or node.verdict is not None
            or node.failed is not None
        ):
            return []
        failure = event.failure
        node.leaving, node.failed = True, self._stamped(node, failure, now)
        # Its server closes, and its callers know, before it can say how it failed.
        node.failed_by_itself = node.fails_by_itself(unasked=event.unasked or node.left_unasked)
        if self.stopping and node.stage is _Stage.UP:
            self._limit_hold(node, now)  # it is not asked any more
        self._enter(node, _Stage.ASKED, min(node.deadline, now + self._notice_s))
        if self.stopping:
            self._note_reported(node)
            return []
        if self._may_start_again(node, now):
            return []
        node.reported = True
        return self._note_failure(self._with_history(node, failure, now), now)

    def _note_reported(self, node: _Node) -> None:
        """Takes in the report of a node that will not be restarted, because all stop."""
        if node.failed is not None and not node.reported:
            node.reported = True
            self._note_late_failure(node, node.failed, is_verdict=False)

    def _note_end(self, node: _Node, event: Ended, now: float) -> list[Action]:
        node.failed_by_itself = node.failed_by_itself or node.fails_by_itself(unasked=event.unasked)
        by_force = node.stage in (_Stage.TERMINATED, _Stage.KILLED) and not node.failed_by_itself
        failure = self._judge(node, event.failure, event.stacks)
        verdict, node.verdict = node.verdict, None
        self._enter(node, _Stage.ENDED)
        if node.reported:
            return []
        died_at = now - event.dead_s
        if failure is not None and node.failed is None:
            failure = self._stamped(node, failure, died_at)
        if self.stopping:
            # A worker that we ended by force did not fail, unless that was the reason.
            if failure is not None and (verdict is not None or not by_force):
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

    def _judge(self, node: _Node, failure: NodeFailure | None, stacks: str) -> NodeFailure | None:
        """Returns how a node failed; why we ended it says more than how it then went."""
        if node.failed is not None:
            return replace(node.failed, stacks=stacks)
        verdict = node.verdict
        if verdict is None:
            return failure
        return replace(
            failure or verdict, summary=verdict.summary, stacks=stacks, is_consequence=False
        )

    def _stamped(self, node: _Node, failure: NodeFailure, now: float) -> NodeFailure:
        return replace(failure, attempt=node.attempt, at_s=now - self._launched_at)

    def _with_history(self, node: _Node, failure: NodeFailure, now: float) -> NodeFailure:
        return replace(self._stamped(node, failure, now), restarts=tuple(node.recent))

    def _may_start_again(self, node: _Node, now: float) -> bool:
        """Returns whether its policy allows a restart after a failure."""
        policy = node.terms.restart
        if policy.when is RestartWhen.NEVER:
            return False
        self._forget_restarts(node, now)
        return node.asked_to_leave or len(node.recent) < policy.max_restarts

    def _forget_restarts(self, node: _Node, now: float) -> None:
        since = now - self._launched_at - node.terms.restart.window_s
        node.recent = [restart for restart in node.recent if restart.at_s > since]

    def _note_late_failure(self, node: _Node, failure: NodeFailure, *, is_verdict: bool) -> None:
        # While all stop, calls between nodes fail; that alone is no failure. Nor is it one that a
        # node went, by us or by others, which we would have restarted, unless it says what
        # went wrong: its state may be lost. But others may have failed of it.
        dispensable = node.terms.restart.when is not RestartWhen.NEVER
        went = is_verdict or failure.report is None
        is_none = failure.is_consequence or (dispensable and went)
        if not is_none or self._outcome is Outcome.FAILED:
            self._failures.append(failure)
        elif failure.is_consequence:
            self._cut_short.append(failure)

    def _start_again(self, node: _Node, failure: NodeFailure | None, now: float) -> None:
        counts = failure is not None and not node.asked_to_leave
        policy = node.terms.restart
        if now - node.started_at >= policy.max_backoff_s:
            node.quick_ends = 0
        elif failure is None:
            node.quick_ends += 1
        soon = len(node.recent) + counts + node.quick_ends
        delay_s = policy.delay_s(soon, self._chance())
        node.attempt += 1
        restart = Restart(node.name, node.attempt, now - self._launched_at, delay_s, failure)
        self._restarts.append(restart)
        if counts:
            node.recent.append(restart)
        node.cause, node.asked_to_leave, node.failed = failure, False, None
        node.asked = node.warned = node.failed_by_itself = False
        self._enter(node, _Stage.WAITING, now + delay_s)
        if node.name in self._suspects and failure is not None and not failure.is_consequence:
            self._blame_within(self._timing.blame_s, now)

    def _note_failure(self, failure: NodeFailure, now: float) -> list[Action]:
        gone = self._gone_below(failure.node) if failure.is_consequence else []
        if gone:
            text = f"{failure.summary} (it calls {', '.join(gone)}, which had ended)"
            failure = replace(failure, summary=text)
        self._failures.append(failure)
        if not failure.is_consequence:
            return self._stop(now, Outcome.FAILED, "")  # its cause may yet become known
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.BLAMING
            self._suspects = self._order.below(failure.node)
            is_explained = gone or self._cause_among_restarts(failure)
            self._blame_within(self._timing.blame_s if is_explained else self._blame_s, now)
        return []

    def _blame_within(self, seconds: float, now: float) -> None:
        """Waits so long for the cause, and no longer than so far."""
        self._phase_ends = self._due(min(self._phase_ends, now + min(seconds, self._blame_s)))

    def _gone_below(self, name: str) -> list[str]:
        """Returns the nodes that a node calls and that have ended well."""
        failed = self.failed
        callees = self._nodes[name].terms.calls
        return [each for each in callees if self._nodes[each].ended and each not in failed]

    def _note_preemption(self, node: _Node, event: Preempted, now: float) -> list[Action]:
        if node.stage is not _Stage.UP:
            return []
        node.warned = True
        told = signal.Signals(event.signum).name
        if self.stopping or node.terms.restart.when is RestartWhen.NEVER:
            # It asks itself.
            self._enter(node, _Stage.ASKED, node.deadline)
            self._limit_hold(node, now)
            return self._note_stop(StopAsked(f"{told} to {node.name}", event.signum), now)
        text = event.reason or f"it was asked from outside to end, by {told}"
        node.verdict, node.asked_to_leave = NodeFailure(node.name, node.terms.host, text), True
        self._enter(node, _Stage.ASKED, now + self._notice_s)
        return []

    def _note_stop(self, event: StopAsked, now: float) -> list[Action]:
        if self.stopping:
            return []
        # Nodes that failed only because others were ending already did not fail.
        since = now - self._launched_at - self._timing.blame_s
        known, self._failures = self._failures, []
        for failure in known:
            is_none = failure.is_consequence and failure.at_s >= since
            (self._cut_short if is_none else self._failures).append(failure)
        self._signum = event.signum
        outcome = Outcome.STOPPED if event.signum is None else Outcome.INTERRUPTED
        if event.reason == WORK_DONE:
            outcome = Outcome.COMPLETED
        return self._stop(now, outcome, event.reason)

    def _note_kill(self, now: float) -> list[Action]:
        self._note_stop(StopAsked("asked to end at once"), now)
        return [
            action
            for node in self._nodes.values()
            # Who asks again must not put off the end.
            if node.has_worker and node.stage is not _Stage.KILLED
            for action in self._kill(node, now)
        ]

    def _note_host(self, event: HostLost, now: float) -> list[Action]:
        lost = [node for name in event.nodes if _was_there(node := self._nodes[name], event)]
        if self.stopping:
            # While all stop as they should, hosts may go; if not, one that went may be the cause.
            if self._outcome is Outcome.FAILED or self._failures:
                self._failures += [
                    self._loss(node, event, now) for node in lost if node.failed is None
                ]
            for node in lost:
                self._enter(node, _Stage.ENDED)
            return []
        for node in lost:
            if node.reported:
                self._enter(node, _Stage.ENDED)
        moving = [node for node in lost if not node.ended and self._may_move(node, now)]
        bound = [node for node in lost if not node.ended and not self._may_move(node, now)]
        if bound:
            # Those that end the program before those that only end with it.
            for node in bound + moving:
                self._lose(node, event, now)
            return self._stop(now, Outcome.FAILED, event.reason)
        for node in moving:
            if node.has_worker:
                self._move(node, event, now)
        return []

    def _may_move(self, node: _Node, now: float) -> bool:
        return node.terms.restart.moves and self._is_granted(node, now)

    def _is_granted(self, node: _Node, now: float) -> bool:
        return node.stage is _Stage.WAITING or self._may_start_again(node, now)

    def _lose(self, node: _Node, event: HostLost, now: float) -> None:
        """Ends a node with its host, and the program with it."""
        if node.has_worker or not self._may_move(node, now):
            failure = node.failed or self._loss(node, event, now)
            is_granted = self._is_granted(node, now)
            self._failures.append(
                failure if is_granted else replace(failure, restarts=tuple(node.recent))
            )
        node.reported = True
        self._enter(node, _Stage.ENDED)

    def _move(self, node: _Node, event: HostLost, now: float) -> None:
        verdict, node.verdict = node.verdict, None
        if node.asked_to_leave and verdict is not None:
            # A machine that is taken away gives its notice first.
            failure = self._stamped(node, verdict, now)
        else:
            # One that looked hung did so because its host was silent.
            failure = node.failed or self._loss(node, event, now)
        self._start_again(node, failure, now)

    def _loss(self, node: _Node, event: HostLost, now: float) -> NodeFailure:
        return self._stamped(
            node, NodeFailure(node.name, event.host, event.reason, host_lost=True), now
        )

    def _stop_if_idle(self, now: float) -> list[Action]:
        if self._phase is not _Phase.RUNNING:
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
            actions += self._stop(now, Outcome.FAILED, "")  # the cause may yet become known
        for node in self._nodes.values():
            if node.next_deadline() <= now:
                actions += self._next_stage(node, now)
            if node.stage is _Stage.ASKED and node.delays_until <= now:
                actions += self._let_go(node)
        releases = (
            node.delays_until
            for node in self._nodes.values()
            if node.stage is _Stage.ASKED and node.delays_until > now
        )
        deadlines = (node.next_deadline() for node in self._nodes.values())
        phase_ends = self._phase_ends if self._phase is _Phase.BLAMING else math.inf
        self._next_due = min(phase_ends, *releases, *deadlines, math.inf)
        return actions

    def _next_stage(self, node: _Node, now: float) -> list[Action]:
        if node.stage is _Stage.WAITING:
            self._enter(node, _Stage.UP)
            node.started_at = now
            node.constructed = node.leaving = node.left_unasked = False
            node.ignores_stop = node.calls_ended = False
            node.delays_until = node.share_ends = math.inf
            self._expect(node, "startup", node.terms.liveness.startup_s, now)
            return [Start(node.name, node.attempt, node.cause)]
        if node.stage is _Stage.UP and self.stopping:
            # Who looks only when the notice is over asks those first whom it ends by force.
            return [self._ask(node, now), *self._terminate(node, now)]
        if node.stage is _Stage.UP:
            node.verdict = NodeFailure(node.name, node.terms.host, _hung(node))
            # It may wait for another, whose calls fail, and which then ends, when it is ended.
            ends_all = not self._may_start_again(node, now)
            others = [
                DumpStacks(each.name)
                for each in self._nodes.values()
                if ends_all and each is not node and each.has_worker
            ]
            return [*others, *self._terminate(node, now)]
        if node.stage is _Stage.ASKED:
            return self._terminate(node, now)
        if node.stage is _Stage.TERMINATED:
            return self._kill(node, now)
        return self._give_up(node, now)

    def _terminate(self, node: _Node, now: float) -> list[Action]:
        actions = [*self._dump_before_force(node), Terminate(node.name)]
        node.asked = True
        self._enter(node, _Stage.TERMINATED, now + self._timing.terminate_s)
        self._note_force(node)
        return actions

    def _dump_before_force(self, node: _Node) -> list[Action]:
        """Asks a node that is about to be ended by force, once, to write down where it is."""
        if node.stage not in (_Stage.UP, _Stage.ASKED):
            return []  # it was, before SIGTERM
        # When the program failed, it was written down already.
        if self.stopping and self._outcome is Outcome.FAILED:
            return []
        return [DumpStacks(node.name)]

    def _kill(self, node: _Node, now: float) -> list[Action]:
        actions = [*self._dump_before_force(node), Kill(node.name)]
        # Its host may be gone, which becomes known later; then it can be started on another one.
        node.asked = True
        give_up_s = (
            self._timing.give_up_s if self.stopping else max(self._timing.give_up_s, self._blame_s)
        )
        self._enter(node, _Stage.KILLED, now + give_up_s)
        self._note_force(node)
        return actions

    def _note_force(self, node: _Node) -> None:
        if self.stopping and node.name not in self._killed:
            self._killed.append(node.name)

    def _give_up(self, node: _Node, now: float) -> list[Action]:
        verdict = node.verdict if node.reported else node.verdict or node.failed
        node.reported = True
        self._enter(node, _Stage.ENDED)
        if self.stopping:
            self._note_force(node)
        if verdict is None:
            return []  # it was reported before, or all stop
        verdict = self._stamped(node, verdict, now)
        if self.stopping:
            self._note_late_failure(node, verdict, is_verdict=True)
            return []
        # Another one beside it would be two at one address.
        text = f"{verdict.summary}; it cannot be ended by force, so it cannot be restarted"
        return self._note_failure(replace(verdict, summary=text), now)

    def _enter(self, node: _Node, stage: _Stage, deadline: float = math.inf) -> None:
        self._count(node, -1)
        node.stage, node.deadline = stage, self._due(deadline)
        self._count(node, 1)
        node.signs.clear()
        if stage not in (_Stage.UP, _Stage.ASKED):
            self._release(node)

    def _count(self, node: _Node, by: int) -> None:
        has_work = node.runs is not False
        self._with_work += by * has_work
        self._at_work += by * (has_work and not node.ended)
        self._left += by * (not node.ended)

    def _expect(self, node: _Node, sign: str, limit_s: float | None, now: float) -> None:
        # While all stop, no other node may be left that would make a node's code show progress. The
        # constructor has a limit of its own.
        due = node.constructed or sign == "startup"
        if (
            limit_s is not None
            and due
            and node.stage is _Stage.UP
            and not (self.stopping or node.leaving)
        ):
            node.signs[sign] = self._due(now + limit_s)

    def _due(self, at: float) -> float:
        """Takes note of a time at which something will be due, and returns it."""
        self._next_due = min(self._next_due, at)
        return at

    def _forgive_oversleeping(self, now: float) -> None:
        """Puts off the limits of nodes if we looked too late: their signs of life wait for us."""
        if self.deadline is None or now - self.deadline <= OVERSLEPT_S:
            return
        slept_s = now - self._looked_at
        for node in self._nodes.values():
            # Signs that were given meanwhile come after this event.
            node.signs = {
                sign: max(at + slept_s, now + OVERSLEPT_S) for sign, at in node.signs.items()
            }

    # The end

    def _stop(self, now: float, outcome: Outcome, reason: str) -> list[Action]:
        self._outcome, self._reason = outcome, reason
        self._phase, self._phase_ends = _Phase.STOPPING, now + self._notice_s
        actions: list[Action] = []
        for node in self._nodes.values():
            self._note_reported(node)
            if node.stage is _Stage.WAITING:
                self._enter(node, _Stage.ENDED)
                continue
            node.signs.clear()
            if node.stage in (_Stage.UP, _Stage.ASKED):
                node.deadline = self._due(min(node.deadline, self._phase_ends))
                node.delays_callees = not node.calls_ended
            elif node.stage is _Stage.KILLED:
                node.deadline = self._due(min(node.deadline, now + self._timing.give_up_s))
            if node.stage is _Stage.ASKED:
                self._limit_hold(node, now)
            if node.has_worker and outcome is Outcome.FAILED:
                actions.append(DumpStacks(node.name))
        for name, node in self._nodes.items():
            node.callers_left = sum(
                self._nodes[each].delays_callees for each in self._order.callers[name]
            )
            if not node.callers_left:
                self._free.append(node)
        return actions + self._ask_those_free(now)

    def _ask_those_free(self, now: float) -> list[Action]:
        """Asks the nodes to end whose callers have ended."""
        free, self._free = self._free, []
        return [self._ask(node, now) for node in free if node.stage is _Stage.UP]

    def _ask(self, node: _Node, now: float) -> Action:
        node.asked = True
        self._enter(node, _Stage.ASKED, node.deadline)
        self._limit_hold(node, now)
        return RequestStop(
            node.name, interrupts=self._outcome in (Outcome.INTERRUPTED, Outcome.FAILED)
        )

    def _limit_hold(self, node: _Node, now: float) -> None:
        # Each wave has its part, so that the last one has some of the notice, too.
        node.share_ends = now + self._notice_s / self._order.waves
        node.delays_until = self._due(min(node.delays_until, node.share_ends))

    def _let_go(self, node: _Node) -> list[Action]:
        """Ends the time for which a node that was asked holds up others."""
        node.delays_until = math.inf
        self._release(node)
        if not node.ignores_stop or node.calls_ended:
            return []
        node.calls_ended = True
        return [EndCalls(node.name)]

    def _release(self, node: _Node) -> None:
        if node.delays_callees:
            node.delays_callees = False
            for name in self._order.callees[node.name]:
                callee = self._nodes[name]
                callee.callers_left -= 1
                if not callee.callers_left:
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
        """Orders failures: one that is none of another's consequences comes first."""
        consequences = [each for each in self._failures if each.is_consequence]
        failures = self._callees_first([each for each in self._failures if not each.is_consequence])
        failures += consequences
        cause = self._cause_among_restarts(failures[0]) if failures else None
        return failures if cause is None else [cause, *failures]

    def _callees_first(self, failures: list[NodeFailure]) -> list[NodeFailure]:
        """Puts nodes that failed by themselves before their callers that failed soon after with their own errors.

        That a connection is lost is known sooner than that a process has ended, and with it all
        that it had started. Others stay in the order in which they became known.
        """
        first = {each.node: each for each in failures if self._nodes[each.node].failed_by_itself}
        below = {each.node: self._order.below(each.node) | {each.node} for each in failures}
        place = {each.node: at for at, each in enumerate(failures)}
        # A node that calls another, and is not called by it, has more below itself. Callers first, so
        # that a node takes the place of the first that failed of it, however far away.
        for each in sorted(failures, key=lambda each: -len(below[each.node])):
            for name in below[each.node] & first.keys():
                if each.node not in below[name] and _may_have_caused(
                    first[name], each, self._timing.blame_s
                ):
                    place[name] = min(place[name], place[each.node])
        return sorted(failures, key=lambda each: (place[each.node], len(below[each.node])))

    def _cause_among_restarts(self, failure: NodeFailure) -> NodeFailure | None:
        """Finds why a node failed last that was called by it and has restarted since."""
        below = self._order.below(failure.node)
        within_s = max(CAUSE_S, self._blame_s)
        for restart in reversed(self._restarts):
            cause = restart.failure
            if cause is None or cause.is_consequence or restart.node not in below:
                continue
            if failure.is_consequence:
                is_cause = abs(failure.at_s - restart.at_s) < within_s
            else:
                is_cause = _may_have_caused(cause, failure, self._timing.blame_s) and (
                    failure.node not in self._order.below(restart.node)
                )
            if is_cause:
                return cause
        return None


def _may_have_caused(cause: NodeFailure, failure: NodeFailure, within_s: float) -> bool:
    """Returns whether a node may have failed because one that it calls did, without saying so."""
    if failure.host_lost:
        return False
    was_killed = failure.exit_status is not None and failure.exit_status < 0
    # Who answers the loss of a connection may be heard first; a signal is no such answer.
    earliest_s = 0.0 if was_killed else -within_s
    return earliest_s <= failure.at_s - cause.at_s < within_s


def _was_there(node: _Node, event: HostLost) -> bool:
    """Returns whether a node was on a lost host when it was last started, and has not ended."""
    if node.ended or event.attempts is None:
        return not node.ended
    # One that waits has the number of the start that is to come, if it was started before.
    last = node.attempt if node.has_worker else max(0, node.attempt - 1)
    return event.attempts[node.name] == last


def _hung(node: _Node) -> str:
    liveness = node.terms.liveness
    sign = min(node.signs, key=lambda each: node.signs[each])
    if sign == "startup":
        return f"it is hung: its constructor took longer than {liveness.startup_s:g} s"
    if sign == "health":
        return (
            f"it is hung: it answered no health check for {liveness.health_s:g} s, or all threads of "
            "its server were taken by calls that did not end while others waited"
        )
    return f"it is hung: it did not call lp.heartbeat() for {liveness.heartbeat_s:g} s"
