"""A worker: asks a broker for tasks, and runs them. A worker makes all calls and gets none."""

import collections
import contextlib
import faulthandler
import inspect
import itertools
import math
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.process.stacks import stacks_of_threads
from launchpad_lite.search._messages import (
    PYTHON,
    Assignment,
    Limits,
    TaskOutcome,
    TaskState,
    first_of,
    longer,
    transfer_s,
)
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._process import (
    TrialOutput,
    end_process,
    look,
    machine_here,
    memory_here,
    pin,
)
from launchpad_lite.search._timing import RETRY_S
from launchpad_lite.search.errors import LOST, SearchError, StoppedEarlyError
from launchpad_lite.search.tasks import Running, Tried, running

#: Short tasks are fetched together: as many as run in this time.
_BATCH_S = 0.02
_MOST_AT_ONCE = 64
#: Tasks that wait so long for another one of their batch are given back.
_STUCK_S = 0.25
#: Weight of the newest task in the mean.
_NEWEST = 0.2
#: Seconds between two reports of learning curves, at least.
_REPORT_S = 0.1
#: Seconds after which the output of a trial can be followed.
_SILENT_S = 0.5
#: Frames in the stack of a task that is ended, below those of this package.
_MOST_FRAMES = 20
_HERE = str(Path(__file__).parent)
_NO_LIMITS = Limits()
#: Larger results fail.
_MAX_RESULT_BYTES = 256 << 20
#: Seconds without a broker after which a worker gives up.
_ALONE_S = 120.0


