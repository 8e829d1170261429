"""Messages between a program's life and its nodes: events go up, actions go down.

A thread posts them as they are. Between processes, `to_fields` and `from_fields` make JSON of them.

Events of a node name the start that they come from by its `attempt`: 0, or the number of the
restart. So late messages of a lost worker are not taken for those of its successor.

No code changes a message. `frozen=True` would say so. But each method that `dataclass` compiles makes
every launcher and every agent start later, so these classes share theirs.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from launchpad_lite.life.result import WORK_DONE, NodeFailure, Outcome, ProgramResult
from launchpad_lite.parts.as_json import from_json, to_json


@dataclass(eq=False, repr=False)
class _Message:  # noqa: PLW1641 - none is hashed
    def __eq__(self, other: object) -> bool:
        names = [each.name for each in fields(self) if each.compare]
        return type(self) is type(other) and all(
            getattr(self, n) == getattr(other, n) for n in names
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


# Events


@dataclass(eq=False, repr=False)
class _NodeEvent(_Message):
    """A node, as `label[replica]`, says something; `attempt`: which start of it."""

    node: str
    attempt: int


@dataclass(eq=False, repr=False)
class Constructed(_NodeEvent):
    """A node's object is there; `runs` says whether it has something to run."""

    runs: bool


@dataclass(eq=False, repr=False)
class Ended(_NodeEvent):
    """A worker has ended, or could not be started."""

    failure: NodeFailure | None = None  # how it failed; None if it ended well
    stacks: str = ""  # the stacks of its threads before, if known
    calls: str = ""  # its last calls, if known
    #: Whether no restart can help, whatever its policy: no host is left for it.
    for_good: bool = False
    dead_s: float = 0.0  # seconds since its death, in which its child processes could end
    unasked: bool = False  # whether it certainly died before it could notice a request to end
    #: Whether it has ended to start again, which is no failure of its own.
    wants_restart: bool = False


@dataclass(eq=False, repr=False)
class Leaving(_NodeEvent):
    """A node has done its work, and its worker is ending; `unasked` as of `Failed`."""

    unasked: bool = False


@dataclass(eq=False, repr=False)
class Failing(_NodeEvent):
    """A node fails; `failure` is all that is known before code of the exception runs."""

    failure: NodeFailure


@dataclass(eq=False, repr=False)
class Failed(_NodeEvent):
    """A node has failed, and its worker is ending; `Ended` follows."""

    failure: NodeFailure
    unasked: bool = False  # whether it certainly failed before it could notice a request to end


class Healthy(_NodeEvent):
    """A node has answered a health check."""


class Heartbeat(_NodeEvent):
    """A node has called `lp.heartbeat()`."""


@dataclass(eq=False, repr=False)
class Debugged(_NodeEvent):
    """Somebody debugs a node, which is not hung then; `place`: where a thread has stopped just now."""

    place: str


@dataclass(eq=False, repr=False)
class Preempted(_NodeEvent):
    """A signal from outside has asked a node to end, and it has begun to."""

    signum: int


@dataclass(eq=False, repr=False)
class StopReceived(_NodeEvent):
    """A node has been asked to end; `listens`: whether its code checks for that."""

    listens: bool


@dataclass(eq=False, repr=False)
class StopAsked(_Message):
    """The program is asked to end: completed if the reason is `WORK_DONE`, else stopped."""

    reason: str
    signum: int | None = None

    @property
    def outcome(self) -> Outcome:
        if self.reason == WORK_DONE:
            return Outcome.COMPLETED
        return Outcome.STOPPED if self.signum is None else Outcome.INTERRUPTED


class KillAsked:
    """The program is asked to end at once."""


@dataclass(eq=False, repr=False)
class HostLost(_Message):
    """A host and everything on it is gone."""

    host: str
    nodes: tuple[str, ...]  # that were last started there
    reason: str  # says so, with the name of the host
    #: The start of each: with several hosts, the loss of one may be reported after a node has been
    #: started elsewhere. None: the newest.
    attempts: Mapping[str, int] | None = None


class Tick:
    """Time has passed."""


@dataclass(eq=False, repr=False)
class Placed(_NodeEvent):
    """A node that is to start has no host, or has one now."""

    is_there: bool  # whether its worker is being started; its constructor takes no time before


@dataclass(eq=False, repr=False)
class CutShort(_NodeEvent):
    """A node ends in order, by a call that failed while the program stops."""

    failure: NodeFailure


@dataclass(eq=False, repr=False)
class Logged(_NodeEvent):
    """A node has called `lp.log`, at most one each second; or it ends, and has views."""

    values: Mapping[str, float]  # the newest by name
    step: int | None
    views: Mapping[str, Any]  # as of the end


