"""A search as an executor: submit functions, get futures."""

import concurrent.futures
import contextlib
import os
import pickle
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import courier
import launchpad_lite as lp
from launchpad_lite.search._broker import BrokerOptions
from launchpad_lite.search._messages import Life, Outcome, State, Submission, member_here
from launchpad_lite.search._model_node import failure_of
from launchpad_lite.search._outbox import Outbox
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._store import check_files
from launchpad_lite.search._timing import DEFAULT, Timing
from launchpad_lite.search.running import RELEASE_S, RESTART, Parts, add_parts
from launchpad_lite.search.tasks import Call, submission_of

__all__ = ["Executor", "ExecutorHandle"]

R = TypeVar("R")

#: Seconds until a full or a lost broker is tried again.
_RETRY_S = 0.05
#: Seconds that the thread which collects waits for outcomes at a time.
_WAIT_S = 0.5


class Executor(concurrent.futures.Executor):
    """Runs functions on workers, on this machine or others: a `concurrent.futures.Executor`.

    Functions and arguments may be whatever cloudpickle takes: lambdas are. A function whose worker
    is lost runs again on another one. Exceptions arrive as themselves. Thread-safe.

    Its workers start with it, and stop with `shutdown`, which the `with` block calls.

    Example:
        with search.Executor(workers=8) as executor:
            print(list(executor.map(train, rates)))
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        brokers: int = 1,
        launcher: str = "local_mp",
        folder: "str | os.PathLike[str] | None" = None,
        max_losses: int = 5,
        timing: Timing = DEFAULT,
        **launch_options: Any,
    ) -> None:
        """Starts workers.

        Args:
            workers: How many; by default as many as this process may use cores.
            brokers: How many pass tasks on.
            launcher: Where they run, as for `lp.launch`.
            folder: Where brokers keep their tasks; None: in memory, and this process sends again
                what a broker has lost.
            max_losses: How often a task may lose its worker until it fails.
            timing: How long the parts wait for each other.
            **launch_options: As for `lp.launch`: `resources`, `hosts`, ..

        Raises:
            ValueError: A number is too small, or the device share is none.
            StoreInUseError: Another search uses the folder.
            StoreError: What brokers have kept there is damaged.
        """
        program = lp.Program("executor")
        options = BrokerOptions(
            timing, None if folder is None else os.fspath(folder), max_losses=max_losses
        )
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        parts = add_parts(
            program,
            workers=workers,
            brokers=brokers,
            label="executor",
            options=options,
        )
        if folder is not None:
            check_files(Path(folder), RELEASE_S)
        running = lp.launch(program, launcher, **{"restart": RESTART, **launch_options})
        try:
            self._begin(
                parts.name_server.dereference(),
                {name: handle.dereference() for name, handle in parts.brokers.items()},
                timing,
                running.complete,
            )
        except BaseException:
            running.stop()
            raise

    @classmethod
    def of(cls, name_server: Any, brokers: Mapping[str, Any], timing: Timing) -> "Executor":
        """Returns one of clients of brokers that run. For `add_to`."""
        executor = cls.__new__(cls)
        executor._begin(name_server, brokers, timing)
        return executor

    @classmethod
    def add_to(
        cls,
        program: lp.Program,
        *,
        workers: int,
        brokers: int = 1,
        label: str = "executor",
        folder: "str | os.PathLike[str] | None" = None,
        max_losses: int = 5,
        timing: Timing = DEFAULT,
    ) -> "ExecutorHandle":
        """Adds workers to a program; returns a handle, which becomes an executor in one other node.

        Its `shutdown` ends the workers.

        Args:
            program: What to add them to.
            workers: How many.
            brokers: As for `Executor`.
            label: The beginning of the names of the groups.
            folder: As for `Executor`.
            max_losses: As for `Executor`.
            timing: As for `Executor`.

        Raises:
            ValueError: A number is too small, or the program has such a group.
        """
        options = BrokerOptions(
            timing, None if folder is None else os.fspath(folder), max_losses=max_losses
        )
        parts = add_parts(
            program,
            workers=workers,
            brokers=brokers,
            label=label,
            options=options,
        )
        return ExecutorHandle(parts, timing)

    def _begin(
        self,
        name_server: Any,
        brokers: Mapping[str, Any],
        timing: Timing,
        end: Callable[[], object] | None = None,
    ) -> None:
        member = member_here("model", Life(f"executor-{uuid.uuid4().hex}", ""))
        self._presence = Presence(member, name_server, brokers, courier.Client, timing)
        self._end = end
        self._outbox = Outbox(self._presence, timing)
        self._lock = threading.Lock()
        #: Who takes one out of it tells those who wait for it.
        self._futures: dict[str, tuple[str, Future[Any]]] = {}
        self._submitted: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._is_shut = False
        self._has_finished = False
        #: Why it cannot go on.
        self._failure: BaseException | None = None
        #: Set when nobody waits for anything any more.
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"executor-{name}", daemon=True)
            for name, loop in (("send", self._send), ("collect", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Has a function run by a worker; returns the future of its result.

        Raises:
            RuntimeError: The executor was shut down, or its workers were stopped.
            TaskPickleError: The function or an argument cannot be pickled.
        """
        call = Call(fn, *args, **kwargs)
        key = uuid.uuid4().hex
        submission = submission_of(call, key)
        future: Future[R] = Future()
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"this executor has ended: {self._failure}")
            if self._is_shut:
                raise RuntimeError("this executor was shut down")
            self._futures[key] = repr(call), future
            self._submitted.put(submission)
        future.add_done_callback(lambda ended: self._give_up(key) if ended.cancelled() else None)
        return future

    def _give_up(self, key: str) -> None:
        with self._lock:
            _, future = self._futures.pop(key, ("", None))
        if future is not None:
            future.set_running_or_notify_cancel()  # wakes who waits for it
        self._outbox.cancel([key])

    def _guard(self, loop: Callable[[], None]) -> None:
        """Runs the loop of a thread; when it cannot go on, all who wait for futures hear of it."""
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - raised by the futures
            with self._lock:
                self._failure = error
                futures = [future for _, future in self._futures.values()]
                self._futures.clear()
            self._is_over.set()
            self._submitted.put(None)
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _send(self) -> None:
        """Sends what was submitted, many at a time."""
        is_sent = True
        while not self._is_over.is_set():
            found = [] if not is_sent else [self._submitted.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self._submitted.get_nowait())
            with self._lock:  # some may have been given up
                self._outbox.add([each for each in found if each and each.id in self._futures])
            is_sent = self._outbox.send()
            if not is_sent:
                self._is_over.wait(_RETRY_S)

    def _collect(self) -> None:
        """Completes futures."""
        while not self._is_over.is_set():
            outcomes, _ = self._outbox.collect(_WAIT_S)
            for outcome in outcomes:
                with self._lock:
                    task, future = self._futures.pop(outcome.id, ("", None))
                if future is not None and future.set_running_or_notify_cancel():
                    _complete(future, task, outcome)
            self._outbox.acknowledge([outcome.id for outcome in outcomes])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers, once all functions have run.

        Args:
            wait: Whether to return only then.
            cancel_futures: Whether to give up what has no result yet.
        """
        with self._lock:
            self._is_shut = True
            futures = [future for _, future in self._futures.values()]
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            concurrent.futures.wait(futures)
            self._finish()
        else:
            threading.Thread(target=self._wait_and_finish, args=(futures,)).start()

    def _wait_and_finish(self, futures: "list[Future[Any]]") -> None:
        concurrent.futures.wait(futures)
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._has_finished:
                return
            self._has_finished = True
        self._is_over.set()
        self._submitted.put(None)
        for thread in self._threads:
            thread.join()
        self._presence.leave()
        if self._end is None:
            self._presence.end_search(lp.wait_for_stop)
        else:
            self._presence.end_search(lambda _: True)  # workers from outside hear of it, too
            self._end()


class ExecutorHandle(lp.Deferred[Executor]):
    """A handle of workers: becomes an `Executor` in one other node of the program.

    Example:
        executor = search.Executor.add_to(program, workers=4)
        program.add_node(lp.PyClassNode(Study, executor), label="study")
    """

    def __init__(self, parts: Parts, timing: Timing) -> None:
        super().__init__(Executor.of, parts.name_server, dict(parts.brokers), timing)


def _complete(future: "Future[Any]", task: str, outcome: Outcome) -> None:
    if outcome.state is State.DONE:
        try:
            future.set_result(pickle.loads(outcome.payload))
        except Exception as error:  # noqa: BLE001 - who waits for the future gets it
            future.set_exception(error)
        return
    failure = failure_of(task, outcome)
    raised = failure.__cause__
    future.set_exception(raised if isinstance(raised, Exception) else failure)
