"""Calls to nodes that may be starting again, or do not answer."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import courier
import launchpad_lite as lp

T = TypeVar("T")

#: Seconds until a node that is gone is called again; and that one may take to answer a small call.
RETRY_S = 0.1
SILENT_S = 20.0
#: Seconds that a wait takes until it is told, and until it is told again.
_LATE_S = 10.0

_LOGGER = logging.getLogger(__name__)


def call_patiently(
    method: Callable[..., T], *args: Any, stop: threading.Event | None = None
) -> T | None:
    """Calls a method until its node answers; returns None if this node is to stop before.

    A node that does not answer in the time of its client is named in a warning. `stop` is another
    event that ends the wait.
    """
    stop = stop or lp.stop_event()
    while True:
        try:
            return method(*args)
        except courier.ServerGoneError:
            if stop.wait(RETRY_S):
                return None
        except courier.CallTimeoutError as error:
            _LOGGER.warning("%s; it is called again", error)
            if stop.is_set():
                return None


class Lateness:
    """Tells from time to time for what something waits, which begins now."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._began_at = self._said_at = time.monotonic()

    def waited_s(self) -> float:
        return time.monotonic() - self._began_at

    def warn(self, text: str) -> None:
        if time.monotonic() - self._said_at >= _LATE_S:
            self._said_at = time.monotonic()
            self._logger.warning("%s", text)
