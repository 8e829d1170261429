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
