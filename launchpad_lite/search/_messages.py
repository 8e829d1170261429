"""Messages between models, brokers, workers and the name server: names, numbers and bytes.

Brokers never look into the bytes of tasks and results.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

#: The kind of tasks that are pickled Python objects.
PYTHON = "python"
#: Bytes of the tasks or outcomes in one call, unless a single one is larger.
MOST_BYTES = 16 << 20
#: Bytes that a slow network carries in a second.
_SLOW_BYTES = 4 << 20
#: Extra seconds that calls may take, at most, after earlier calls took too long.
_MOST_SLACK_S = 120.0


class Life(NamedTuple):
    """One participant of a search: a name, such as `worker[3]`, and which process of that name."""

    name: str
    #: Random; another one after a restart.
    life: str


class Limits(NamedTuple):
    """The resources that a run of a task needs of its machine, and its limits."""

    #: None: any time.
    timeout_s: float | None = None
    progress_timeout_s: float | None = None
    cpus: float = 0.0
    #: Devices, or a part of one.
    gpus: float = 0.0
    #: 0: not counted.
    memory_bytes: int = 0

    @property
    def needs(self) -> tuple[float, float, int]:
        """Cores, devices and memory that it needs of its machine."""
        return self.cpus, self.gpus, self.memory_bytes


class WorkerMachine(NamedTuple):
    """The resources that a worker may use, shared with all other workers of its machine."""

    name: str
    cpus: float = 0.0
    memory_bytes: int = 0
    #: Accelerators, as CUDA_VISIBLE_DEVICES names them.
    devices: tuple[str, ...] = ()
    #: Those that the process of the worker sees for its lifetime; empty: it has used none yet.
    pinned: tuple[str, ...] = ()


class TaskSubmission(NamedTuple):
    """A task on its way to a broker."""

    #: Unique for ever.
    id: str
    payload: bytes
    #: Selects the workers that can run it.
    kind: str = PYTHON
    #: Higher ones are first.
    priority: float = 0.0
    #: How often it may be run again when it has raised.
    retries: int = 0
    limits: Limits = Limits()


class Assignment(NamedTuple):
    """A task on its way to a worker."""

    id: str
    #: Of this assignment.
    token: str
    kind: str
    payload: bytes
    limits: Limits = Limits()
    #: The devices of the worker's machine that it uses.
    devices: tuple[str, ...] = ()


class TaskState(enum.Enum):
    """How a task ended."""

    DONE = "done"
    FAILED = "failed"
    #: Stopped early by the model.
    STOPPED = "stopped"


class TaskOutcome(NamedTuple):
    """How an assignment ended, on its way to the model."""

    id: str
    #: Of the assignment; empty where the broker decided.
    token: str
    state: TaskState
    #: The result; of a failure the pickled report, or nothing.
    payload: bytes = b""
    text: str = ""
    seconds: float = 0.0
    worker: str = ""
    attempts: int = 1
    lost_workers: int = 0


L = TypeVar("L", TaskSubmission, TaskOutcome)


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


def transfer_s(items: Iterable[L]) -> float:
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
    """How busy a broker is."""

    #: Tasks that wait for a worker, and tasks that workers have.
    queued: int = 0
    running: int = 0
    #: Workers that it has heard of lately, and those of them that wait for a task.
    workers: int = 0
    idle: int = 0


class Collected(NamedTuple):
    """The news of a broker for a model."""

    #: Of the broker: with another life, it may have lost what it knew.
    life: str
    #: Each until it is acknowledged, once in each session.
    outcomes: Sequence[TaskOutcome]
    #: Since the last call.
    progress: Sequence[TaskProgress]
    load: Load
    #: Kinds of waiting tasks that no worker takes, with what they need.
    unknown_kinds: Sequence[str] = ()
    #: Tasks without an outcome that have got a worker (True) or wait again, since the last call.
    begun: Sequence[tuple[str, bool]] = ()


class SearchMember(NamedTuple):
    """One participant of a search, as the name server knows it."""

    #: `broker`, `worker` or `model`.
    role: str
    who: Life
    #: `host:port` where it can be called; empty if it cannot.
    address: str = ""
    version: str = ""
    #: As `3.11`; empty in other languages.
    python: str = ""


class MembersView(NamedTuple):
    """The answer of the name server to a heartbeat."""

    #: If not, register again.
    is_known: bool
    #: Address and load of each live broker, by name.
    brokers: Mapping[str, tuple[str, Load]]
    workers: int = 0
    is_closed: bool = False
