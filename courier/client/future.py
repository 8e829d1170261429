"""Calls in flight, as futures of the standard library."""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures._base import FINISHED, PENDING
from typing import Any, NoReturn

from courier.calls.outcomes import Failure, Value
from courier.calls.pending import PendingCall
from courier.client.connection import Connection
from courier.errors import CallCancelledError
from courier.threads.locks import Condition, RLock

Callback = Callable[[concurrent.futures.Future[Any]], object]

#: Seconds to wait for the lock of a future, which threads hold only for an instant.
_PATIENCE_S = 0.05

_log = logging.getLogger(__name__)


class CallFuture(concurrent.futures.Future[Any]):
    """A call in flight. `cancel()` reaches the handler, as `current_call().cancelled`.

    Callbacks may block, and call the same server: they run in their own threads. A failure that is
    never read, and that no callback receives, is logged: the first of each method of a client.
    """

    # Defaults of attributes that the standard library sets for each future. To make its condition
    # takes a quarter of the client's time for a call: this class makes it when it is first read.
    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    #: The packed answer, until it is first read. Unpickling it runs code of users, which the thread
    #: that reads the answers of all calls must not do.
    _packed: Value | Failure | None = None
    #: Logs its failure unless it is read; None if there is nothing to log.
    _unread: "_Unread | None" = None
    _is_read = False

    def __init__(self, connection: Connection, pending: PendingCall, method: str) -> None:
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._connection = connection
        self._method = method
        #: Holds the call until it has ended or was cancelled: removing it is atomic.
        self._pending = [pending]
        pending.when_done(self._settle)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override] # is never set
        # Without a lock: signal handlers and finalisers run this, too. `setdefault` is atomic.
        fields = vars(self)
        condition: threading.Condition | None = fields.get("_made_condition")
        if condition is None:
            if fields.setdefault("_ends_alone", False):
                self._state = FINISHED  # as `_give` is about to do
            condition = fields.setdefault("_made_condition", Condition())
        return condition

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a future cannot be sent: {self.where}; send its result")

    def add_done_callback(self, fn: Callback) -> None:
        self.hurry()
        self.note_read()
        super().add_done_callback(lambda _: self._call_back(fn))

    def _call_back(self, callback: Callback) -> None:
        try:
            callback(self)
        except Exception as error:  # noqa: BLE001 - as the standard library: logged; others run
            # At a stop, most callbacks just learn of it from the result: that is no mistake that
            # needs a traceback.
            is_stop = isinstance(error, CallCancelledError) and self._connection.is_ending
            _log.error("a callback failed: %s", error, exc_info=not is_stop)

    def _invoke_callbacks(self) -> None:
        # They may block, and this thread reads the answers of all calls.
        if self._done_callbacks:
            self._connection.run_aside(self._run_callbacks)

    def _run_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        # They refer to this future, which would live, with its result, until the next garbage
        # collection.
        self._done_callbacks.clear()

    def __await__(self) -> NoReturn:
        raise TypeError(
            f"a future of this kind cannot be awaited; write client.aio.{self._method}()"
        )

    def hurry(self) -> None:
        for pending in self._pending:
            pending.hurry()

    @property
    def server_name(self) -> str:
        return self._connection.lane.options.where

    @property
    def where(self) -> str:
        return self._connection.where(self._method)

    def note_read(self) -> None:
        """Notes that a failure of it need not be logged."""
        self._is_read = True
        if self._unread is not None:
            self._unread.error = None

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        try:
            pending = self._pending.pop()
        except IndexError:
            return True  # cancelled before
        # `concurrent.futures.wait` notices a cancellation only now.
        self.set_running_or_notify_cancel()
        pending.cancel()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """As `concurrent.futures.Future.result`; a cancelled call is a CallCancelledError."""
        if self._state != FINISHED:
            self._wait(timeout)
        if self._packed is not None:
            self._unpack()
        if self._exception is None:
            return self._result
        self.note_read()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._wait(timeout)
        if self._packed is not None:
            self._unpack()
        self.note_read()
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._pending):
            pending.wait_until(deadline)
        if self._state != FINISHED:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                super().exception(left)
            except concurrent.futures.CancelledError:
                raise CallCancelledError(f"{self.where}: the call was cancelled") from None

    def __repr__(self) -> str:
        if self._packed is None:
            return super().__repr__()
        return f"<{type(self).__name__} at {id(self):#x} state=finished, not read yet>"

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Returns whether done, whether cancelled, result, and exception: for asyncio of 3.14."""
        if not self.done() or self.cancelled():
            return self.done(), self.cancelled(), None, None
        error = self.exception()
        return True, False, self._result if error is None else None, error

    def _unpack(self) -> None:
        # Once, even if several threads, or signal handlers in them, read it.
        with vars(self).setdefault("_unpacking", RLock()):
            if self._packed is not None:
                try:
                    self._result = self._packed.result(self)
                except Exception as error:  # noqa: BLE001 - the future gets it
                    # Its frames refer to this future, which would then live until the next garbage collection.
                    self._exception = error.with_traceback(None)
                self._packed = None

    def _settle(self, pending: PendingCall) -> None:
        outcome = pending.outcome
        try:
            if type(outcome) is Value:
                self._packed = outcome
                self._give(None)
            elif type(outcome) is Failure:
                self._packed = outcome
                # Its own type where it is read.
                report = dataclasses.replace(outcome.report, parcel=None)
                self._fail(report.rebuild(self.server_name))
            else:
                try:
                    result = self._connection.finish(pending)
                except BaseException as error:  # noqa: BLE001 - the future gets it
                    self._fail(error.with_traceback(None))  # as in `_unpack`
                else:
                    self._give(result)
        except concurrent.futures.InvalidStateError:
            self._packed = None  # cancelled in the meantime
            self.note_read()
            return
        # The answer's raw bytes are not needed as long as the future is.
        self._pending.clear()

    def _fail(self, error: BaseException) -> None:
        if not (self._is_read or self._connection.is_ending):
            self._unread = _Unread(self._connection, self._method, error)
        self._end(self.set_exception, error)

    def _give(self, result: Any) -> None:
        self._result = result
        # Where the condition was never read, no thread waits, has left a callback or has cancelled.
        if vars(self).setdefault("_ends_alone", True):
            self._state = FINISHED
        else:
            self._end(self.set_result, result)

    def _end(self, settle: Callable[[Any], None], outcome: Any) -> None:
        """Settles this future under its lock; in another thread, if that is held for long.

        A signal handler may run in the thread that holds it, and call the same server: the settling
        thread reads that answer, too.
        """
        if self._condition.acquire(timeout=_PATIENCE_S):
            try:
                settle(outcome)
            finally:
                self._condition.release()
        else:
            self._connection.run_aside(lambda: settle(outcome))


class _Unread:
    """Logs an unread failure when it is freed."""

    def __init__(self, connection: Connection, method: str, error: BaseException) -> None:
        self._connection = connection
        self._method = method
        self.error: BaseException | None = error

    def __del__(self) -> None:
        if self.error is not None and self._method not in self._connection.unread:
            self._connection.unread.add(self._method)
            where = self._connection.where(self._method)
            text = "%s failed, and its future was never read; later failures of this method are not logged"
            _log.error(text, where, exc_info=self.error)
