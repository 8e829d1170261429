"""The event loop on which the async methods of one object run.

It runs in a thread of its own, which starts with the first task, or in that of `run`.
"""

import concurrent.futures
import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from courier.calls.context import CallContext
from courier.calls.outcomes import End, Failure, Item, Items, Step
from courier.errors import CallCancelledError, ServerBusyError
from courier.threads.handler_pool import HandlerPool
from courier.threads.locks import Lock

# Imported with the first async method, because most servers have none.
if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

#: The loop runs some Python code so often, so that an exception from outside can end its thread.
_LOOK_S = 0.1
#: Seconds that tasks have to clean up when they are cancelled at the end.
_CLEANUP_S = 0.5

Future = concurrent.futures.Future


class Tasks:
    """One event loop and the tasks of calls on it. Thread-safe."""

    def __init__(self) -> None:
        #: More tasks are refused.
        self.limit = sys.maxsize
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: Whether the loop runs, or will run, in the thread of `run`.
        self._is_driven = False
        self._has_ended = False
        #: Calls that have not ended.
        self._count = 0
        #: Tasks that were cancelled: once each, because more would interrupt their clean-up.
        self._cancelled: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    @property
    def thread_ident(self) -> int | None:
        thread = self._thread
        return None if thread is None else thread.ident

    def submit(self, coroutine: Coroutine[Any, Any, Any], call: CallContext) -> "Future[Any]":
        """Runs a coroutine as a task, in a copy of the present context.

        The outcome is CallCancelledError if its caller cancels.
        """
        future: Future[Any] = Future()
        try:
            with self._lock:
                if self._has_ended:
                    raise CallCancelledError(f"{call.method}: the server has stopped")
                if self._count >= self.limit:
                    raise ServerBusyError(
                        f"{call.method}: {self._count} async calls run already; nothing was run"
                    )
                loop = self._ready_loop()
                self._count += 1
                loop.call_soon_threadsafe(self._begin, coroutine, call, future)
        except BaseException:
            coroutine.close()
            raise
        return future

    def _begin(
        self, coroutine: Coroutine[Any, Any, Any], call: CallContext, future: "Future[Any]"
    ) -> None:
        """Makes the task of a call. In the loop."""
        import asyncio

        def cancel() -> None:
            if not task.done():
                self.call_soon(self._cancel, task)

        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(functools.partial(self._settle, call.method, future))
        if call.cancelled:
            self._cancel(task)  # before its first step
        call.on_end(cancel)

    def _cancel(self, task: "asyncio.Task[Any]") -> None:
        """Cancels a task, once. In the loop."""
        if task not in self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    def _settle(self, method: str, future: "Future[Any]", task: "asyncio.Task[Any]") -> None:
        with self._lock:
            self._count -= 1
        try:
            if task.cancelled():
                text = f"{method}: the task that answered was cancelled"
                future.set_exception(CallCancelledError(text))
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())
        except BaseException:  # noqa: BLE001 - the loop lives on
            _log.exception("the answer of %s could not be given", method)

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Calls a function in the loop; returns False if that has ended."""
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(function, *args)
                return True
        except RuntimeError:  # closed
            pass
        return False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine, and all tasks, to its end on this loop in this thread.

        An exception that is raised in this thread from outside, as by a signal, passes through; the
        coroutine is cancelled and has half a second to clean up.

        Raises:
            RuntimeError: The loop has ended, or runs in another thread for another coroutine.
        """
        try:
            loop = self._take_over()
        except BaseException:
            coroutine.close()
            raise
        main = loop.create_task(coroutine)
        ticks = loop.create_task(_tick())
        try:
            return loop.run_until_complete(main)
        except BaseException:
            if not main.done():
                import asyncio

                main.cancel()
                loop.run_until_complete(asyncio.wait([main], timeout=_CLEANUP_S))
            if main.done() and not main.cancelled():
                main.exception()  # so that it counts as seen
            raise
        finally:
            ticks.cancel()
            self._give_back(loop)

    def end(self, timeout_s: float) -> list[str]:
        """Cancels all tasks and ends the loop, once.

        Returns:
            The name of its thread, if that still runs after `timeout_s` seconds.
        """
        with self._lock:
            self._has_ended = True
            loop, thread = self._loop, self._thread
            if loop is not None and thread is None and not self._is_driven and not loop.is_closed():
                loop.close()  # there was no thread for it
        if loop is None or thread is None:
            return []  # there is none, or `run` ends it
        with contextlib.suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout_s)
        return [thread.name] if thread.is_alive() else []

    def _ready_loop(self) -> "asyncio.AbstractEventLoop":
        """Returns the loop, which runs or will run. Under the lock."""
        loop = self._made_loop()
        if self._thread is None and not self._is_driven:
            try:
                self._start_thread(loop)
            except RuntimeError as error:
                raise ServerBusyError(
                    f"no thread can be started for async methods: {error}"
                ) from None
        return loop

    def _made_loop(self) -> "asyncio.AbstractEventLoop":
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

    def _start_thread(self, loop: "asyncio.AbstractEventLoop") -> None:
        thread = threading.Thread(target=self._work, args=(loop,), name="courier-loop", daemon=True)
        thread.start()
        self._thread = thread

    def _work(self, loop: "asyncio.AbstractEventLoop") -> None:
        while True:
            try:
                loop.run_forever()
                break
            except BaseException:  # noqa: BLE001 - the others go on
                _log.exception("a callback in the event loop of a courier server failed")
        if self._has_ended:
            self._finish(loop)

    def _take_over(self) -> "asyncio.AbstractEventLoop":
        with self._lock:
            if self._has_ended or self._is_driven:
                raise RuntimeError("this event loop has ended, or runs something else")
            loop, thread, self._thread = self._made_loop(), self._thread, None
            self._is_driven = True
        if thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        return loop

    def _give_back(self, loop: "asyncio.AbstractEventLoop") -> None:
        # Calls may still run, and more may come until the server stops.
        with self._lock:
            self._is_driven = False
            if not self._has_ended:
                with contextlib.suppress(RuntimeError):  # the system gives no thread
                    self._start_thread(loop)
                    return
        self._finish(loop)

    def _finish(self, loop: "asyncio.AbstractEventLoop") -> None:
        try:
            loop.run_until_complete(self._cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception:  # noqa: BLE001 - the server ends all the same
            _log.exception("the event loop of a courier server met an error at its end")
        finally:
            # Without waiting for threads of `asyncio.to_thread`, which may never end.
            loop.close()

    async def _cancel_all(self) -> None:
        """Cancels all tasks, those too that others begin as they clean up."""
        import asyncio

        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _CLEANUP_S
        while (tasks := _all_tasks(loop) - {asyncio.current_task()}) and loop.time() < ends_at:
            for task in tasks:
                self._cancel(task)
            await asyncio.wait(tasks, timeout=_LOOK_S)
        if tasks:  # they may have ignored that their callers had left
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_LOOK_S)


