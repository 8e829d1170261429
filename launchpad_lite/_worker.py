"""What every worker does, in whatever thread or process it runs."""

import contextvars
import threading
from collections.abc import Callable
from typing import Protocol

from courier import ExceptionReport
from launchpad_lite._runtime import NodeRuntime
from launchpad_lite._script import importing
from launchpad_lite.nodes.base import Work

#: Seconds that code of an exception has to tell what it is, and to be pickled.
_TELLING_S = 2.0
#: Larger exceptions are only reported: the launcher has to hold them, and may print them.
_OBJECT_BYTES = 1 << 20


class Thawable(Protocol):
    """Gives the work of a node once its addresses are known; `FrozenWork` does."""

    def thaw(self) -> Work:
        """Returns the work."""


def run_node(work: Thawable, runtime: NodeRuntime) -> ExceptionReport | None:
    """Runs a node to its end, in this thread.

    Returns:
        How it failed; None if it did not.
    """
    with runtime.active():
        return run_work(work, runtime)


def run_work(work: Thawable, runtime: NodeRuntime) -> ExceptionReport | None:
    """Does what a node does, where its runtime is active already.

    Returns:
        How it failed; None if it did not.
    """
    if runtime.stop_event.is_set():
        return None  # asked to end before it began
    try:
        with importing(runtime.name):
            task = work.thaw()
        task(runtime)
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it
        if runtime.leaves_in_order(error):
            runtime.note_cut_short(error)
            return None
        return report_on(error, runtime.tell_failing)
    return None


def report_on(error: BaseException, tell: Callable[[ExceptionReport], object]) -> ExceptionReport:
    """Describes the exception that ends a node, though its code may block, or end the process.

    Args:
        error: Caught by the caller, whose own frame is left out.
        tell: Called before such code runs, with all that is known so far.
    """
    known = [ExceptionReport.bare(error, skip_frames=1)]
    tell(known[0])

    def look() -> None:
        known.append(ExceptionReport.text_of(error, skip_frames=1))
        tell(known[-1])
        known.append(known[-1].with_object(error, _OBJECT_BYTES))

    looker = threading.Thread(target=contextvars.copy_context().run, args=(look,), daemon=True)
    try:
        looker.start()
        looker.join(_TELLING_S)
    except RuntimeError:  # the system gives no more threads
        look()
    return known[-1]
