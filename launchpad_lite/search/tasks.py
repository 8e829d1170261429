"""Tasks as users write them, and reports of running tasks."""

import contextvars
import math
import operator
import pickle
import reprlib
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import courier
from launchpad_lite.parts.private_files import make_own_folder
from launchpad_lite.search._messages import (
    PYTHON,
    Limits,
    TaskOutcome,
    TaskProgress,
    TaskSubmission,
)
from launchpad_lite.search.errors import (
    FailedTaskError,
    SearchError,
    StoppedEarlyError,
    TaskPickleError,
)

F = TypeVar("F", bound=Callable[..., Any])


#: The attributes of tasks that limit a run.
LIMITS = ("retries", "timeout_s", "progress_timeout_s", "cpus", "gpus", "memory_bytes")


class _Repr(reprlib.Repr):
    """Shortens arguments in texts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 50
        self.maxstring = self.maxother = 500

    def repr_bytes(self, value: bytes, _: int) -> str:
        return repr(value) if len(value) < self.maxother else f"<{len(value):,} bytes>"


class Task:
    """A piece of work; subclass it, or use `Call`. Pickled to a worker, which calls `run`.

    Attributes:
        priority: Tasks with a higher one are run first.
        retries: How often it may be run again when it has failed.
        timeout_s: Seconds that a run of it may take; then its worker's process ends, and the run has
            failed. None: any time.
        progress_timeout_s: The same for the time without a `search.report`.
        memory_bytes: The same for the memory of its worker's process and those below it. 0: any.
        cpus: Cores of its worker's machine that it uses.
        gpus: Devices that it uses, which its process then sees alone; or a part of one, below 1.
        params: The parameters that it tries, for tables; names to values.

    Example:
        class Train(search.Task):
            def __init__(self, rate):
                self.params = {"rate": rate}

            def run(self):
                return train(self.params["rate"])  # the accuracy
    """

    priority: float = 0.0
    retries: int = 0
    timeout_s: float | None = None
    progress_timeout_s: float | None = None
    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0
    params: Mapping[str, Any] = {}

    def run(self) -> Any:
        """Does the work, in a worker; returns the result."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    def limit_as(self, function: Callable[..., Any]) -> None:
        """Takes over the needs of a function that it calls."""
        function = getattr(function, "func", function)  # of a functools.partial
        found = vars(function) if hasattr(function, "__dict__") else {}
        vars(self).update({name: found[name] for name in LIMITS if name in found})


def needs(**each: float) -> Callable[[F], F]:
    """Returns a decorator that sets the needs and limits of tasks that call a function.

    Args:
        **each: `cpus`, `gpus`, `memory_bytes`, `timeout_s`, `progress_timeout_s` and `retries`, as of `Task`.

    Example:
        @search.needs(cpus=2, gpus=0.5)
        def train(params):
            ...
    """
    if unknown := set(each).difference(LIMITS):
        raise TypeError(f"search.needs takes {', '.join(LIMITS)}, not {unknown.pop()}")

    def mark(function: F) -> F:
        vars(function).update(each)
        return function

    return mark


