"""The launch context of a node."""

import contextvars
import enum
from collections.abc import Callable
from typing import Any


class LaunchType(str, enum.Enum):
    """How a program may be launched. Equal to its value, too.

    The last two exist so that modules that name them can be imported; launching with them raises an
    error that names the alternative.
    """

    LOCAL_MULTI_THREADING = "local_mt"
    LOCAL_MULTI_PROCESSING = "local_mp"
    TEST_MULTI_PROCESSING = "test_mp"
    TEST_MULTI_THREADING = "test_mt"
    LOCAL_DOCKER = "local_docker"
    VERTEX_AI = "vertex_ai"

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(each.value for each in cls)
        raise ValueError(f"{value!r} is not a valid LaunchType; known are {known}")


def is_local_launch(launch_type: LaunchType | str) -> bool:
    """Returns whether a launch type means this machine, tests aside."""
    return LaunchType(launch_type) in (
        LaunchType.LOCAL_MULTI_THREADING,
        LaunchType.LOCAL_MULTI_PROCESSING,
    )


def is_local_launch_or_test(launch_type: LaunchType | str) -> bool:
    """Returns whether a launch type means this machine."""
    return LaunchType(launch_type) not in (LaunchType.LOCAL_DOCKER, LaunchType.VERTEX_AI)


class LaunchContext:
    """How a node was launched, which `initialize` tells."""

    def initialize(
        self,
        launch_type: LaunchType,
        launch_config: Any,
        program_stopper: Callable[[], None] | None = None,
    ) -> None:
        """Fills it in."""
        #: `LOCAL_MULTI_PROCESSING` with launchers that the original lacks.
        self.launch_type = launch_type
        #: Always None: code in processes does not depend on how they were started.
        self.launch_config = launch_config
        #: Ends the program.
        self.program_stopper = program_stopper


_context: contextvars.ContextVar[LaunchContext | None] = contextvars.ContextVar(
    "launchpad_context", default=None
)


def get_context() -> LaunchContext:
    """Returns the context of the calling node, also in methods that others call."""
    context = _context.get()
    if context is None:  # an AssertionError as in the original
        raise AssertionError("no launch context here: get_context() is for nodes that run")
    return context


def set_context(context: LaunchContext) -> None:
    """Sets the context of the calling node."""
    _context.set(context)
