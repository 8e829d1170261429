"""Handles signals while a launch waits, because the program that would handle them does not run yet."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from launchpad_lite.launching.launch import SIGNALS
from launchpad_lite.process.signal_waker import SIGNAL_WAKER


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and the end of the terminal raise SystemExit, unless the user handles them.

    A launch in a job or a cluster may be pending for hours, and no other process would cancel it. Programs
    that this process launched before are stopped as well.
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
