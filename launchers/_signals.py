"""Signals while a launch waits: the program does not run yet, so they are not for it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from launchpad_lite._launch import SIGNALS
from launchpad_lite._signal_waker import SIGNAL_WAKER


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and the end of the terminal raise SystemExit, unless the user handles them.

    What is launched elsewhere may be pending for hours, in which no other process would cancel it.
    Programs that were launched before, and run, are stopped as well.
    """

    def leave(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
        SIGNALS.stop(signum)
        raise SystemExit(128 + signum)

    before: dict[int, Any] = {}
    SIGNAL_WAKER.install()
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(signum)
            if handler == signal.SIG_DFL or SIGNALS.is_handler(handler):
                before[signum] = signal.signal(signum, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