def _all_tasks(loop: "asyncio.AbstractEventLoop") -> "set[asyncio.Task[Any]]":
    """Returns the tasks of the running loop; since Python 3.14, only another thread sees all."""
    import asyncio

    found: list[set[asyncio.Task[Any]]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.all_tasks(loop)), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system gives no thread
        return asyncio.all_tasks()
    thread.join()
    return found[0]


async def _tick() -> None:
    """Makes a loop run Python code regularly."""
    import asyncio

    while True:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(_LOOK_S)


def is_own_end(error: BaseException) -> bool:
    """Returns whether an exception comes from outside, to end the thread, and not from a method."""
    return getattr(error, "is_forced", False) is True


async def answer(
    coroutine: Coroutine[Any, Any, Any],
    give: Callable[[Any], Any],
    call: CallContext,  # noqa: ARG001 - for `answered_call`, which looks at frames
) -> Any:
    """Awaits an awaitable that answers a call; returns the outcome, which `give` makes of a result."""
    import asyncio

    try:
        return give(await coroutine)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) or is_own_end(error):
            raise
        return Failure.of(error, skip_frames=1)


class AsyncGeneratorItems(Items):
    """An async generator that continues when it is asked to, in one task; holds no thread."""

    is_async = True

    def __init__(
        self,
        generator: AsyncGenerator[Any, Any],
        give: Callable[[Any], Any],
        tasks: Tasks,
        call: CallContext,
    ) -> None:
        import asyncio

        self._generator = generator
        self._give = give
        self._tasks = tasks
        self._asked = asyncio.Event()
        #: That which was asked for.
        self._step: Step[Any] | None = None
        self._is_over = False
        #: Done when the generator is to end; the call itself may have been answered long before.
        self._task = CallContext(call.method, call.peer, None)
        tasks.submit(self._run(), self._task).add_done_callback(self._end)
        call.on_end(self.close)

    def next_item(self) -> Item:
        step: Step[Item] = Step()
        self._begin(step)
        return step.result()

    def begin(self, handlers: HandlerPool, then: Callable[["Step[Any]"], object]) -> None:  # noqa: ARG002
        """Takes one step, and calls back in the thread of the loop."""
        step: Step[Any] = Step()
        step.add_done_callback(then)
        self._begin(step)

    def _begin(self, step: "Step[Any]") -> None:
        if not self._tasks.call_soon(self._ask, step):
            step.set_result(End())

    def close(self) -> None:
        """Ends the generator early; it cleans up on the loop. Does not wait for that."""
        self._task.end()

    def _ask(self, step: "Step[Any]") -> None:
        if self._is_over:
            step.set_result(End())
        else:
            self._step = step
            self._asked.set()

    async def _run(self) -> None:
        generator = self._generator
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                outcome = await self._next()
                step, self._step = self._step, None
                assert step is not None
                step.set_result(outcome)
                if isinstance(outcome, End | Failure):
                    return
        finally:
            try:
                await generator.aclose()
            except Exception:  # noqa: BLE001 - no caller is left to receive it
                _log.exception("a generator failed when its reader had left")

    async def _next(self) -> Any:
        import asyncio

        try:
            return self._give(await anext(self._generator))
        except StopAsyncIteration:
            return End()
        except BaseException as error:
            has_left = isinstance(error, asyncio.CancelledError) and self._task.cancelled
            if has_left or is_own_end(error):
                raise
            self.has_failed = True
            return Failure.of(error, skip_frames=1)

    def _end(self, done: "Future[Any]") -> None:
        done.exception()
        self._is_over = True
        if self._step is not None:
            self._step.set_result(End())
