"""The call that a handler answers, as the handler sees it."""

import contextvars
import time
from collections.abc import Callable
from typing import Any

from courier.threads.locks import Event


class CallContext:
    """One call, seen by its handler. Safe to use from several threads.

    Example:
        class Search:
            def find(self, key):
                call = courier.current_call()
                while not call.cancelled:
                    self.step(key)
    """

    # Defaults, because most calls never set them.
    _deadline: float | None = None
    _gone = False
    #: Made when a handler waits.
    _event: Event | None = None
    _on_end: list[Callable[[], None]] | None = None
    #: The connection and the number of the call there, for its record; 0 where there is none.
    tag = number = 0
    #: The connection by which it came; None where there is none of ours.
    connection: Any = None
    #: When it began to wait for a thread, and when its method began, as of `perf_counter`.
    came = began = 0.0

    def __init__(self, method: str, peer: str, timeout_s: float | None) -> None:
        self.method = method
        #: Where the call comes from, as text.
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
        event: Event = vars(self).setdefault("_event", Event())
        if self._gone:  # checked after the event exists
            return True
        event.wait(min(waits) if waits else None)
        return self.cancelled

    def end(self) -> None:
        """Marks the call as cancelled by its caller. For the transport."""
        self._gone = True
        if self._event is not None:
            self._event.set()
        if self._on_end:
            self._tell_end(self._on_end)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back, once, when the call is answered or cancelled."""
        callbacks: list[Callable[[], None]] = vars(self).setdefault("_on_end", [])
        callbacks.append(callback)
        if self._gone:
            self._tell_end(callbacks)

    @staticmethod
    def _tell_end(callbacks: list[Callable[[], None]]) -> None:
        while True:
            try:
                callback = callbacks.pop()  # in one step: two threads may be here
            except IndexError:
                return
            callback()


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
    return _current.get(None) is not None


def enter_call(call: CallContext) -> None:
    """Makes `call` the current one in the current context. For the dispatcher."""
    _current.set(call)
