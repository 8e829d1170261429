"""Messages between models, brokers, workers and the name server: names, numbers and bytes.

Brokers never look into the bytes of tasks and results.
"""

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import launchpad_lite as lp

#: The kind of tasks that are pickled Python objects.
PYTHON = "python"
#: Bytes of the tasks or outcomes in one call, unless a single one is larger.
MOST_BYTES = 16 << 20
#: Bytes that a slow network carries in a second.
_SLOW_BYTES = 4 << 20
#: Extra seconds that calls may take, at most, after earlier calls took too long.
_MOST_SLACK_S = 120.0


class Life(NamedTuple):
    """One participant of a search: a name, and which process of that name.

    Attributes:
        name: Such as `worker[3]`.
        life: Random; another one after a restart.
    """

    name: str
    life: str


class Limits(NamedTuple):
    """The resources that a run of a task needs, and its limits.

    Attributes:
        timeout_s: Seconds that it may run until it fails; None: any time.
        progress_timeout_s: Seconds without a report until it fails; None: any time.
        cpus: Cores of its machine.
        gpus: Devices of its machine, or a part of one.
        memory_bytes: Of its machine; 0: not counted.
    """

    timeout_s: float | None = None
    progress_timeout_s: float | None = None
    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0

    @property
    def needs(self) -> tuple[float, float, int]:
        """Cores, devices and memory that it needs of its machine."""
        return self.cpus, self.gpus, self.memory_bytes


class WorkerMachine(NamedTuple):
    """The resources that a worker may use, shared with all other workers of its machine.

    Attributes:
        name: Tells it from others.
        cpus: Cores.
        memory_bytes: Main memory.
        devices: Accelerators, as CUDA_VISIBLE_DEVICES names them.
        pinned: The devices that the process of the worker sees for its lifetime; empty: it has used
            none yet.
    """

    name: str
    cpus: float = 0.0
    memory_bytes: int = 0
    devices: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


class TaskSubmission(NamedTuple):
    """A task on its way to a broker.

    Attributes:
        id: Unique for ever.
        payload: The bytes that workers run.
        kind: Selects the workers that can run it.
        priority: Higher ones are first.
        retries: How often it may be run again when it has raised.
        limits: What a run needs, and its limits.
    """

    id: str
    payload: bytes
    kind: str = PYTHON
    priority: float = 0.0
    retries: int = 0
    limits: Limits = Limits()


class Assignment(NamedTuple):
    """A task on its way to a worker.

    Attributes:
        id: Of the task.
        token: Of this assignment.
        kind: As in `TaskSubmission`.
        payload: As in `TaskSubmission`.
        limits: As in `TaskSubmission`.
        devices: The devices of the worker's machine that it uses.
    """

    id: str
    token: str
    kind: str
    payload: bytes
    limits: Limits = Limits()
    devices: tuple[str, ...] = ()


class TaskState(enum.Enum):
    """How a task ended."""

    DONE = "done"
    FAILED = "failed"
    #: Stopped early by the model.
    STOPPED = "stopped"


class TaskOutcome(NamedTuple):
    """How an assignment ended, on its way to the model.

    Attributes:
        id: Of the task.
        token: Of the assignment; empty where the broker decided.
        state: How it ended.
        payload: The result; of a failure the pickled report, or nothing.
        text: The failure as text.
        seconds: How long it ran.
        worker: The worker that ran it.
        attempts: How often it was run.
        lost_workers: How many workers were lost with it.
    """

    id: str
    token: str
    state: TaskState
    payload: bytes = b""
    text: str = ""
    seconds: float = 0.0
    worker: str = ""
    attempts: int = 1
    lost_workers: int = 0


class _Loaded(Protocol):
    @property
    def payload(self) -> bytes: ...


L = TypeVar("L", bound=_Loaded)


def first_of(items: Iterable[L]) -> list[L]:
    """Returns as many tasks or outcomes, from the first one on, as fit into one call."""
    found: list[L] = []
    size = 0
    for each in items:
        size += len(each.payload)
        if found and size > MOST_BYTES:
            break
        found.append(each)
    return found


def transfer_s(items: Iterable[_Loaded]) -> float:
    """Returns how many seconds longer a call may take that carries these."""
    return sum(len(each.payload) for each in items) / _SLOW_BYTES


def longer(slack_s: float) -> float:
    """Returns how many seconds longer the next call may take, after one that took too long."""
    return min(2 * slack_s + 1, _MOST_SLACK_S)


class TaskProgress(NamedTuple):
    """A report of a running task: a point of its learning curve."""

    id: str
    step: int
    value: float


class Load(NamedTuple):
    """How busy a broker is.

    Attributes:
        queued: Tasks that wait for a worker.
        running: Tasks that workers have.
        workers: Workers that it has heard of lately.
        idle: Those of these workers that wait for a task.
    """

    queued: int = 0
    running: int = 0
    workers: int = 0
    idle: int = 0


class Collected(NamedTuple):
    """The news of a broker for a model.

    Attributes:
        life: Of the broker: with another life, it may have lost what it knew.
        outcomes: Each until it is acknowledged, once in each session.
        progress: Since the last call.
        load: Of the broker.
        unknown_kinds: Kinds of waiting tasks that no worker takes, with what they need.
        begun: Tasks without an outcome that have got a worker (True) or wait again, since the last call.
    """

    life: str
    outcomes: Sequence[TaskOutcome]
    progress: Sequence[TaskProgress]
    load: Load
    unknown_kinds: Sequence[str] = ()
    begun: Sequence[tuple[str, bool]] = ()


class SearchMember(NamedTuple):
    """One participant of a search, as the name server knows it.

    Attributes:
        role: `broker`, `worker` or `model`.
        who: Its name and life.
        address: `host:port` where it can be called; empty if it cannot.
        version: Of launchpad-lite.
        python: Its Python, as `3.11`; empty in other languages.
    """

    role: str
    who: Life
    address: str = ""
    version: str = ""
    python: str = ""


def member_here(role: str, who: Life) -> SearchMember:
    """Returns a participant in this process that sends or runs pickled tasks."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return SearchMember(role, who, version=lp.__version__, python=python)


class MembersView(NamedTuple):
    """The answer of the name server to a heartbeat.

    Attributes:
        is_known: If not, register again.
        brokers: Address and load of each live broker, by name.
        workers: How many workers there are.
        is_closed: Whether the search is over.
    """

    is_known: bool
    brokers: Mapping[str, tuple[str, Load]]
    workers: int = 0
    is_closed: bool = False
