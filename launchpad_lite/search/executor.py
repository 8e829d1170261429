"""A search as an executor: submit functions, get futures."""

import concurrent.futures
import functools
import itertools
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, overload

import launchpad_lite as lp
from launchpad_lite.process.agent_process import agent_ahead
from launchpad_lite.search._messages import PYTHON, Limits, TaskOutcome, TaskState, TaskSubmission
from launchpad_lite.search._outbox import COLLECT_S, RETRY_S, Outbox
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import DEFAULT, Timing
from launchpad_lite.search.errors import InitializerError
from launchpad_lite.search.tasks import Call, failure_of, options_of, pickled

if TYPE_CHECKING:
    from launchpad_lite.launching import Launcher
    from launchpad_lite.search._parts import ExecutorHandle

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Sent(NamedTuple):
    """A call that is sent. A process keeps the 16 functions that it has called last."""

    function: bytes
    arguments: bytes
    #: Is called first by each worker; empty: none.
    initializer: bytes
    text: str

    def run(self) -> Any:
        """Calls the function."""
        if self.initializer != getattr(_worker, "initializer", b""):
            try:
                pickle.loads(self.initializer)()
            except BaseException as error:
                raise InitializerError(f"the initializer raised {error!r}") from error
            _worker.initializer = self.initializer
        args, kwargs = pickle.loads(self.arguments)
        return _function_of(self.function)(*args, **kwargs)

    def __repr__(self) -> str:
        return self.text


_function_of = functools.lru_cache(16)(pickle.loads)
#: The initializer that the worker in this thread has called.
_worker = threading.local()


class ExecutorFuture(Future[R]):
    """The future of a call that a worker runs."""

    #: Ends the process that runs it; whether that was asked for.
    end: Callable[[], object]
    is_killed = False

    def cancel(self, *, kill: bool = False) -> bool:
        """Cancels the call, unless it runs; returns whether it is cancelled.

        Args:
            kill: Whether the process of its worker ends if it runs; then `result` raises `CancelledError`.
        """
        if not super().cancel() and kill and self.running():
            self.is_killed = True
            self.end()
        return self.cancelled() or self.is_killed


