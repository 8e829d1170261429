"""Models, which decide which tasks are tried next, and the trials of these tasks."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchpad_lite.search.errors import FailedTaskError


class TrialState(enum.Enum):
    """The state of a trial."""

    #: It waits for a worker, or has one.
    OUTSTANDING = "outstanding"
    DONE = "done"
    #: Its model has stopped it early.
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class Trial:
    """One task of a model, and its result.

    Attributes:
        number: Counts up from 0, in the order in which they were asked for.
        task: Its `repr`.
        params: Its `params`, if it has some.
        state: Its state.
        score: How good it is: of its result, or the last value that it reported.
        error: Why it failed, and where in the user's code.
        worker: The worker that ran it last.
        asked_at: Seconds after the beginning of the search.
        told_at: When the model was told of its end, in the same seconds; None before.
        seconds: How long it ran.
        attempts: How often it was run; lost workers and `retries` make it more than 1.
        lost_workers: How many workers were lost with it.
        curve: Its reports: steps and values.
        values: Its scores, one for each objective, if the model says them.
        is_feasible: Whether it keeps the constraints of the study of Optuna; else it is not the best.
        is_told: Whether its model took its result; if not, its error says why.
        parent: Number of the trial from whose folder it goes on; None: it begins from nothing.
        steps: How many steps it makes in all, as `RunningTrial.steps`.
        seed: As its task sees it, in `RunningTrial`.

    Example:
        best = search.run(model).best  # a search.Trial
        print(best.params, best.score, best.curve)
    """

    number: int
    task: str
    params: Mapping[str, Any] = field(default_factory=dict)
    state: TrialState = TrialState.OUTSTANDING
    score: float | None = None
    error: str = ""
    worker: str = ""
    asked_at: float = 0.0
    told_at: float | None = None
    seconds: float = 0.0
    attempts: int = 1
    lost_workers: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    values: tuple[float, ...] = ()
    is_feasible: bool = True
    is_told: bool = True
    parent: int | None = None
    steps: int | None = None
    seed: int = 0


class Callback:
    """Is told of each trial, for logs; subclass it, and pass it to `search.run` as `callbacks=`.

    It is pickled to the node of the model, whose thread calls its methods: those of a trial in the
    order below. A slow one slows the search. If it raises, that is logged once as a warning, and
    the search goes on.

    Example:
        class Show(search.Callback):
            def on_trial_end(self, trial):
                print(trial.number, trial.state.value, trial.score)
    """

    def on_trial_start(self, trial: Trial) -> None:
        """Is called when a worker runs a trial."""

    def on_trial_report(self, trial: Trial, step: int, value: float) -> None:
        """Is called with each report of a running trial."""

    def on_trial_end(self, trial: Trial) -> None:
        """Is called when a trial has ended, with its `state`, `score` and `error`."""


class Model:
    """Decides what is tried next; subclass it. Its methods are called one at a time, by one thread.

    Only `ask` and `tell` have to be written. It is pickled: to its node, and with each checkpoint
    of it.

    Attributes:
        maximize: Whether higher scores are better.
        total: How many trials there will be, if it has that.
        needs_folder: Whether trials go on from the folders of others, so that the search needs one.

    Example:
        class Grid(search.Model):
            def __init__(self, rates):
                self.rates = list(rates)

            def ask(self):
                return search.Call(train, rate=self.rates.pop()) if self.rates else None

            def tell(self, task, result):
                print(task, result)
    """

    maximize: bool = True
    total: int
    needs_folder: bool = False

    def ask(self) -> Any:
        """Returns the next task: a `Task`, any object with a method `run`, or a function.

        None: there is none at the moment. If no task is outstanding then, the search is over.
        """
        raise NotImplementedError(f"{type(self).__name__} has no ask()")

    def tell(self, task: Any, result: Any) -> None:
        """Takes the result of a task, once.

        Args:
            task: The task that `ask` has returned, or its pickled copy after a restart.
            result: Its return value.
        """

    def done(self) -> bool:
        """Returns whether the search is over, though tasks may be outstanding; those are given up."""
        return False

    def report(self, task: Any, step: int, value: float) -> bool:  # noqa: ARG002
        """Takes a report of a running task; returns whether to stop it early.

        Args:
            task: The task.
            step: Of it.
            value: How good it is so far.
        """
        return False

    def stopped(self, task: Any, value: float | None) -> None:
        """Takes note that a task has ended early.

        Args:
            task: The task.
            value: Its last report.
        """

    def fail(self, task: Any, error: FailedTaskError) -> None:
        """Is told that a task has no result, or one that `tell` did not take. The search goes on.

        Args:
            task: The task.
            error: Says why, and has the exception as its cause.
        """

    def identity(self) -> dict[str, str]:
        """Returns the settings that identify a search with a folder: names to texts.

        A search does not go on from the state of one with another identity.
        """
        return {}

    def resumed(self, given: "Model", outstanding: Sequence[Any]) -> None:  # noqa: ARG002
        """Takes over settings that another call may change: by default the number of trials.

        Functions and classes that the script defines are the newest ones already.

        Args:
            given: The model with which the search was called this time.
            outstanding: The tasks that have no result yet.
        """
        if hasattr(given, "total"):
            self.total = given.total

    def score(self, result: Any) -> float | None:
        """Returns how good a result is, for tables; None: it has no such number.

        By default the result, if it is a number, or its first item, if that is one. NaN is none.
        """
        value = number_of(result)
        return None if value is None or math.isnan(value) else value


def name_of(function: Any) -> str:
    """Returns the name of a function or class, without its module."""
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def number_of(result: Any) -> float | None:
    """Returns a result, if it is a number, NaN included, or its first item, if that is one."""
    if isinstance(result, Sequence) and not isinstance(result, str | bytes) and result:
        result = result[0]
    try:
        return float(result)
    except (TypeError, ValueError):
        return None


def best_of(trials: Sequence[Trial], *, maximize: bool) -> Trial | None:
    """Returns the trial with the best score of those that are done; the first of equals."""
    scored = [
        trial
        for trial in trials
        if trial.state is TrialState.DONE and trial.score is not None and trial.is_feasible
    ]
    sign = 1.0 if maximize else -1.0
    return max(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)