class Call(Task):
    """A call of a function, as a task.

    Example:
        task = search.Call(train, rate=0.1)
    """

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Describes the call.

        Raises:
            TypeError: It is no function.
        """
        if not callable(function):
            raise TypeError(f"search.Call takes a function, not {function!r}")
        self._function = function
        self.limit_as(function)
        self._args = args
        self._kwargs = kwargs

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]  # to set them would change the call
        """Its arguments that have names; read-only."""
        return types.MappingProxyType(self._kwargs)

    def run(self) -> Any:
        """Calls the function."""
        return self._function(*self._args, **self._kwargs)

    def __repr__(self) -> str:
        arguments = [_Repr().repr(each) for each in self._args]
        arguments += [f"{name}={_Repr().repr(value)}" for name, value in self._kwargs.items()]
        name = getattr(self._function, "__name__", repr(self._function))
        return f"{name}({', '.join(arguments)})"


class Foreign(Task):
    """A task for workers in another language: bytes of a kind that they know. Its result is bytes.

    Example:
        task = search.Foreign("js", json.dumps({"rate": 0.1}).encode())
    """

    def __init__(self, kind: str, payload: bytes) -> None:
        """Describes the task.

        Args:
            kind: The kind that its workers ask for.
            payload: The bytes for them.

        Raises:
            TypeError: The payload is not bytes.
            ValueError: The kind is empty, or that of Python.
        """
        if not isinstance(payload, bytes):
            raise TypeError(f"the payload of a foreign task is bytes, not {payload!r:.100}")
        if not kind or kind == PYTHON:
            raise ValueError(f"a foreign task has a kind of its own, not {kind!r}")
        self.kind = kind
        self.payload = payload

    def __repr__(self) -> str:
        return f"Foreign({self.kind!r}, {len(self.payload)} bytes)"


@dataclass(frozen=True)
class RunningTrial:
    """The trial of a search that a task runs for, as its worker sees it.

    Attributes:
        number: As `Trial.number`.
        steps: How many steps are made in all when it has ended, those of its parent included, if
            the model sets them.
        seed: For random numbers: the same whenever this trial runs, and another one for each trial.

    Example:
        checkpoint = search.current_trial().folder / "model.pt"  # of a search.RunningTrial
    """

    number: int
    seed: int
    _kept: str | Path | None = None  # of the search
    _parent: int | None = None
    steps: int | None = None
    _own: Path | None = None  # in place of its own folder, where it runs again alone

    @property
    def folder(self) -> Path:
        """Its own folder, for checkpoints and files: `trials/<number>` in that of the search.

        It exists, and only its owner may enter it. A run after a lost worker finds its files.

        Raises:
            SearchError: The search has no folder.
        """
        return make_own_folder(self._own or self._folder_of(self.number))

    @property
    def parent(self) -> Path | None:
        """The folder of the trial that it goes on from; None: it begins from nothing."""
        return None if self._parent is None else self._folder_of(self._parent)

    def _folder_of(self, number: int) -> Path:
        if self._kept is None:
            raise SearchError("trials have folders only if the search has one: search.run(folder=)")
        return Path(self._kept, "trials", str(number))


class Tried(NamedTuple):
    """A task of a trial, on its way to a worker."""

    task: Any
    trial: RunningTrial


def submission_of(task: Any, key: str, trial: RunningTrial | None = None) -> TaskSubmission:
    """Returns a task as a message to brokers, or raises what is wrong with it."""
    options = options_of(task)
    sent = task if trial is None else Tried(task, trial)
    if isinstance(task, Foreign):
        return TaskSubmission(key, task.payload, task.kind, *options)
    if not callable(getattr(task, "run", None)) and not callable(task):
        raise TypeError(f"a task has a method run(), or is a function; {task!r} is neither")
    return TaskSubmission(key, pickled(sent, task), PYTHON, *options)


def pickled(value: Any, task: object) -> bytes:
    """Returns the payload of a task; raises `TaskPickleError` if it cannot be pickled."""
    try:
        return courier.dumps(value)
    except Exception as error:
        raise TaskPickleError(
            f"the task {task!r} cannot be pickled: {type(error).__name__}: {error}; give it what it "
            "needs to make such things in run()"
        ) from error


def options_of(task: Any) -> tuple[float, int, Limits]:
    """Returns priority, retries and limits of a task; as numbers of Python, which databases take."""
    try:
        priority = float(getattr(task, "priority", 0.0))
        retries = operator.index(getattr(task, "retries", 0))
        seconds = [getattr(task, name, None) for name in ("timeout_s", "progress_timeout_s")]
        seconds = [None if each is None else float(each) for each in seconds]
        cpus, gpus = float(getattr(task, "cpus", 0.0)), float(getattr(task, "gpus", 0.0))
        memory_bytes = operator.index(getattr(task, "memory_bytes", 0))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{task!r}: its priority, retries and limits are numbers: {error}"
        ) from error
    if not (math.isfinite(priority) and 0 <= retries < 1 << 31):
        raise ValueError(f"{task!r}: its priority is finite, and its retries are at least 0")
    if any(each is not None and not 0 < each < math.inf for each in seconds):
        raise ValueError(f"{task!r}: its timeout_s and progress_timeout_s are above 0, or None")
    if not (0 <= cpus < math.inf and (0 <= gpus < 1 or 1 <= gpus == gpus // 1 < math.inf)):
        raise ValueError(
            f"{task!r}: its cpus are at least 0, and its gpus a whole number, or a part of one below 1"
        )
    if memory_bytes < 0:
        raise ValueError(f"{task!r}: its memory_bytes are at least 0")
    return priority, retries, Limits(seconds[0], seconds[1], cpus, gpus, memory_bytes)


@dataclass
class Running:
    """The task that a worker runs, for `report`. Used by two threads, of which one only reads."""

    key: str
    #: Wakes the thread that sends reports.
    wake: Callable[[], object]
    progress: list[TaskProgress] = field(default_factory=list)
    steps: int = 0
    is_stopped: bool = False
    trial: RunningTrial | None = None
    #: When its code began, and when it reported last.
    begun_at: float = math.inf
    moved_at: float = math.inf
    #: Whether one of the threads has decided its outcome.
    is_over: bool = False


running: "contextvars.ContextVar[Running | None]" = contextvars.ContextVar("running", default=None)


def report(value: float | None = None, step: int | None = None) -> None:
    """Reports how far the task is that calls it: a point of its learning curve.

    Args:
        value: How good it is so far; None only shows that the task makes progress, for
            `progress_timeout_s`.
        step: Of what is trained; by default one more than the last one, from 0 on.

    Raises:
        StoppedEarlyError: The model stops the task. Let it pass.
        RuntimeError: Not called by a task, in the thread that runs it.

    Example:
        def train(rate):
            for epoch in range(10):
                search.report(accuracy := train_epoch(rate))
            return accuracy
    """
    task = running.get()
    if task is None:
        raise RuntimeError("search.report: no task runs in this thread")
    if task.is_stopped:
        raise StoppedEarlyError("the model has stopped this task")
    task.moved_at = time.monotonic()
    if value is None:
        return
    step = task.steps if step is None else step
    task.steps = step + 1
    task.progress.append(TaskProgress(task.key, step, float(value)))
    task.wake()


def current_trial() -> RunningTrial:
    """Returns the trial that the task which calls it runs for.

    Raises:
        RuntimeError: Not called by a task of a model, in the thread that runs it.

    Example:
        def train(params):
            random.seed(search.current_trial().seed)
    """
    task = running.get()
    if task is None or task.trial is None:
        raise RuntimeError("search.current_trial: no task of a model runs in this thread")
    return task.trial


def failure_of(task: str, outcome: TaskOutcome) -> FailedTaskError:
    """Returns the error of a failed task, with its exception as the cause."""
    error = FailedTaskError(
        f"{task}{f' on {outcome.worker}' if outcome.worker else ''}: {outcome.text}"
    )
    if outcome.payload:
        report: courier.ExceptionReport = pickle.loads(outcome.payload)
        error = FailedTaskError(
            f"{task} on {outcome.worker} raised {report.type_name}: {report.message}"
        )
        error.__cause__ = report.rebuild(outcome.worker, BaseException)
    return error
