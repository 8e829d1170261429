"""A call in flight, as waiting callers see it, on all transports."""

import time
from collections.abc import Callable
from threading import get_ident
from time import perf_counter

from courier.calls.outcomes import Items, Kind, Outcome, Value
from courier.calls.records import MethodNumbers, how_ended
from courier.errors import CallCancelledError, CallTimeoutError, CourierError
from courier.threads import clock


class PendingCall:
    """A call, which ends once: with an outcome, or with an error in its place. Thread-safe.

    It has no lock, for which a signal handler might wait for ever: each step is one operation on a
    dictionary.
    """

    # Not set for each call, which takes longer.
    #: Monotonic time at which the caller gives up.
    deadline: float | None = None
    #: The end, once there is one.
    outcome: Outcome | Exception | None = None
    _callback: Callable[["PendingCall"], None] | None = None
    #: The client that made it, if that shares its lane with others.
    owner: object = None
    #: Where it is counted.
    numbers: MethodNumbers
    #: Its record there, from its begin to its end, and when that begins.
    record = 0
    began = 0.0
    #: Whether its time is over, and its server has a moment to say why.
    is_late = False
    #: Whether the clock ends it, too.
    is_timed = False

    def __init__(self, method: str, timeout_s: float | None, *, is_shared: bool) -> None:
        """Begins to count the time. `is_shared`: no thread waits for it at once."""
        self._method = method
        self._timeout_s = timeout_s
        if timeout_s is not None:
            self.deadline = time.monotonic() + timeout_s
        self.is_shared = is_shared

    @property
    def server_name(self) -> str:
        """The server, for messages."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        return f"{self.server_name}: {self._method}"

    def begin_record(self, tag: int = 0) -> None:
        """Counts the call, from now until it ends; a stream, until that is over."""
        self.began = began = perf_counter()
        self.record = self.numbers.begin(began, tag, 0, get_ident())

    def end_record(self, how: int = Kind.END) -> None:
        """Records the end of a stream. A second one does nothing."""
        if record := vars(self).pop("record", 0):
            self.numbers.end(record, self.began, 0.0, how)

    def wait_until(self, deadline: float | None) -> bool:
        """Waits until a monotonic time at most; returns whether the answer is here."""
        raise NotImplementedError

    def hurry(self) -> None:
        """Notes that the answer must be reported even though no thread waits for it."""
        raise NotImplementedError

    def _give_up(self, error: CourierError) -> bool:
        """Ends the call, unless it has ended, and tells the server; returns whether it did."""
        raise NotImplementedError

    def _note_end(self) -> None:
        """Wakes waiting threads."""
        raise NotImplementedError

    @property
    def is_settled(self) -> bool:
        return self.outcome is not None

    def wait(self) -> Outcome:
        """Waits for the answer; a KeyboardInterrupt cancels the call. Raises CourierError."""
        if self.outcome is None:
            try:
                while not self.wait_until(self.deadline):
                    self.expire()
            except BaseException:
                self._break_off()
                raise
        outcome = self.outcome
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _break_off(self) -> None:
        self.cancel()

    def when_done(self, callback: Callable[["PendingCall"], None]) -> None:
        """Calls back once, soon after the answer came; `wait` then returns at once."""
        self._callback = callback
        if self.outcome is not None:
            self._call_back()

    def _call_back(self) -> None:
        callback = vars(self).pop("_callback", None)
        if callback is not None:
            callback(self)

    def cancel(self, reason: str = "the call was cancelled") -> bool:
        """Cancels the call; returns False if the answer is already here."""
        return self._give_up(CallCancelledError(f"{self.where}: {reason}"))

    def expire(self) -> None:
        self._give_up(self.timeout_error())

    def timeout_error(self, what: str = "no answer", why: str = "") -> CallTimeoutError:
        text = f"{self.where}: {what} within {self._timeout_s:.3g} s"
        return CallTimeoutError(text + (why and f"; {why}"))

    def settle(self, outcome: Outcome | Exception) -> bool:
        """Ends the call, unless it has ended; returns whether it did."""
        ends_with = outcome
        if self.deadline is not None and not isinstance(outcome, Exception):
            if self.is_late or time.monotonic() >= self.deadline:
                # The method saw the deadline, too, and may have answered because of that.
                ends_with = self.timeout_error(why="its answer came later")
        if self.outcome is not None or vars(self).setdefault("outcome", ends_with) is not ends_with:
            return False
        how = Value.kind if type(ends_with) is Value else how_ended(ends_with)
        if self.record and how != Items.kind:
            self.numbers.end(self.record, self.began, 0.0, how)
        self._note_end()
        if self.is_timed:
            clock.look()
        self._call_back()
        return ends_with is outcome