class Executor(concurrent.futures.Executor):
    """Runs functions on workers, on this machine or others: a `concurrent.futures.Executor`.

    Functions and arguments may be all that cloudpickle takes, such as lambdas. A function whose
    worker is lost runs again on another one. Exceptions arrive as themselves. Thread-safe.

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
        launcher: "str | Launcher" = "local_mp",
        folder: "str | os.PathLike[str] | None" = None,
        max_losses: int = 5,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        timing: Timing = DEFAULT,
        **launch_options: Any,
    ) -> None:
        """Starts workers.

        Args:
            workers: How many; by default as many as this process may use cores.
            brokers: How many brokers pass tasks on.
            launcher: Where they run, as for `lp.launch`.
            folder: Where brokers keep their tasks; None: in memory, and this process sends again
                what a broker has lost.
            max_losses: How often a task may lose its worker until it fails.
            initializer: Each worker calls it once, before its first function. If it raises, all
                futures raise `InitializerError`.
            initargs: Its arguments.
            timing: How long the parts wait for each other.
            **launch_options: As for `lp.launch`: `resources`, `hosts`, ..

        Raises:
            TypeError: The initializer cannot be pickled.
            ValueError: A number is too small.
            StoreInUseError: Another search uses the folder.
            StoreError: The store of a broker there is damaged.
        """
        kept = None if folder is None else os.fspath(folder)
        first = b""
        if initializer is not None:
            first = pickled(functools.partial(initializer, *initargs), initializer)
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        with agent_ahead(launcher):
            # While the agent starts, as most of what makes a program.
            from launchpad_lite.search._parts import RELEASE_S, RESTART, BrokerOptions, add_parts

            program = lp.Program("executor")
            options = BrokerOptions(timing, kept, max_losses=max_losses)
            parts = add_parts(
                program, workers=workers, brokers=brokers, label="executor", options=options
            )
            if folder is not None:
                from launchpad_lite.search._sqlite import check_files

                check_files(Path(folder), RELEASE_S)
            running = lp.launch(program, launcher, **{"restart": RESTART, **launch_options})
        try:
            self._begin(
                parts.name_server.dereference(),
                {name: handle.dereference() for name, handle in parts.brokers.items()},
                timing,
                running.complete,
                first,
            )
            running.before_wait = self.shutdown
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
        program: "lp.Program",
        *,
        workers: int,
        brokers: int = 1,
        label: str = "executor",
        folder: "str | os.PathLike[str] | None" = None,
        max_losses: int = 5,
        timing: Timing = DEFAULT,
    ) -> "ExecutorHandle":
        """Adds workers to a program; returns a handle, which becomes an executor in one other node.

        Its `shutdown` ends the workers. The names of their groups begin with `label`; other arguments
        are as for `Executor`.

        Raises:
            ValueError: A number is too small, or the program has such a group.
        """
        from launchpad_lite.search._parts import BrokerOptions, ExecutorHandle, add_parts

        kept = None if folder is None else os.fspath(folder)
        options = BrokerOptions(timing, kept, max_losses=max_losses)
        parts = add_parts(program, workers=workers, brokers=brokers, label=label, options=options)
        return ExecutorHandle(parts, timing)

    def _begin(
        self,
        name_server: Any,
        brokers: Mapping[str, Any],
        timing: Timing,
        end: Callable[[], object] | None = None,
        initializer: bytes = b"",
    ) -> None:
        me = f"executor-{os.urandom(16).hex()}"
        self._presence = Presence("model", me, name_server, brokers, timing)
        self._end = end
        self._initializer = initializer
        self._outbox = Outbox(self._presence)
        if not self._presence.has_choice():  # its first outcomes do not wait for it
            self._outbox.beat_at = time.monotonic() + COLLECT_S
        self._lock = threading.Lock()
        #: The thread that takes one out of it notifies its waiters.
        self._futures: dict[str, tuple[str, ExecutorFuture[Any]]] = {}
        #: Calls to send, and ids of calls to cancel.
        self._submitted: queue.SimpleQueue[TaskSubmission | str | None] = queue.SimpleQueue()
        self._is_shut = False
        self._has_finished = False
        self._failure: BaseException | None = None
        #: Set when no caller waits for anything any more.
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"executor-{name}", daemon=True)
            for name, loop in (("send", self._send), ("collect", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ExecutorFuture[R]:
        """Has a function run by a worker; returns the future of its result.

        Raises:
            RuntimeError: The executor was shut down, or has ended (`BrokenExecutor`).
            TaskPickleError: The function or an argument cannot be pickled.
        """
        call = Call(fn, *args, **kwargs)
        return self._submit(repr(call), options_of(call), pickled(fn, repr(call)), args, kwargs)

    def _submit(
        self,
        text: str,
        options: tuple[float, int, Limits],
        function: bytes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> ExecutorFuture[Any]:
        key = os.urandom(16).hex()
        sent = Sent(function, pickled((args, kwargs), text), self._initializer, text)
        future: ExecutorFuture[Any] = ExecutorFuture()
        future.end = functools.partial(self._outbox.stop, [key], kill=True)
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures: this executor was shut down")
            if self._failure is not None:
                raise concurrent.futures.BrokenExecutor(f"this executor has ended: {self._failure}")
            self._futures[key] = text, future
            self._submitted.put(TaskSubmission(key, pickle.dumps(sent), PYTHON, *options))
        future.add_done_callback(lambda ended: self._give_up(key) if ended.cancelled() else None)
        return future

    @overload  # type: ignore[override] # the standard library checks no items
    def map(
        self,
        fn: Callable[[A], R],
        items: Iterable[A],
        /,
        *,
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = 10_000,
        ordered: bool = True,
    ) -> Iterator[R]: ...
    @overload
    def map(
        self,
        fn: Callable[..., R],
        items: Iterable[Any],
        more: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = 10_000,
        ordered: bool = True,
    ) -> Iterator[R]: ...
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = 10_000,
        ordered: bool = True,
    ) -> Iterator[R]:
        """Returns an iterator of the results of calls with an item of each iterable, which may be endless.

        Args:
            fn: The function.
            *iterables: As for the built-in `map`.
            timeout: Seconds from now on after which the iterator raises `TimeoutError`.
            chunksize: How many calls are one task. If one of them raises, the others have no result.
            buffersize: How many tasks are sent at once; then one more for each whose results are
                taken. None: all.
            ordered: Whether results come in the order of the items; else as they are completed.

        Raises:
            ValueError: A size is below 1.
            Exception: As for `submit`.
        """
        if chunksize < 1 or (buffersize is not None and buffersize < 1):
            raise ValueError("map: chunksize and buffersize are at least 1")
        until = None if timeout is None else time.monotonic() + timeout
        options = options_of(Call(fn))
        function = pickled(functools.partial(_each, fn), fn)
        items = zip(*iterables, strict=False)
        chunks = iter(lambda: tuple(itertools.islice(items, chunksize)), ())
        pending: set[Future[list[R]]] = set()
        turns: queue.SimpleQueue[Future[list[R]]] = queue.SimpleQueue()

        def send(count: int | None) -> None:
            for chunk in itertools.islice(chunks, count):
                more = f" and {len(chunk) - 1} more" if len(chunk) > 1 else ""
                text = f"{Call(fn, *chunk[0])!r}{more}"
                future = self._submit(text, options, function, chunk, {})
                pending.add(future)
                turns.put(future) if ordered else future.add_done_callback(turns.put)

        def results() -> Iterator[R]:
            try:
                while pending:
                    left = None if until is None else max(0.0, until - time.monotonic())
                    try:
                        future = turns.get(timeout=left)
                    except queue.Empty:
                        raise concurrent.futures.TimeoutError from None
                    values = future.result(left)[::-1]
                    pending.remove(future)
                    del future  # the result can be freed now
                    send(1)
                    while values:
                        yield values.pop()
            finally:
                for each in pending:
                    each.cancel()

        send(buffersize)
        return results()

    def _give_up(self, key: str) -> None:
        with self._lock:
            _, future = self._futures.pop(key, ("", None))
        if future is not None:
            future.set_running_or_notify_cancel()  # wakes its waiters
        self._submitted.put(key)

    def _guard(self, loop: Callable[[], None]) -> None:
        """Runs the loop of a thread; if that fails, all futures fail."""
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
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _send(self) -> None:
        is_sent = True
        while not self._is_over.is_set():
            found = [self._submitted.get()] if is_sent else []
            found += [self._submitted.get() for _ in range(self._submitted.qsize())]
            new = [each for each in found if isinstance(each, TaskSubmission)]
            with self._lock:  # some may have been given up
                self._outbox.add([each for each in new if each.id in self._futures])
            self._outbox.cancel([each for each in found if isinstance(each, str)])
            is_sent = self._outbox.send()
            if not is_sent:
                self._is_over.wait(RETRY_S)

    def _collect(self) -> None:
        while not self._is_over.is_set():
            outcomes, _ = self._outbox.collect(COLLECT_S)
            with self._lock:
                for key in self._outbox.begun:
                    _, future = self._futures.get(key, ("", None))
                    if future is not None and not future.set_running_or_notify_cancel():
                        del self._futures[key]  # cancelled just now; its waiters know
            for outcome in outcomes:
                self._complete(outcome)
            self._outbox.acknowledge([outcome.id for outcome in outcomes])

    def _complete(self, outcome: TaskOutcome) -> None:
        with self._lock:
            task, future = self._futures.pop(outcome.id, ("", None))
        if future is None or not (future.running() or future.set_running_or_notify_cancel()):
            return
        if outcome.state is TaskState.DONE:
            try:
                future.set_result(pickle.loads(outcome.payload))
            except BaseException as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)
            return
        failure = failure_of(task, outcome)
        raised = concurrent.futures.CancelledError() if future.is_killed else failure.__cause__
        future.set_exception(raised or failure)
        if isinstance(raised, InitializerError):
            raise raised

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers, once all functions have run.

        Args:
            wait: Whether to return only then.
            cancel_futures: Whether to give up calls without a result.
        """
        with self._lock:
            self._is_shut = True
            futures = [future for _, future in self._futures.values()]
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            self._finish(futures)
        else:
            threading.Thread(target=self._finish, args=(futures,)).start()

    def _finish(self, futures: "Iterable[Future[Any]]") -> None:
        concurrent.futures.wait(futures)
        with self._lock:
            if self._has_finished:
                return
            self._has_finished = True
        self._is_over.set()
        self._submitted.put(None)
        self._threads[0].join()
        self._presence.leave()
        if self._end is None:
            self._presence.end_search(lp.wait_for_stop)
        else:
            self._presence.end_search(lambda _: True)  # workers from outside hear of it, too
            self._end()
        self._threads[1].join()  # brokers that end answer its last call


def _each(function: Callable[..., R], *calls: Sequence[Any]) -> list[R]:
    return [function(*args) for args in calls]
