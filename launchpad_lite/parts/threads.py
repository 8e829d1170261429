"""Threads that run code of a node."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any


def start_thread(function: Callable[..., object], *args: Any, name: str = "") -> threading.Thread:
    """Starts a daemon with the context variables of its caller, which say in which node it is."""
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(function, *args), name=name or None, daemon=True)
    thread.start()
    return thread


def has_returned(function: Callable[[], object], timeout_s: float) -> bool:
    """Calls code of a user that may block, in such a thread; returns whether it returned in time.

    If the system gives no more threads, it is called here.
    """
    try:
        thread = start_thread(function)
    except RuntimeError:
        function()
        return True
    thread.join(timeout_s)
    return not thread.is_alive()