#: What a thread does, of what decides whether a program can go on.
COMPUTES, SLEEPS, WAITS, READS = "computes", "sleeps", "waits", "reads "
WAITS_FOR_FILES, WAITS_FOR_PROCESS = "waits for a file or a connection", "waits for a process"
AT_MOST = ", for some time at most"  # how that ends, if the wait has a limit
IN_LIBRARY = "in code of the library"  # the place of a thread that runs no code of the user


@dataclass(eq=False, repr=False)
class ThreadActivity(_Message):
    """What a thread, or a task of an event loop, does: its own code, or a call that it answers."""

    runs: str  # the method that answers the call, or the outermost function of its own code
    place: str  # the innermost line of user code
    peer: str = ""  # where the call that it answers comes from; empty: it answers none
    server: str = ""  # name or address of the server for which it waits; empty: it waits for none
    method: str = ""  # the method that it has called there
    doing: str = WAITS  # `computes`, or for what it waits
    is_limited: bool = False  # whether its wait ends after some time
    thread: int = 0  # its ident; 0: it is a task of an event loop
    behind: int = 0  # the thread of the same process for which it waits; 0: for none
    answers_s: float = 0.0  # seconds since it began to answer its call; 0: it answers none
    argument_bytes: int = 0  # size of the arguments of that call, as they came; 0: not known


@dataclass(eq=False, repr=False)
class Looked(_Message):
    """What a node does now: the answer to the question `look`."""

    node: str
    stacks: str  # of its threads, as text
    threads: tuple[ThreadActivity, ...] = ()  # what they do in user code
    is_full: bool = False  # whether a call waits because all threads of a server answer others


@dataclass(eq=False, repr=False)
class Answered(_Message):
    """The answer of a node to `Ask`."""

    node: str
    number: int  # of the question
    value: Any  # for JSON


NodeEvent = (
    Constructed
    | Leaving
    | CutShort
    | Failing
    | Failed
    | Ended
    | Healthy
    | Heartbeat
    | Debugged
    | Preempted
    | StopReceived
    | Placed
    | Logged
)
Event = NodeEvent | StopAsked | KillAsked | HostLost | Tick
#: The events of nodes.
Said = NodeEvent | StopAsked


# Actions


@dataclass(eq=False, repr=False)
class _NodeAction(_Message):
    """A node, or its worker, is to do something."""

    node: str


@dataclass(eq=False, repr=False)
class Start(_NodeAction):
    """Start a node's worker; `cause`: how the earlier one failed, if it did. That has ended."""

    attempt: int
    cause: NodeFailure | None = field(default=None, compare=False)


class DumpStacks(_NodeAction):
    """Make a worker write down the stacks of its threads. It may be stuck, and never do it."""


@dataclass(eq=False, repr=False)
class Ask(_NodeAction):
    """Ask a node about itself; `Answered` answers. See `worker.questions`."""

    number: int  # tells answers to several questions apart
    question: str
    argument: Any = None  # for JSON


class Terminate(_NodeAction):
    """Send a worker SIGTERM."""


class Kill(_NodeAction):
    """Send a worker and its child processes SIGKILL."""


@dataclass(eq=False, repr=False)
class RequestStop(_NodeAction):
    """Ask a node to end; `interrupts`: by a signal or a failure, so its work may not be done."""

    interrupts: bool = field(default=False, compare=False)


@dataclass(eq=False, repr=False)
class Tell(_NodeAction):
    """Have a node do something: a method of its `NodeRuntime`, by its name."""

    method: str


@dataclass(eq=False, repr=False)
class ServersEnded(_NodeAction):
    """Fail waiting calls of a node to servers that have ended; `keys`: of their addresses."""

    keys: tuple[str, ...]


@dataclass(eq=False, repr=False)
class ServersLost(_Message):
    """Fail calls in flight of all nodes to servers whose host is lost; `keys`: of their addresses."""

    keys: tuple[str, ...]


@dataclass(eq=False, repr=False)
class ServersMoved(_Message):
    """Move the clients of all nodes; `endpoints`: new `host:port` by key of the address."""

    endpoints: Mapping[str, str]


@dataclass(eq=False, repr=False)
class Finish(_Message):
    """The program has ended; the result is final."""

    result: ProgramResult


#: Actions of a node itself: see `NodeRuntime.obey`. Its host does the others.
Request = RequestStop | Tell | ServersEnded | ServersLost | ServersMoved
NodeAction = Start | DumpStacks | Ask | Terminate | Kill | Request
Action = NodeAction | Finish

_KINDS = {each.__name__: each for each in typing.get_args(Said | Answered | NodeAction)}


def to_fields(message: Said | Answered | NodeAction) -> tuple[str, dict[str, Any]]:
    """Returns the name of a message, and its content for `json.dumps`."""
    return type(message).__name__, to_json(message)


def from_fields(name: str, fields: Mapping[str, Any]) -> Any:
    """Undoes `to_fields`; returns None if there is no message of this name."""
    kind = _KINDS.get(name)
    return None if kind is None else from_json(kind, fields)
