"""Spellings of the original Launchpad that its programs rely on, and only those."""

import enum
from collections.abc import Callable
from typing import Any

from courier import Server


class LaunchType(enum.Enum):
    """Names of launchers, as the original spells them."""

    LOCAL_MULTI_THREADING = "local_mt"
    LOCAL_MULTI_PROCESSING = "local_mp"
    TEST_MULTI_THREADING = "test_mt"
    TEST_MULTI_PROCESSING = "test_mp"


def one_of(name: str, value: Any, original_name: str, original: Any) -> Any:
    """Returns an argument that has a name of the original's, too; None if it is not given.

    Raises:
        TypeError: It is given under both names.
    """
    if value is not None and original is not None:
        raise TypeError(f"{original_name} is the original's name of {name}; give one of them")
    return original if value is None else value


def seconds_of(milliseconds: float | None) -> float | None:
    """Converts a time as the original gives it."""
    return None if milliseconds is None else milliseconds / 1000


def is_local_launch(launch_type: LaunchType | str) -> bool:
    """Returns whether a launch type means this machine, tests aside.

    Example:
        assert lp.is_local_launch("local_mp") and not lp.is_local_launch("test_mp")
    """
    return LaunchType(launch_type) in (
        LaunchType.LOCAL_MULTI_THREADING,
        LaunchType.LOCAL_MULTI_PROCESSING,
    )


def is_local_launch_or_test(launch_type: LaunchType | str) -> bool:
    """Returns whether a launch type means this machine.

    Example:
        assert lp.is_local_launch_or_test("test_mp")
    """
    return LaunchType(launch_type) in LaunchType


class LaunchpadServer:
    """A `courier.Server` under the method names of the original.

    Given to `set_courier_server`, whose objects start and stop it themselves.
    """

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def address(self) -> str:
        """`host:port`."""
        return self.server.address

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server.port

    @property
    def has_started(self) -> bool:
        """Whether it serves now."""
        return self.server.has_started

    def Bind(self, name: str, method: Callable[..., Any]) -> None:  # noqa: N802
        """As `courier.Server.bind`."""
        self.server.bind(name, method)

    def Unbind(self, name: str) -> None:  # noqa: N802
        """As `courier.Server.unbind`."""
        self.server.unbind(name)

    def Start(self) -> None:  # noqa: N802
        """As `courier.Server.start`."""
        self.server.start()

    def Stop(self) -> None:  # noqa: N802
        """As `courier.Server.stop`."""
        self.server.stop()

    def Join(self) -> None:  # noqa: N802
        """As `courier.Server.join`."""
        self.server.join()

    def SetIsHealthy(self, healthy: bool) -> None:  # noqa: N802
        """As `courier.Server.set_healthy`."""
        self.server.set_healthy(healthy)

    start, stop, join, bind, unbind = Start, Stop, Join, Bind, Unbind
