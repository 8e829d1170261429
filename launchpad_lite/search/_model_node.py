"""A model as a node: asks it for tasks, has them run, and tells it the results."""

import collections
import hashlib
import logging
import os
import pickle
import shutil
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import courier
import launchpad_lite as lp
from launchpad_lite.search._messages import TaskOutcome, TaskProgress, TaskState, TaskSubmission
from launchpad_lite.search._outbox import COLLECT_S, Outbox
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._process import last_lines
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import FailedTaskError, SearchError
from launchpad_lite.search.models import Callback, Model, Trial, TrialState, best_of, name_of
from launchpad_lite.search.searches import Candidate
from launchpad_lite.search.tasks import Foreign, RunningTrial, failure_of, submission_of

_LOGGER = logging.getLogger(__name__)

#: The search ends if so many trials fail before the first result. The log shows so many failures.
_MOST_FAILURES = 10
#: Characters of a traceback that are kept.
_MOST_TEXT = 8000
#: Seconds between two checkpoints.
_SAVE_S = 10.0
#: For each worker, as many tasks wait as it runs in this time, and at least one in all.
_AHEAD_S = 0.1
_MOST_AHEAD = 64
#: Weight of the newest task in the mean.
_NEWEST = 0.1
#: So many small failed tasks that are no candidates are kept, to be run again.
_MOST_KEPT, _KEPT_BYTES = 1000, 1 << 16


class Status(NamedTuple):
    """How far a search is.

    Attributes:
        queued: Trials that wait for a worker.
        running: Trials that have one.
        done: Trials with a result.
        failed: Trials that have failed.
        stopped: Trials that were stopped early.
        again: How often a trial was run again, because it had lost its worker or had raised.
        lost: How many workers were lost with a trial.
        workers: Workers that are there.
        best: The best trial.
        seconds: Since the beginning, without times in which it did not run.
        is_over: Whether it is over.
        was_over: Whether it was over before, and this call has tried nothing.
        unknown_kinds: Kinds of tasks that wait, and that no worker takes.
        failure: Why it has ended though it is not over: all trials failed.

    Example:
        def watch(node):  # in a node that got the handle of search.add_to
            while not (status := node.wait(10.0)).is_over:
                print(status.done, status.best)
    """

    queued: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    stopped: int = 0
    again: int = 0
    lost: int = 0
    workers: int = 0
    best: Trial | None = None
    seconds: float = 0.0
    is_over: bool = False
    was_over: bool = False
    unknown_kinds: tuple[str, ...] = ()
    failure: str = ""

    def __str__(self) -> str:
        best = "" if self.best is None else f"; best {self.best.score:.5g}"
        return (
            f"trials: {self.queued} queued, {self.running} running, {self.done} done, {self.failed} failed, "
            f"{self.stopped} stopped{best}\nworkers: {self.workers}, {self.lost} lost with a trial; "
            f"{self.again} trials again; {self.seconds:,.0f} s"
        )


