"""Calls to nodes that may be starting again."""

import threading
from collections.abc import Callable
from typing import TypeVar

import courier
import launchpad_lite as lp

T = TypeVar("T")

#: Seconds until a node that did not answer is called again.
_RETRY_S = 0.1


def call_patiently(
    method: Callable[..., T], *args: object, stop: threading.Event | None = None
) -> T | None:
    """Calls a method until its node answers; returns None if this node is to stop before.

    Args:
        method: Of a client; it may run twice.
        *args: For it.
        stop: Another event that ends the wait.
    """
    stop = stop or lp.stop_event()
    while True:
        try:
            return method(*args)
        except courier.ServerGoneError:
            if stop.wait(_RETRY_S):
                return None
