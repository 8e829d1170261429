"""Messages of threads of nodes that end with an error while the program stops."""

import sys
import threading
from collections.abc import Callable

import courier
from launchpad_lite.life.result import CONSEQUENCES


def tell_shortly(is_stopping: Callable[[], bool]) -> None:
    """Shortens messages of threads that a cancelled call has ended at the stop to one line."""
    if getattr(threading.excepthook, "is_ours", False):
        return
    before = threading.excepthook

    def tell(failure: threading.ExceptHookArgs) -> None:
        kind = failure.exc_type
        cancelled = issubclass(kind, courier.CallCancelledError)
        if not cancelled and not (issubclass(kind, CONSEQUENCES) and is_stopping()):
            before(failure)
            return
        name = "a thread" if failure.thread is None else failure.thread.name
        text = f"{name} has ended: {kind.__name__}: {failure.exc_value}"
        print(text, file=sys.stderr)  # noqa: T201 - as Python does

    tell.is_ours = True  # type: ignore[attr-defined]
    threading.excepthook = tell
