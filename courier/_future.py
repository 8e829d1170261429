"""Calls in flight, as futures of the standard library."""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures._base import FINISHED, PENDING
from typing import Any, NoReturn

from courier._connection import Connection
from courier._lane import PendingCall
from courier.errors import CallCancelledError

Callback = Callable[[concurrent.futures.Future[Any]], object]

#: Seconds that the lock of a future is waited for. Threads hold it for an instant only.
_PATIENCE_S = 0.05

_log = logging.getLogger(__name__)


class CallFuture(concurrent.futures.Future[Any]):
    """A call in flight. `cancel()` reaches the handler, as `current_call().cancelled`.

    Callbacks may block, and call the same server: they run in their own threads. A failure that is
    never read, and that no callback receives, is logged: the first of each method of a client.
    """

    # What the standard library sets for each, and finds here. What it makes for those who wait takes a
    # quarter of the client's time for a call: this one makes its condition when somebody asks for it.
    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    #: The thread that gives this future its outcome just now.
    _settler = 0
    #: Callbacks that wait until that thread has done so.
    _deferred: tuple[Callback, ...] = ()
    #: Logs its failure unless it is read; None if there is nothing to log.
    _unread: "_Unread | None" = None
    _is_read = False

    def __init__(self, connection: Connection, pending: PendingCall, method: str) -> None:
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._connection = connection
        self._method = method
        #: The call, until it has ended or was cancelled: taking it out is atomic.
        self._pending = [pending]
        pending.when_done(self._settle)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override] # is never set
        # Without a lock: signal handlers and finalisers come here, too. `setdefault` is atomic.
        fields = vars(self)
        condition: threading.Condition | None = fields.get("_made_condition")
        if condition is None:
            if fields.setdefault("_ends_alone", False):
                self._state = FINISHED  # as `_give` is about to do
            condition = fields.setdefault("_made_condition", threading.Condition())
        return condition

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a future cannot be sent: {self.where}; send its result")

    def add_done_callback(self, fn: Callback) -> None:
        """As `concurrent.futures.Future.add_done_callback`."""
        self.hurry()
        self.note_read()
        super().add_done_callback(lambda _: self._call_or_defer(fn))

    def __await__(self) -> NoReturn:
        raise TypeError(
            f"a future of this kind cannot be awaited; write client.aio.{self._method}()"
        )

    def hurry(self) -> None:
        """Notes that the end must be reported even though no thread waits for it."""
        for pending in self._pending:
            pending.hurry()

    @property
    def where(self) -> str:
        """The server and the method, for messages."""
        return self._connection.where(self._method)

    def note_read(self) -> None:
        """Notes that its failure, if it fails, need not be logged."""
        self._is_read = True
        if self._unread is not None:
            self._unread.error = None

    def _wait(self, timeout: float | None) -> float | None:
        """Waits by reading the answer itself; returns how many seconds are left."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._pending):
            pending.wait_until(deadline)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def cancel(self) -> bool:
        """Gives the call up. Returns False if its answer is already here."""
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
        left = self._wait(timeout) if self._pending else timeout
        if self._state == FINISHED and self._exception is None:
            return self._result
        try:
            return super().result(left)
        except concurrent.futures.CancelledError:
            if not self.cancelled():
                raise  # by the method, or by closing the client
            raise self._cancellation() from None
        finally:
            if self._unread is not None:
                self._unread.error = None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`."""
        try:
            return super().exception(self._wait(timeout) if self._pending else timeout)
        except concurrent.futures.CancelledError:
            raise self._cancellation() from None
        finally:
            if self._unread is not None:
                self._unread.error = None

    def _cancellation(self) -> CallCancelledError:
        return CallCancelledError(f"{self._connection.where(self._method)}: the call was cancelled")

    def _settle(self, pending: PendingCall) -> None:
        self._settler = threading.get_ident()
        try:
            try:
                result = self._connection.finish(pending, self._method)
            except BaseException as error:  # noqa: BLE001 - the future gets it
                # Its frames refer to this future, which would then live until the next garbage collection.
                self._end(self.set_exception, error.with_traceback(None))
                if not (self._is_read or self._connection.is_ending):
                    self._unread = _Unread(self._connection, self._method, error)
            else:
                self._give(result)
        except concurrent.futures.InvalidStateError:
            return  # cancelled in the meantime
        finally:
            self._settler = 0
        # The answer's raw bytes are not needed as long as the future is.
        self._pending.clear()
        callbacks = self._deferred
        if callbacks:
            self._connection.run_aside(lambda: _run_callbacks(callbacks, self))

    def _give(self, result: Any) -> None:
        self._result = result
        # Where nobody has asked for the condition, nobody waits, has left a callback or has cancelled.
        if vars(self).setdefault("_ends_alone", True):
            self._state = FINISHED
        else:
            self._end(self.set_result, result)

    def _end(self, settle: Callable[[Any], None], outcome: Any) -> None:
        """Settles this future, which takes its lock; in another thread, if one keeps that.

        A signal handler may run in the one that keeps it, and call the same server: the thread that
        settles reads that answer, too.
        """
        if self._condition.acquire(timeout=_PATIENCE_S):
            try:
                settle(outcome)
            finally:
                self._condition.release()
        else:
            self._connection.run_aside(lambda: self._end_late(settle, outcome))

    def _end_late(self, settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled in the meantime
            settle(outcome)

    def _call_or_defer(self, callback: Callback) -> None:
        # The settling thread reads the answers of all calls and must not be blocked.
        if self._settler == threading.get_ident():
            self._deferred = (*self._deferred, callback)
        else:
            _run_callbacks((callback,), self)


class _Unread:
    """Logs a failure when it goes, unless that was read."""

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


def _run_callbacks(callbacks: Sequence[Callback], future: CallFuture) -> None:
    for callback in callbacks:
        try:
            callback(future)
        except Exception as error:  # noqa: BLE001 - as the standard library: logged, others still run
            # At a stop, most read the result only to learn of it: no mistake that needs a traceback.
            is_stop = isinstance(error, CallCancelledError) and future._connection.is_ending
            _log.error("a callback failed: %s", error, exc_info=not is_stop)
