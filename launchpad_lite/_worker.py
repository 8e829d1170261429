"""What every worker does, in whatever thread or process it runs."""

from typing import Protocol

from courier import ExceptionReport
from launchpad_lite._runtime import NodeRuntime
from launchpad_lite._script import importing
from launchpad_lite.nodes.base import Work


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
        return ExceptionReport.of(error, skip_frames=1)
    return None
