"""What a program's life takes in, and what it asks for: events and actions.

Events of a node say which start of it they mean by its `attempt`: 0, or the number of the restart.
What a worker said that is gone cannot be taken, so, for what its successor says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from launchpad_lite._result import NodeFailure, ProgramResult

# Events


@dataclass(frozen=True)
class Constructed:
    """A node's object is there; `runs` says whether it has something to run."""

    node: str
    attempt: int
    runs: bool


@dataclass(frozen=True)
class Ended:
    """A worker has ended, or could not be started.

    Attributes:
        node: Whose.
        attempt: Which start of it.
        failure: How it failed; None if it ended well.
        stacks: Where its threads were before, if known.
        for_good: Whether no restart can help, whatever its policy: no host is left for it.
        dead_s: Seconds for which it was dead already; what it had started had time to end.
        unasked: Whether it certainly died before it could notice that it is to end.
        wants_restart: Whether it has ended to start again, which is no failure of its own.
    """

    node: str
    attempt: int
    failure: NodeFailure | None = None
    stacks: str = ""
    for_good: bool = False
    dead_s: float = 0.0
    unasked: bool = False
    wants_restart: bool = False


@dataclass(frozen=True)
class Leaving:
    """A node has done its work, and its worker is on its way out.

    Attributes:
        node: Which.
        attempt: Which start of it.
        unasked: Whether it certainly had before it could notice that it is to end.
    """

    node: str
    attempt: int
    unasked: bool = False


@dataclass(frozen=True)
class Failed:
    """A node has failed, and its worker is on its way out; `Ended` follows.

    Attributes:
        node: Which.
        attempt: Which start of it.
        failure: How.
        unasked: Whether it certainly failed before it could notice that it is to end.
    """

    node: str
    attempt: int
    failure: NodeFailure
    unasked: bool = False


@dataclass(frozen=True)
class _Sign:
    node: str
    attempt: int


class Healthy(_Sign):
    """A node has answered a health check."""


class Heartbeat(_Sign):
    """A node has called `lp.heartbeat()`."""


@dataclass(frozen=True)
class Preempted:
    """A signal from outside asked a node to end, and it has begun to."""

    node: str
    attempt: int
    signum: int


@dataclass(frozen=True)
class StopReceived:
    """A node has been asked to end; `listens` says whether its code looks at that."""

    node: str
    attempt: int
    listens: bool


@dataclass(frozen=True)
class StopAsked:
    """The program is asked to end: as completed, if the reason is `WORK_DONE`, as stopped otherwise."""

    reason: str
    signum: int | None = None


class KillAsked:
    """The program is asked to end at once."""


@dataclass(frozen=True)
class HostLost:
    """A host and everything on it is gone.

    Attributes:
        host: Its name.
        nodes: Those that were started there last.
        reason: What happened, for people; names the host.
        attempts: Which start of each of them that was. With several hosts the loss of one may be
            reported when a node has been started elsewhere. None: the newest.
    """

    host: str
    nodes: tuple[str, ...]
    reason: str
    attempts: Mapping[str, int] | None = None


class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Placed:
    """A node that was to be started has no host, or has one now.

    Attributes:
        node: `label[replica]`.
        attempt: Which start.
        is_there: Whether its worker is being started. Until then its constructor takes no time.
    """

    node: str
    attempt: int
    is_there: bool


@dataclass(frozen=True)
class CutShort:
    """A node ends in order, though by a call that failed while the program stops."""

    node: str
    attempt: int
    failure: NodeFailure


NodeEvent = (
    Constructed
    | Leaving
    | CutShort
    | Failed
    | Ended
    | Healthy
    | Heartbeat
    | Preempted
    | StopReceived
    | Placed
)
Event = NodeEvent | StopAsked | KillAsked | HostLost | Tick


# Actions


@dataclass(frozen=True)
class _NodeAction:
    node: str


@dataclass(frozen=True)
class Start(_NodeAction):
    """Start a node's worker; `cause`: how the one before failed, if it did."""

    attempt: int
    cause: NodeFailure | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestStop(_NodeAction):
    """Ask a node to end; `interrupts`: by a signal or a failure, so its work may not be done."""

    interrupts: bool = field(default=False, compare=False)


class LetGo(_NodeAction):
    """Let a node stop to serve that has done its work; while all stop, `RequestStop` does that."""


class EndCalls(_NodeAction):
    """Refuse the new calls of a node that was asked to end and does not look at that."""


class DumpStacks(_NodeAction):
    """Make a worker write down where its threads are."""


class Terminate(_NodeAction):
    """Send a worker SIGTERM."""


class Kill(_NodeAction):
    """Send a worker, and all it started, SIGKILL."""


@dataclass(frozen=True)
class Finish:
    """All is over; the result is final."""

    result: ProgramResult


NodeAction = Start | RequestStop | LetGo | EndCalls | DumpStacks | Terminate | Kill
Action = NodeAction | Finish