class Worker:
    """Runs tasks in the thread that calls `run`, and shows in another one that it lives."""

    def __init__(
        self,
        presence: Presence,
        stop: threading.Event,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._presence = presence
        self._timing = presence.timing
        #: Set when it is to end after its task.
        self._stop = stop
        #: Called between tasks.
        self._heartbeat = heartbeat
        self._beating = threading.Thread(target=self._beat, name="search-heartbeat", daemon=True)
        #: The thread that runs tasks, and whether its process can be ended for it.
        self._thread, self._has_process = 0, False
        self._me = presence.member.who
        self._broker = ""
        #: The broker that it goes to after its task, because that has fewer workers; empty: none.
        self._next_broker = ""
        self._mean_s = 1.0
        #: Extra seconds for tasks to arrive: their size is not known before.
        self._slack_s = 0.0
        #: Changed by both threads.
        self._lock = threading.Lock()
        #: Held by the thread that sends reports.
        self._reporting = threading.Lock()
        self._unbegun: collections.deque[Assignment] = collections.deque()
        #: By broker, the tokens of its tasks by id, also of outcomes that are not handed in yet.
        self._held: dict[str, dict[str, str]] = {}
        self._outcomes: dict[str, list[TaskOutcome]] = {}
        self._running: Running | None = None
        self._assigned = Assignment("", "", PYTHON, b"")
        self._output = TrialOutput(self._me)
        self._began_at = 0.0
        #: Why this process is to start again; empty: it is not.
        self._ends_for = ""
        #: Set when there is something to send.
        self._woken = threading.Event()
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._is_over = False
        self._ended: set[str] = set()
        #: The time since which no broker answers.
        self._lost_at: float | None = None

    def run(self) -> None:
        """Works until it is to end, or the search is over; raises if no broker answers any more."""
        self._thread = threading.get_ident()
        self._has_process = threading.current_thread() is threading.main_thread()
        if self._presence.has_choice():  # else this comes with the first heartbeat
            self._presence.beat()
        self._beating.start()
        forced: SystemExit | None = None
        try:
            while not self._stop.is_set() and not self._is_over:
                self._heartbeat()
                self._fetch()
                while (assignment := self._next()) is not None:
                    self._execute(assignment)
                if self._failure is not None:
                    raise self._failure
        except SystemExit as error:
            forced = error
        finally:
            self._has_ended.set()
            self._woken.set()
            self._beating.join()
        # Also if forced: its task has not lost its worker, and runs elsewhere at once.
        self._leave_all()
        if self._ends_for:
            end_process(self._ends_for)
        if forced is not None:
            raise forced

    def wake(self) -> None:
        """Wakes it to check `stop`, if it waits for a task. Thread-safe."""
        with contextlib.suppress(KeyError):
            self._presence.client(self._broker).futures.dismiss(self._me)

    # Getting tasks.

    def _fetch(self) -> None:
        """Hands in outcomes, and gets tasks: none, if none came for a while."""
        if self._next_broker:
            left, self._broker, self._next_broker = self._broker, self._next_broker, ""
            self._leave(left)
        if not self._broker:
            self._broker = self._presence.choose()
        if not self._broker:
            self._note_loss()
            return
        try:
            found = self._exchange(self._broker)
        except LOST as error:
            lost, self._broker, self._next_broker = self._broker, "", ""
            if isinstance(error, courier.CallTimeoutError):
                self._slack_s = longer(self._slack_s)
            if isinstance(error, courier.ServerUnreachableError):  # it has ended for good
                self._ended.add(lost)
                self._is_over = self._presence.has_ended(self._ended)
            self._note_loss()
            self._broker = self._presence.choose(avoid=[lost])
            self._is_over |= self._presence.view.is_closed
            return
        if found is None:
            self._is_over = True
            return
        self._lost_at = None
        with self._lock:
            self._held.setdefault(self._broker, {}).update({each.id: each.token for each in found})
            self._unbegun.extend(found)
        if len(found) > 1:
            self._woken.set()  # some may have to be given back

    def _note_loss(self) -> None:
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        self._is_over |= self._presence.view.is_closed
        if now - self._lost_at > _ALONE_S:
            raise SearchError(
                f"{self._me.name}: no broker has answered for {_ALONE_S:g} s, and this worker gives up"
            )
        self._stop.wait(RETRY_S)

    def _exchange(self, broker: str) -> list[Assignment] | None:
        """Hands in outcomes of tasks of a broker; returns new tasks. None: the search is over."""
        with self._lock:
            outcomes = list(self._outcomes.get(broker, ()))
        while len(part := first_of(outcomes)) < len(outcomes):
            self._client(broker, transfer_s(part)).hand_in(part)
            self._forget(broker, part)
            del outcomes[: len(part)]
        with self._lock:
            sent = {outcome.id for outcome in outcomes}
            held = [each for each in self._held.get(broker, ()) if each not in sent]
        count = max(1, min(_MOST_AT_ONCE, int(_BATCH_S / max(self._mean_s, 1e-6))))
        wait_s = self._timing.poll_s
        client = self._client(broker, wait_s + self._slack_s + transfer_s(outcomes))
        found: list[Assignment] | None = client.work(
            self._me, held, outcomes, (PYTHON,), count, wait_s, machine=machine_here()
        )
        self._forget(broker, outcomes)
        self._slack_s /= 2
        return found

    # Running them.

    def _next(self) -> Assignment | None:
        with self._lock:
            if not self._unbegun or self._stop.is_set():
                return None
            assignment = self._assigned = self._unbegun.popleft()
            self._running = Running(assignment.id, self._woken.set)
            self._began_at = time.monotonic()
            return assignment

    def _execute(self, assignment: Assignment) -> None:
        assert self._running is not None
        if self._has_process and not pin(assignment.devices):  # it gives the task back
            self._ends_for = f"{self._me.name} starts again to use {','.join(assignment.devices)}"
            raise SystemExit
        token = running.set(self._running)
        begun_at = time.monotonic()
        try:
            state, payload, text = self._outcome_of(assignment)
        finally:
            running.reset(token)
        if not self._decides(self._running):
            if self._has_process:
                self._beating.join()  # it ends this process
            return
        seconds = time.monotonic() - begun_at
        self._mean_s += _NEWEST * (seconds - self._mean_s)
        if self._running.progress:
            with contextlib.suppress(*LOST):
                self._renew()  # its last points come before its outcome
        self._note(state, payload, text, seconds)

    def _note(self, state: TaskState, payload: bytes, text: str, seconds: float) -> TaskOutcome:
        """Keeps the outcome of the task that was run, until it is handed in."""
        key, token, *_ = self._assigned
        outcome = TaskOutcome(key, token, state, payload, text, seconds, self._me.name)
        with self._lock:
            self._outcomes.setdefault(self._broker, []).append(outcome)
        return outcome

    def _outcome_of(self, assignment: Assignment) -> tuple[TaskState, bytes, str]:
        assert self._running is not None
        try:
            if assignment.devices and not self._has_process:
                raise SearchError(
                    "workers are threads here, which see the same devices: tasks with gpus need a "
                    "launcher that starts processes"
                )
            task = pickle.loads(assignment.payload)
            if isinstance(task, Tried):
                task, self._running.trial = task
            run = getattr(task, "run", task)
            is_watched = assignment.limits != _NO_LIMITS or self._running.trial is not None
            with self._watched(self._running) if is_watched else contextlib.nullcontext():
                value = run()
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError(f"{task!r} is async: call asyncio.run in it")
            try:
                payload = courier.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"the result of {task!r} cannot be pickled: {type(error).__name__}: {error}"
                ) from error
            if len(payload) > _MAX_RESULT_BYTES:
                raise MemoryError(
                    f"the result of {task!r} has {len(payload):,} bytes, and results have at most "
                    f"{_MAX_RESULT_BYTES:,}: write it to a file, and return its path"
                )
        except StoppedEarlyError:
            return TaskState.STOPPED, b"", ""
        except BaseException as error:
            if not isinstance(error, Exception) and self._stop.is_set():
                raise  # not by the task: its node is ended by force
            if type(error).__name__ == "TrialPruned":  # of Optuna, in functions made for it
                return TaskState.STOPPED, b"", ""
            report = courier.ExceptionReport.text_of(error, skip_frames=1)
            report = report.with_object(error, _MAX_RESULT_BYTES)
            return TaskState.FAILED, pickle.dumps(report), report.traceback
        return TaskState.DONE, payload, ""

    @contextlib.contextmanager
    def _watched(self, task: Running) -> Iterator[None]:
        """In a block, the other thread watches a task, and the output goes to its log."""
        limits = self._assigned.limits
        task.begun_at = task.moved_at = time.monotonic()
        if limits != _NO_LIMITS:
            self._woken.set()
        with contextlib.ExitStack() as stack:
            if task.trial is not None and self._has_process:
                stack.enter_context(self._output.of(task.trial))
            if limits.timeout_s is not None and self._has_process:
                # If the task holds the GIL in C, the other thread cannot end it.
                last_s = min(limits.timeout_s + self._timing.lease_s, threading.TIMEOUT_MAX)
                faulthandler.dump_traceback_later(last_s, exit=True, file=2)
                stack.callback(faulthandler.cancel_dump_traceback_later)
            yield

    # Ending them.

    def _decides(self, task: Running) -> bool:
        """Returns whether this thread is the first of the two to decide the outcome of a task."""
        with self._lock:
            is_first, task.is_over = not task.is_over, True
            return is_first

    def _look(self) -> float:
        """Ends a task that exceeds a limit; returns the seconds until the next look."""
        task, now = self._running, time.monotonic()
        if task is None or task.is_over:
            return math.inf
        memory = memory_here if self._has_process else int
        if now - task.begun_at > _SILENT_S:
            self._output.keep()
        limits = self._assigned.limits
        why, pause_s = look(limits, now - task.begun_at, now - task.moved_at, memory)
        if why:
            self._end(task, TaskState.FAILED, why)
        return pause_s

    def _end(self, task: Running, state: TaskState, why: str) -> None:
        """Ends a task at once, with this process; one in a thread of a script, at its next report."""
        if not self._decides(task):
            return
        with stacks_of_threads() as stacks:
            stack = reversed(traceback.StackSummary.extract(stacks[self._thread]).format())
        where = [*itertools.takewhile(lambda each: _HERE not in each, stack)][:_MOST_FRAMES]
        text = f"{why}, and was ended here:\n{''.join(reversed(where))}"
        outcome = self._note(state, b"", text, time.monotonic() - self._began_at)
        if self._has_process:
            try:
                self._leave_all()
            finally:
                end_process(f"{self._me.name} ends with its task: {why}")
        task.is_stopped = True
        self._client(self._broker).hand_in([outcome])
        self._forget(self._broker, [outcome])

    # Heartbeats.

    def _beat(self) -> None:
        next_at, pause_s = 0.0, 0.0
        self._has_ended.wait(_REPORT_S)  # first tasks do not wait for the first heartbeat
        while not self._has_ended.is_set():
            try:
                pause_s = min(self._timing.beat_s, self._look())
                now = time.monotonic()
                self._give_back_stuck(now)
                if now >= next_at:
                    next_at = now + self._timing.beat_s
                    self._renew()
                    self._hand_in_late()
                    self._presence.beat(self._broker)  # last: it may take time while it is lost
                    self._look_for_room()
                elif self._running is not None and self._running.progress:
                    self._renew()
            except LOST:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by the other thread
                self._failure = error
                return
            self._woken.wait(min(pause_s, _STUCK_S) if self._unbegun else pause_s)
            if self._woken.is_set():
                self._has_ended.wait(_REPORT_S)
                self._woken.clear()

    def _renew(self) -> None:
        """Sends heartbeats with its tasks to brokers, and the reports of its task."""
        with self._reporting:
            with self._lock:
                held = {name: dict(tokens) for name, tokens in self._held.items() if tokens}
                task = self._running
            points = [] if task is None else task.progress[:]
            calls = {
                name: self._client(name).futures.beat(
                    self._me, tokens, points if task is not None and task.key in tokens else ()
                )
                for name, tokens in held.items()
            }
            for name, call in calls.items():  # at the same time: some may be lost
                with contextlib.suppress(*LOST):
                    stops = call.result()
                    if task is not None and task.key in held[name]:
                        del task.progress[: len(points)]
                        task.is_stopped |= task.key in stops
                        if stops.get(task.key):
                            self._end(task, TaskState.STOPPED, "its model has asked for that")

    def _client(self, broker: str, wait_s: float = 0.0) -> Any:
        client = self._presence.client(broker)
        return courier.with_timeout(client, wait_s + 2 * self._timing.beat_s)

    def _give_back_stuck(self, now: float) -> None:
        with self._lock:
            if not self._unbegun or now - self._began_at < _STUCK_S:
                return
            stuck = {each.id: each.token for each in self._unbegun}
            self._unbegun.clear()
            for each in stuck:
                self._held[self._broker].pop(each, None)
        self._client(self._broker).give_back(self._me, stuck)

    def _look_for_room(self) -> None:
        """Looks for a broker with fewer workers, which came late or came back."""
        here = self._broker
        if self._presence.is_crowded(here) and (place := self._presence.choose()) not in ("", here):
            self._client(place).beat(self._me, {}, ())  # checks that it can be reached from here
            self._next_broker = place

    def _hand_in_late(self) -> None:
        """Hands in outcomes to brokers that were lost before and answer again."""
        with self._lock:
            late = {
                name: first_of(outcomes)
                for name, outcomes in self._outcomes.items()
                if outcomes and name != self._broker
            }
        calls = {
            name: self._client(name, transfer_s(outcomes)).futures.hand_in(outcomes)
            for name, outcomes in late.items()
        }
        for name, call in calls.items():
            try:
                call.result()
            except courier.ServerUnreachableError:
                pass  # it has ended for good, and does not wait for them
            except LOST:
                continue
            self._forget(name, late[name])

    def _forget(self, broker: str, outcomes: Sequence[TaskOutcome]) -> None:
        sent = {outcome.id for outcome in outcomes}
        with self._lock:
            kept = self._outcomes.get(broker, ())
            self._outcomes[broker] = [each for each in kept if each.id not in sent]
            for each in sent:
                self._held[broker].pop(each, None)

    def _leave_all(self) -> None:
        with self._lock:
            self._unbegun.clear()
        self._output.close()
        for name in set(self._held) | set(self._outcomes) | {self._broker} - {""}:
            self._leave(name)
        self._presence.leave()

    def _leave(self, broker: str) -> None:
        with self._lock:
            outcomes = list(self._outcomes.get(broker, ()))
        with contextlib.suppress(*LOST, courier.CallCancelledError, KeyError):
            self._client(broker, transfer_s(outcomes)).leave(self._me, outcomes)
            self._forget(broker, outcomes)


def load_parts() -> None:
    """Imports what the nodes of a search need. Their agent calls it before it forks them."""
    from launchpad_lite.search import _broker, executor, name_server  # noqa: F401
