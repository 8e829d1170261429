"""Ctrl-C at a moment when grpc can bear it."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raises the KeyboardInterrupt of a Ctrl-C inside the block only at its end.

    grpc's own bookkeeping is Python code too: interrupted between the start of a call and the
    start of the thread that serves it, it leaves a call that nothing can end, and an interpreter
    that waits for it at exit. Does something in the main thread only, since the exception comes
    nowhere else, and only where nobody replaced Python's own handler.
    """
    if not _would_raise():
        yield
        return
    came = False

    def note(signum: int, frame: object) -> None:  # noqa: ARG001
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _would_raise() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
