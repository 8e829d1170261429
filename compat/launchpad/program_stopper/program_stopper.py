"""`make_program_stopper`, at the original's path."""

from collections.abc import Callable

import launchpad_lite as lp
from launchpad.context import LaunchType
from launchpad.launch import worker_manager


def make_program_stopper(launch_type: LaunchType | str) -> Callable[..., None]:
    """Returns a function that ends the program: in its nodes, and in the process that launched it."""
    LaunchType(launch_type)
    return _stop


def _stop(mark_as_completed: bool = False) -> None:  # noqa: ARG001 - the original's; a stop is a stop
    try:
        lp.stop()
    except lp.NoProgramError:
        worker_manager.stop_all("a program stopper was called")
