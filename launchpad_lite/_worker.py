"""What every worker does, in whatever thread or process it runs."""

from typing import Protocol

import courier
from courier import ExceptionReport
from launchpad_lite._runtime import NodeRuntime
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
        work.thaw()(runtime)
    except SystemExit as error:
        # A way to leave that programs use when they are asked to stop.
        if runtime.stop_event.is_set() or error.code in (None, 0):
            return None
        return ExceptionReport.of(error, skip_frames=1)
    except courier.CourierError as error:
        if runtime.stop_event.is_set():
            return None  # others stop too; calls to them fail now, which is no failure
        return ExceptionReport.of(error, skip_frames=1)
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it
        return ExceptionReport.of(error, skip_frames=1)
    return None
