"""Tasks as users write them, and what a running task can say."""

import contextvars
import math
import operator
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import courier
from launchpad_lite._private_files import make_own_folder
from launchpad_lite.search._messages import PYTHON, Limits, Progress, Submission
from launchpad_lite.search.errors import SearchError, StoppedEarlyError, TaskPickleError

__all__ = ["Call", "Foreign", "RunningTrial", "Task", "current_trial", "report"]


class _Repr(reprlib.Repr):
    """Shows arguments in texts, however large they are."""

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
        retries: How often it may be run again when it has raised.
        timeout_s: Seconds that a run of it may take; then it fails, and its next `search.report` ends
            it. None: any time.
        params: What it tries, for tables; names to values.

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
    params: Mapping[str, Any] = {}

    def run(self) -> Any:
        """Does the work, in a worker; returns the result."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")


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
            kind: What workers say that they can run.
            payload: What they get.

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
        seed: For random numbers: the same whenever this trial runs, and another one for each trial.

    Example:
        checkpoint = search.current_trial().folder / "model.pt"  # of a search.RunningTrial
    """

    number: int
    seed: int
    _kept: str | Path | None = None  # of the search
    _parent: int | None = None
    _own: Path | None = None  # in place of its own folder, where it runs again alone

    @property
    def folder(self) -> Path:
        """Its own folder, for checkpoints and files: `trials/<number>` in that of the search.

        It is there, and only its owner may enter it. A run after a lost worker finds what was written.

        Raises:
            SearchError: The search has no folder.
        """
        return make_own_folder(self._own or self._folder_of(self.number))

    @property
    def parent(self) -> Path | None:
        """The folder of the trial that it goes on from; None: it begins anew."""
        return None if self._parent is None else self._folder_of(self._parent)

    def _folder_of(self, number: int) -> Path:
        if self._kept is None:
            raise SearchError("trials have folders only if the search has one: search.run(folder=)")
        return Path(self._kept, "trials", str(number))


class Tried(NamedTuple):
    """A task of a trial, on its way to a worker."""

    task: Any
    trial: RunningTrial


def submission_of(task: Any, key: str, trial: RunningTrial | None = None) -> Submission:
    """Returns a task as it travels.

    Raises:
        TypeError: It is no task, or its priority, retries or limits are no numbers.
        ValueError: Its priority, retries or limits make no sense.
        TaskPickleError: It cannot be pickled.
    """
    options = _options(task)
    sent = task if trial is None else Tried(task, trial)
    if isinstance(task, Foreign):
        return Submission(key, task.payload, task.kind, *options)
    if not callable(getattr(task, "run", None)) and not callable(task):
        raise TypeError(f"a task has a method run(), or is a function; {task!r} is neither")
    try:
        return Submission(key, courier.dumps(sent), PYTHON, *options)
    except Exception as error:
        raise TaskPickleError(
            f"the task {task!r} cannot be pickled: {type(error).__name__}: {error}; give it what it "
            "needs to make such things in run()"
        ) from error


def _options(task: Any) -> tuple[float, int, Limits]:
    """Returns priority, retries and limits of a task; as numbers of Python, which databases take."""
    try:
        priority = float(getattr(task, "priority", 0.0))
        retries = operator.index(getattr(task, "retries", 0))
        timeout_s = getattr(task, "timeout_s", None)
        timeout_s = None if timeout_s is None else float(timeout_s)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{task!r}: its priority, retries and timeout_s are numbers: {error}"
        ) from error
    if not (math.isfinite(priority) and 0 <= retries < 1 << 31):
        raise ValueError(f"{task!r}: its priority is finite, and its retries are at least 0")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"{task!r}: its timeout_s is above 0, or None")
    return priority, retries, Limits(timeout_s)


@dataclass
class Running:
    """The task that a worker runs, for `report`. Used by two threads, of which one only reads."""

    key: str
    #: Wakes who sends reports.
    wake: Callable[[], object]
    progress: list[Progress] = field(default_factory=list)
    steps: int = 0
    is_stopped: bool = False
    trial: RunningTrial | None = None


running: "contextvars.ContextVar[Running | None]" = contextvars.ContextVar("running", default=None)


def report(value: float, step: int | None = None) -> None:
    """Reports how far the task is that calls it: a point of its learning curve.

    Args:
        value: How good it is so far.
        step: Of what is trained; by default one more than the last one, from 0 on.

    Raises:
        StoppedEarlyError: The model has seen enough: it is to end. Let it pass.
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
    step = task.steps if step is None else step
    task.steps = step + 1
    task.progress.append(Progress(task.key, step, float(value)))
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
