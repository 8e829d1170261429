"""Functions of users to call when the program stops; process-global, as in the original."""

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from courier.lowlevel import signature_of
from launchpad_lite.process.signal_waker import SIGNAL_WAKER

_LOGGER = logging.getLogger(__name__)

StopHandler = Callable[..., Any]


class StopHandlers:
    """The registered handlers of this process. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant, because a signal may call the handlers while its thread is in here.
        self._lock = threading.RLock()
        self._handlers: list[StopHandler] = []
        #: Handlers of signals that ours replaced; only outside any program.
        self._replaced: dict[int, Any] = {}

    def add(self, handler: StopHandler, *, catch_signals: bool) -> None:
        """Registers a handler, to be called once; `catch_signals`: in a process that is no node."""
        if not callable(handler):
            raise TypeError(f"a stop handler can be called; {handler!r} cannot")
        if inspect.iscoroutinefunction(handler):
            raise TypeError(
                f"a stop handler is called, not awaited; {handler!r} is async, so that nothing would "
                "happen. In async code, `await asyncio.to_thread(lp.wait_for_stop)` in a task"
            )
        with self._lock:
            self._handlers.append(handler)
        if catch_signals and threading.current_thread() is threading.main_thread():
            self._catch_signals()

    def remove(self, handler: StopHandler) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._handlers.remove(handler)
            if not self._handlers and threading.current_thread() is threading.main_thread():
                self._release_signals()

    def call_all(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Calls and forgets all handlers, the last registered first.

        Raises SystemExit after that if a handler raised it, as scripts do to leave.
        """
        leaving: SystemExit | None = None
        while (handler := self._take_last()) is not None:
            try:
                _call(handler, signum, frame)
            except SystemExit as error:
                leaving = error
            except Exception:
                # A failing handler must not affect the others and the stop.
                _LOGGER.exception("the stop handler %r failed", handler)
        if leaving is not None:
            raise leaving

    def _take_last(self) -> StopHandler | None:
        with self._lock:
            return self._handlers.pop() if self._handlers else None

    def _catch_signals(self) -> None:
        SIGNAL_WAKER.install()
        for signum in (signal.SIGINT, signal.SIGTERM):
            current = signal.getsignal(signum)
            # Keeps signal handlers that the user has set.
            if current in (signal.default_int_handler, signal.SIG_DFL):
                self._replaced[signum] = signal.signal(signum, self._on_signal)

    def _release_signals(self) -> None:
        for signum in list(self._replaced):
            # Code that has replaced our signal handler, as launch() does, still needs its own.
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, self._replaced.pop(signum))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.call_all(signum, frame)
        # Then the earlier handler runs, so that the process can be interrupted.
        self._release_signals()
        if signum in self._replaced:
            signal.signal(signum, self._replaced.pop(signum))
        signal.raise_signal(signum)


def _call(handler: StopHandler, signum: int, frame: FrameType | None) -> None:
    try:
        signature_of(handler).bind(signum, frame)
    except TypeError:
        handler()
    except ValueError:  # without a signature: the documented way
        handler(signum, frame)
    else:
        handler(signum, frame)


STOP_HANDLERS = StopHandlers()
