"""Functions that a user wants called when the program stops.

Process-global, as in the original, whose users register from any thread, in
nodes as well as in scripts that launch nothing.
"""

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOGGER = logging.getLogger(__name__)

StopHandler = Callable[..., Any]


class StopHandlers:
    """The registered handlers of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: list[StopHandler] = []
        #: Handlers of signals that ours replaced; only outside any program.
        self._replaced: dict[int, Any] = {}

    def add(self, handler: StopHandler, *, catch_signals: bool) -> None:
        """Registers a handler; it is called at most once.

        Args:
            handler: Called with (signal number, frame) or, if it takes none, without arguments.
            catch_signals: Also call it when a signal ends this process: for processes that are
                no node.
        """
        if not callable(handler):
            raise TypeError(f"a stop handler can be called; {handler!r} cannot")
        with self._lock:
            self._handlers.append(handler)
        if catch_signals and threading.current_thread() is threading.main_thread():
            self._catch_signals()

    def remove(self, handler: StopHandler) -> None:
        """Takes a registration back; unknown handlers are ignored."""
        with self._lock, contextlib.suppress(ValueError):
            self._handlers.remove(handler)
            if not self._handlers and threading.current_thread() is threading.main_thread():
                self._release_signals()

    def call_all(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Calls and forgets all handlers, the last registered first."""
        while True:
            with self._lock:
                if not self._handlers:
                    return
                handler = self._handlers.pop()
            try:
                _call(handler, signum, frame)
            except Exception:
                # The others, and the stop itself, must not suffer from one that fails.
                _LOGGER.exception("the stop handler %r failed", handler)

    def _catch_signals(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            current = signal.getsignal(signum)
            # Who has set handlers of their own wants those.
            if signum not in self._replaced and current in (
                signal.default_int_handler,
                signal.SIG_DFL,
            ):
                self._replaced[signum] = signal.signal(signum, self._on_signal)

    def _release_signals(self) -> None:
        for signum, previous in self._replaced.items():
            signal.signal(signum, previous)
        self._replaced.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.call_all(signum, frame)
        # And then what the signal does without us, so that the process can be interrupted.
        self._release_signals()
        signal.raise_signal(signum)


def _call(handler: StopHandler, signum: int, frame: FrameType | None) -> None:
    try:
        inspect.signature(handler).bind(signum, frame)
    except TypeError:
        handler()
    except ValueError:  # no signature to look at: the documented way
        handler(signum, frame)
    else:
        handler(signum, frame)


STOP_HANDLERS = StopHandlers()
