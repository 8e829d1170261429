"""The work of every worker, in threads and processes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from courier import ExceptionReport
from launchpad_lite.life.events import Failing
from launchpad_lite.parts.threads import has_returned
from launchpad_lite.process.script import importing
from launchpad_lite.worker.runtime import NodeRuntime

if TYPE_CHECKING:
    from launchpad_lite.nodes.base import Work

_TELLING_S = 2.0  # seconds that code of an exception has to describe and pickle it
#: Larger exceptions are only described, because the launcher keeps them, and may print them.
_OBJECT_BYTES = 1 << 20


def run_node(thaw: "Callable[[], Work]", runtime: NodeRuntime) -> str:
    """Runs a node in this thread, where its runtime is active; returns the trace of a failure."""
    if runtime.stop_event.is_set():
        return ""  # asked to end before it began
    try:
        with importing(runtime.name):
            work = thaw()
        work(runtime)
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it
        if runtime.leaves_in_order(error):
            runtime.note_cut_short(error)
            return ""
        report = report_on(error, lambda known: runtime.say(Failing, runtime.setup.failure(known)))
        runtime.note_failed(report)
        return report.traceback
    return ""


def report_on(error: BaseException, tell: Callable[[ExceptionReport], object]) -> ExceptionReport:
    """Describes the exception that ends a node, whose code may block, or end the process.

    `tell` gets what is known before such code runs. The caller's frame is left out.
    """
    known = [ExceptionReport.bare(error, skip_frames=1)]
    tell(known[0])

    def look() -> None:
        known.append(ExceptionReport.text_of(error, skip_frames=1))
        tell(known[-1])
        known.append(known[-1].with_object(error, _OBJECT_BYTES))

    has_returned(look, _TELLING_S)
    return known[-1]