class ModelNode:
    """Runs the search of one model. Its methods are for tables of results."""

    def __init__(
        self,
        model: Model,
        name_server: Any,
        brokers: Mapping[str, Any],
        timing: Timing,
        ahead: int | None,
        stays: bool = False,
        anyway: bool = False,
        folder: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._model = model
        #: How many tasks may be outstanding at a time; None: a few more than workers.
        self._ahead = ahead
        #: Whether it serves until the program stops, when the search is over.
        self._stays = stays
        #: Whether it may begin where another model has ended.
        self._anyway = anyway
        self._folder = folder
        self._callbacks = callbacks
        me = lp.current_node().name
        self._presence = Presence("model", me, name_server, brokers, timing)
        # Saved in checkpoints.
        self._lock = threading.RLock()
        #: Outstanding tasks by id, and their trials.
        self._tasks: dict[str, tuple[Any, Trial]] = {}
        self._trials: list[Trial] = []
        self._ended: dict[int, Any] = {}  # tasks by the numbers of their trials, to be run again
        self._earlier_s = 0.0
        self._is_over = False
        #: How many trials it had when it was over before.
        self._ended_with: int | None = None
        self._outbox = Outbox(self._presence)

        self._began_at = time.monotonic()
        self._over = threading.Event()
        self._told: list[str] = []
        self._saved_at = time.monotonic()
        #: Whether there are checkpoints, if that is known yet.
        self._is_kept = False
        self._mean_s: float | None = None
        #: Exceptions of the model's `report`, by the ids of tasks.
        self._wrong: dict[str, Exception] = {}
        #: How many trials have failed in this life, and whether any one has not, in all lives.
        self._failed, self._has_result = 0, False
        self._failure = ""
        #: Trials of this life whose begin callbacks know, by id; and callbacks that have raised.
        self._begun: dict[str, Trial] = {}
        self._have_raised: list[Callback] = []
        lp.metrics.view("search", self.status)

    # Its state.

    def save(self, folder: Path) -> None:
        with self._lock:
            tasks = {key: task for key, (task, _) in self._tasks.items()}
            state = {
                "maximize": self._model.maximize,
                "numbers": {key: trial.number for key, (_, trial) in self._tasks.items()},
                "trials": self._trials,
                "seconds": self._seconds(),
                "is_over": self._is_over,
                "has_failed": bool(self._failure),
                "broker": self._outbox.broker,
            }
            data = courier.dumps(state, newest=True)
            # Apart, so that trials can be read without the code of the user.
            data += courier.dumps((self._model, tasks, self._ended), newest=True)
        (folder / "model.pickle").write_bytes(data)

    def restore(self, folder: Path) -> None:
        """Takes over what a checkpoint has, with the newest code of the script."""
        with (folder / "model.pickle").open("rb") as file:
            state, (model, tasks, self._ended) = pickle.load(file), pickle.load(file)
        self._trials = state["trials"]
        self._has_result = any(
            trial.state in (TrialState.DONE, TrialState.STOPPED) for trial in self._trials
        )
        self._earlier_s = state["seconds"]
        self._ended_with = len(self._trials) if state["is_over"] else None
        now, before = name_of(type(self._model)), name_of(type(model))
        if now == before:
            model.resumed(self._model, list(tasks.values()))
            self._model = model
            trials = {key: self._trials[number] for key, number in state["numbers"].items()}
            self._tasks = {key: (task, trials[key]) for key, task in tasks.items()}
        elif self._anyway:
            self._give_up()
        else:
            raise SearchError(f"it is of a search by {before}, and this one is by {now}")
        sent = {key: self._submission(key) for key in self._tasks}
        self._outbox = Outbox(self._presence, sent, state["broker"])

    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._began_at

    # Called by others.

    def status(self) -> Status:
        # Without the lock, which is held while code of the user runs; first whether it is over.
        is_over, failure, trials = self._is_over, self._failure, list(self._trials)
        counts = collections.Counter(trial.state for trial in trials)
        again = sum(max(0, trial.attempts - 1) for trial in trials)
        lost = sum(trial.lost_workers for trial in trials)
        best = best_of(trials, maximize=self._model.maximize)
        outstanding = counts[TrialState.OUTSTANDING]
        running = min(outstanding, self._outbox.running)
        return Status(
            outstanding - running,
            running,
            counts[TrialState.DONE],
            counts[TrialState.FAILED],
            counts[TrialState.STOPPED],
            again,
            lost,
            self._outbox.workers,
            best,
            self._seconds(),
            is_over or bool(failure),
            is_over and self._ended_with == len(trials),
            tuple(self._outbox.unknown_kinds),
            failure,
        )

    def wait(self, seconds: float) -> Status:
        """Returns how far the search is, after some seconds, or when it is over."""
        self._over.wait(seconds)
        return self.status()

    def trials(self) -> list[Trial]:
        with self._lock:
            return list(self._trials)

    def model(self) -> Model:
        with self._lock:
            return self._model

    # The search.

    def run(self) -> None:
        """Searches until the model is done, or the program stops."""
        if self._folder is not None:
            for each in Path(self._folder, "trials").glob("*"):
                if each.name.isdigit() and int(each.name) >= len(self._trials):
                    shutil.rmtree(each, ignore_errors=True)  # of a killed life: its number is free
        stop = lp.stop_event()
        while not stop.is_set() and not self._is_over and not self._failure:
            lp.heartbeat()
            with self._lock:
                self._fill()
            self._outbox.send()
            outcomes, progress = self._outbox.collect(COLLECT_S)
            with self._lock:
                self._begin(self._outbox.begun)
                for point in progress:
                    self._follow(point)
                for outcome in outcomes:
                    self._settle(outcome)
                self._is_over = self._has_ended()
                self._failure = self._why_it_fails()
            self._keep()
        if self._is_over or self._failure:
            self._end()
        if self._stays:
            lp.wait_for_stop()
        self._presence.leave()
        if self._failure and not self._stays:
            raise SearchError(self._failure)

    def _fill(self) -> None:
        while len(self._outbox) < self._limit() and not self._model.done():
            task = self._model.ask()
            if task is None:
                break
            number = len(self._trials)
            params = dict(getattr(task, "params", {}))
            trial = Trial(number, repr(task), params, asked_at=self._seconds())
            digest = hashlib.sha256(f"{getattr(self._model, 'seed', 0)}/{number}".encode()).digest()
            trial.seed = int.from_bytes(digest[:4], "big")
            if isinstance(task, Candidate):
                task.number, trial.parent, trial.steps = number, task.parent, task.steps
            self._trials.append(trial)
            key = os.urandom(16).hex()
            self._tasks[key] = task, trial
            self._outbox.add([self._submission(key)])

    def _submission(self, key: str) -> TaskSubmission:
        task, trial = self._tasks[key]
        running = RunningTrial(trial.number, trial.seed, self._folder, trial.parent, trial.steps)
        return submission_of(task, key, running)

    def _limit(self) -> int:
        if self._ahead is not None:
            return self._ahead
        each = 0.0 if self._mean_s is None else _AHEAD_S / max(self._mean_s, 1e-6)
        workers = max(1, self._outbox.workers)
        return workers + max(1, int(workers * min(each, _MOST_AHEAD)))

    def _begin(self, ids: Iterable[str]) -> None:
        for key in ids:
            if key in self._tasks and key not in self._begun:
                _, trial = self._tasks[key]
                self._begun[key] = trial
                self._call_back("on_trial_start", trial)

    def _call_back(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, name)(*arguments)
            except Exception:
                if callback not in self._have_raised:
                    self._have_raised.append(callback)
                    who = f"{type(callback).__qualname__}.{name}"
                    _LOGGER.warning(
                        "callback %s has raised; the search goes on", who, exc_info=True
                    )

    def _follow(self, point: TaskProgress) -> None:
        task, trial = self._tasks[point.id]
        trial.curve.append((point.step, point.value))
        self._begin([point.id])
        self._call_back("on_trial_report", trial, point.step, point.value)
        try:
            is_stopped = self._model.report(task, point.step, point.value)
        except Exception as error:  # noqa: BLE001 - of the user's code
            self._wrong.setdefault(point.id, error)
            is_stopped = True
        if is_stopped:
            self._outbox.stop([point.id])

    def _settle(self, outcome: TaskOutcome) -> None:
        self._begin([outcome.id])
        task, trial = self._tasks.pop(outcome.id)
        trial.told_at, trial.seconds = self._seconds(), outcome.seconds
        trial.worker, trial.attempts, trial.lost_workers = outcome[-3:]
        self._told.append(outcome.id)
        if self._folder and (isinstance(task, Candidate) or self._is_to_be_kept(task, outcome)):
            self._ended[trial.number] = task
        mean_s = outcome.seconds if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + _NEWEST * (outcome.seconds - mean_s)
        try:
            if wrong := self._wrong.pop(outcome.id, None):
                raise wrong
            if outcome.state is TaskState.DONE:
                is_foreign = isinstance(task, Foreign)
                result = outcome.payload if is_foreign else pickle.loads(outcome.payload)
                trial.score = self._model.score(result)
                self._model.tell(task, result)
                if isinstance(task, Candidate):
                    trial.values, trial.is_feasible = task.values, task.is_feasible
                trial.state = TrialState.DONE
            elif outcome.state is TaskState.STOPPED:
                trial.score = trial.curve[-1][1] if trial.curve else None
                self._model.stopped(task, trial.score)
                trial.state = TrialState.STOPPED
            else:
                self._fail(task, trial, failure_of(repr(task), outcome), outcome.text)
            self._has_result |= outcome.state is not TaskState.FAILED
        except Exception as error:  # noqa: BLE001 - of the user's code, or its result cannot be unpickled
            what = "result" if outcome.state is TaskState.DONE else "end"
            text = f"the model did not take its {what}: {type(error).__name__}: {error}"
            failure = FailedTaskError(f"{task!r}: {text}")
            failure.__cause__ = error
            lines = [] if isinstance(error, SearchError) else traceback.format_exception(error)
            self._fail(task, trial, failure, "".join(lines))
        self._call_back("on_trial_end", self._begun.pop(outcome.id))

    def _is_to_be_kept(self, task: Any, outcome: TaskOutcome) -> bool:
        is_one_more = outcome.state is TaskState.FAILED and len(self._ended) < _MOST_KEPT
        return is_one_more and len(courier.dumps(task)) <= _KEPT_BYTES

    def _fail(self, task: Any, trial: Trial, error: FailedTaskError, text: str) -> None:
        """Notes that a trial has failed, and where that was raised, and tells the model."""
        trial.state, trial.score, trial.error = TrialState.FAILED, None, str(error)
        if text not in trial.error:
            trial.error += f"\n{text[-_MOST_TEXT:].rstrip()}"
        if self._folder is not None:
            was_lost = error.__cause__ is None
            trial.error += last_lines(self._folder, trial.number, was_lost=was_lost)
        self._failed += 1
        try:
            self._model.fail(task, error)
        except Exception as untold:  # noqa: BLE001 - of the user's code
            trial.is_told = False
            why = f"fail() raised {type(untold).__name__}: {untold}"
            trial.error += f"\nThe model was not told: {why}"
        if self._failed <= _MOST_FAILURES:
            _LOGGER.warning("trial %d has failed: %s", trial.number, trial.error)

    def _why_it_fails(self) -> str:
        if self._has_result or not (self._failed >= _MOST_FAILURES or self._is_over):
            return ""
        errors = [trial.error for trial in self._trials if trial.state is TrialState.FAILED]
        which = "all" if self._is_over else f"the first {len(errors)}"
        return f"{which} trials have failed; the last one: {errors[-1]}" if errors else ""

    def _has_ended(self) -> bool:
        if self._model.done():
            return True
        if len(self._outbox):
            return False
        self._fill()
        return not len(self._outbox)

    def _keep(self) -> None:
        """Acknowledges outcomes that cannot be lost any more: brokers forget them."""
        if not self._told or (self._is_kept and time.monotonic() < self._saved_at + _SAVE_S):
            return
        told, self._told = self._told, []
        self._is_kept = lp.save_checkpoint() is not None
        self._saved_at = time.monotonic()
        self._outbox.acknowledge(told)

    def _end(self) -> None:
        if self._is_over:
            self._outbox.cancel(list(self._outbox.outstanding))
            self._give_up()
        lp.save_checkpoint()
        self._presence.end_search(self._wait_for_stop)

    def _give_up(self) -> None:
        self._tasks = {}
        for trial in self._trials:
            if trial.state is TrialState.OUTSTANDING:
                trial.state = TrialState.STOPPED
        for trial in self._begun.values():
            self._call_back("on_trial_end", trial)

    def _wait_for_stop(self, seconds: float) -> bool:
        """Waits, so that callers that wait for the end of the search can stop the program."""
        self._over.set()
        return lp.wait_for_stop(seconds)
