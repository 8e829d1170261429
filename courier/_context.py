"""What a handler can know about the call it answers."""

import contextvars
import os
import threading
import time
from collections.abc import Callable

_making = threading.Lock()


def _survive_fork() -> None:
    # Another thread of the parent may hold it, and will never open it here.
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_survive_fork)


class CallContext:
    """One call, seen by its handler. Safe to use from several threads.

    Example:
        class Search:
            def find(self, key):
                call = courier.current_call()
                while not call.cancelled:
                    self.step(key)
    """

    # What most calls never have is not set for each of them.
    _deadline: float | None = None
    _gone = False
    #: Made when a handler waits.
    _event: threading.Event | None = None
    _is_generator = False
    _on_end: Callable[[], None] | None = None
    _on_leave: Callable[[], None] | None = None

    def __init__(self, method: str, peer: str, timeout_s: float | None) -> None:
        self.method = method
        #: Where the call comes from, for people to read.
        self.peer = peer
        if timeout_s is not None:
            self._deadline = time.monotonic() + timeout_s

    def time_remaining(self) -> float | None:
        """Returns the seconds until the caller gives up, at least 0; None means never."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer waits: cancelled, timed out or lost."""
        return self._gone or self.time_remaining() == 0.0

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """Waits until the caller no longer waits; returns `cancelled`."""
        remaining = self.time_remaining()
        waits = [wait for wait in (timeout_s, remaining) if wait is not None]
        event = self._event
        if event is None:
            with _making:
                event = self._event = self._event or threading.Event()
        if self._gone:  # looked at after the event is there to be set
            return True
        event.wait(min(waits) if waits else None)
        return self.cancelled

    def end(self) -> None:
        """Marks the call as given up by its caller. For the transport."""
        self._gone = True
        if self._event is not None:
            self._event.set()
        if self._on_end is not None:
            self._tell_end()
        if self._on_leave is not None:
            self._on_leave()

    def on_leave(self, callback: Callable[[], None]) -> None:
        """As `on_end`, for what runs the method; may be called back more than once."""
        self._on_leave = callback
        if self._gone:
            callback()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back, once, when the call is answered or given up; one callback."""
        self._on_end = callback
        if self._gone:
            self._tell_end()

    def _tell_end(self) -> None:
        with _making:
            callback, self._on_end = self._on_end, None
        if callback is not None:
            callback()

    def answered(self) -> None:
        """Notes that the first message of the answer left. For the transport.

        After that, only the reader of a generator still waits, for its items.
        """
        if not self._is_generator:
            self.end()

    def continue_as_generator(self) -> None:
        """Notes that items will follow the first message. For the transport."""
        self._is_generator = True


_current: contextvars.ContextVar[CallContext] = contextvars.ContextVar("courier_call")


def current_call() -> CallContext:
    """Returns the call that the current handler answers.

    Raises:
        RuntimeError: Not called from a handler.

    Example:
        class Store:
            def get(self, key):
                print(courier.current_call().peer, "asks for", key)
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "current_call() works inside a method that a courier server is answering with"
        ) from None


def is_in_call() -> bool:
    """Returns whether a handler runs in the current context."""
    return _current.get(None) is not None


def enter_call(call: CallContext) -> None:
    """Makes `call` the current one in the current context. For the dispatcher."""
    _current.set(call)
