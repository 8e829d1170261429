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
    """How a node was launched."""

    def __init__(self) -> None:
        self._known: tuple[LaunchType, Any, Callable[[], None] | None] | None = None

    def initialize(
        self,
        launch_type: LaunchType,
        launch_config: Any,
        program_stopper: Callable[[], None] | None = None,
    ) -> None:
        """Fills it in."""
        self._known = (launch_type, launch_config, program_stopper)

    @property
    def launch_type(self) -> LaunchType:
        """How it was launched; `LOCAL_MULTI_PROCESSING` with launchers that the original lacks."""
        return self._get()[0]

    @property
    def launch_config(self) -> Any:
        """Always None: code in processes does not depend on how they were started."""
        return self._get()[1]

    @property
    def program_stopper(self) -> Callable[[], None] | None:
        """Ends the program."""
        return self._get()[2]

    def _get(self) -> tuple[LaunchType, Any, Callable[[], None] | None]:
        if self._known is None:
            raise RuntimeError("this launch context is not initialized: nodes have one at launch")
        return self._known


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
