"""The life of a launched program: a state machine without I/O.

Everything that decides when a program ends, how its nodes are stopped and
whose fault a failure is, lives here. This module knows no clock, thread or
process: events and times come in, actions go out, and a supervisor obeys.

A program ends when every node with something to run has ended (nodes that only
serve are then stopped), when anybody asks for it, when a node fails, or by a
signal. Stopping takes three steps: nodes are asked; those that are left after
the notice get SIGTERM; those left after another `TERMINATE_S` are killed.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from launchpad_lite._result import NodeFailure, Outcome, ProgramResult

#: Seconds between SIGTERM and SIGKILL.
TERMINATE_S = 1.0
#: Seconds after SIGKILL until a worker that still has not ended is given up.
GIVE_UP_S = 1.0
#: Seconds to wait for the cause when all that is known are consequences.
BLAME_S = 0.5


# Events


@dataclass(frozen=True)
class Constructed:
    """A node's object is there; `runs` says whether it has something to run."""

    node: str
    runs: bool


@dataclass(frozen=True)
class Ended:
    """A worker has ended, well if there is no failure."""

    node: str
    failure: NodeFailure | None = None


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the program to end."""

    reason: str
    signum: int | None = None


@dataclass(frozen=True)
class KillAsked:
    """Somebody wants the program to end at once."""


@dataclass(frozen=True)
class HostLost:
    """A host and everything on it is gone."""

    host: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Constructed | Ended | StopAsked | KillAsked | HostLost | Tick


# Actions


@dataclass(frozen=True)
class RequestStop:
    """Ask a node to end."""

    node: str


@dataclass(frozen=True)
class Terminate:
    """Send a worker SIGTERM."""

    node: str


@dataclass(frozen=True)
class Kill:
    """Send a worker, and all it started, SIGKILL."""

    node: str


@dataclass(frozen=True)
class Finish:
    """All is over; the result is final."""

    result: ProgramResult


Action = RequestStop | Terminate | Kill | Finish


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    BLAMING = enum.auto()  # something failed, perhaps only since something else did
    ASKED = enum.auto()
    TERMINATED = enum.auto()
    KILLED = enum.auto()
    OVER = enum.auto()


_STOPPING = (_Phase.ASKED, _Phase.TERMINATED, _Phase.KILLED)


@dataclass
class _Node:
    #: None until its object is there.
    runs: bool | None = None
    ended: bool = False


@dataclass
class ProgramLife:
    """Decides. One call at a time.

    Attributes:
        names: All nodes, in the order in which they are stopped.
        notice_s: Seconds nodes have to end after they were asked; 0 ends them by force at once,
            below 0 never.
    """

    names: Sequence[str]
    notice_s: float
    #: When the current phase is over by itself; None: never.
    deadline: float | None = None
    _phase: _Phase = _Phase.RUNNING
    _nodes: dict[str, _Node] = field(default_factory=dict)
    #: In the order in which they became known.
    _failures: list[NodeFailure] = field(default_factory=list)
    _killed: list[str] = field(default_factory=list)
    _outcome: Outcome = Outcome.COMPLETED
    _reason: str = "every node that had something to run has ended"
    _signum: int | None = None

    def __post_init__(self) -> None:
        self._nodes = {name: _Node() for name in self.names}

    @property
    def over(self) -> bool:
        """Whether the program has ended."""
        return self._phase is _Phase.OVER

    @property
    def stopping(self) -> bool:
        """Whether the program is ending."""
        return self._phase in _STOPPING

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes in what happened and returns what to do.

        Args:
            event: What happened.
            now: Seconds of a clock that never goes back.
        """
        if self.over:
            return []
        actions = self._note(event, now)
        # More than one phase at once, if the notice is 0.
        while self.deadline is not None and now >= self.deadline:
            actions += self._next_phase(now)
        if not self._left() and not any(isinstance(action, Finish) for action in actions):
            actions += self._finish()
        return actions

    def _note(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Constructed):
            self._nodes[event.node].runs = event.runs
            return self._stop_if_idle(now)
        if isinstance(event, Ended):
            return self._note_end(event, now)
        if isinstance(event, StopAsked):
            return self._note_stop(event, now)
        if isinstance(event, KillAsked):
            return self._kill(now)
        if isinstance(event, HostLost):
            return self._note_host(event, now)
        return []

    def _note_end(self, event: Ended, now: float) -> list[Action]:
        node = self._nodes[event.node]
        if node.ended:
            return []
        node.ended = True
        if event.failure is None:
            return self._stop_if_idle(now)
        return self._note_failure(event.failure, now)

    def _note_failure(self, failure: NodeFailure, now: float) -> list[Action]:
        # A worker that we ended by force did not fail.
        if self._phase in (_Phase.TERMINATED, _Phase.KILLED):
            return []
        if self._phase is _Phase.ASKED:
            # While all stop, calls between nodes fail; that alone is no failure.
            if not failure.is_consequence or self._outcome is Outcome.FAILED:
                self._failures.append(failure)
            return []
        self._failures.append(failure)
        if failure.is_consequence:
            if self._phase is _Phase.RUNNING:
                self._phase, self.deadline = _Phase.BLAMING, now + BLAME_S
            return []
        return self._stop(now, Outcome.FAILED, failure.headline())

    def _note_stop(self, event: StopAsked, now: float) -> list[Action]:
        if self._phase in _STOPPING:
            return []
        outcome = Outcome.STOPPED if event.signum is None else Outcome.INTERRUPTED
        if self._failures:
            outcome = Outcome.FAILED
        self._signum = event.signum
        return self._stop(now, outcome, event.reason)

    def _note_host(self, event: HostLost, now: float) -> list[Action]:
        lost = [name for name in event.nodes if not self._nodes[name].ended]
        for name in lost:
            self._nodes[name].ended = True
        if not lost or self._phase in _STOPPING:
            return []
        self._failures.extend(NodeFailure(name, event.host, event.reason) for name in lost)
        return self._stop(now, Outcome.FAILED, event.reason)

    def _stop_if_idle(self, now: float) -> list[Action]:
        if self._phase is not _Phase.RUNNING:
            return []
        nodes = self._nodes.values()
        someone_runs_or_ran = any(node.runs is not False for node in nodes)
        someone_may_run = any(not node.ended and node.runs is not False for node in nodes)
        if not someone_runs_or_ran or someone_may_run:
            return []
        return self._stop(now, Outcome.COMPLETED, self._reason)

    def _stop(self, now: float, outcome: Outcome, reason: str) -> list[Action]:
        self._outcome, self._reason = outcome, reason
        self._phase = _Phase.ASKED
        self.deadline = None if self.notice_s < 0 else now + self.notice_s
        return [RequestStop(name) for name in self._left()]

    def _next_phase(self, now: float) -> list[Action]:
        if self._phase is _Phase.BLAMING:
            return self._stop(now, Outcome.FAILED, self._failures[0].headline())
        if self._phase is _Phase.ASKED:
            self._phase, self.deadline = _Phase.TERMINATED, now + TERMINATE_S
            self._killed = self._left()
            return [Terminate(name) for name in self._left()]
        if self._phase is _Phase.TERMINATED:
            return self._kill(now)
        return self._finish()

    def _kill(self, now: float) -> list[Action]:
        if self._phase is _Phase.KILLED:
            return []  # who asks again must not put off the end
        if self._phase in (_Phase.RUNNING, _Phase.BLAMING):
            self._outcome, self._reason = Outcome.STOPPED, "asked to end at once"
        self._phase, self.deadline = _Phase.KILLED, now + GIVE_UP_S
        self._killed = self._killed or self._left()
        return [Kill(name) for name in self._left()]

    def _finish(self) -> list[Action]:
        self._phase, self.deadline = _Phase.OVER, None
        # The cause first: a failure that is none of another's consequences.
        failures = sorted(self._failures, key=lambda failure: failure.is_consequence)
        if failures and self._outcome is not Outcome.FAILED:
            self._reason = failures[0].headline()
        result = ProgramResult(
            self._outcome if not failures else Outcome.FAILED,
            tuple(failures),
            self._reason,
            self._signum if not failures else None,
            tuple(self._killed),
        )
        return [Finish(result)]

    def _left(self) -> list[str]:
        return [name for name, node in self._nodes.items() if not node.ended]
