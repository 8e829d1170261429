"""Spellings of the original Launchpad that its programs rely on, and only those."""

import enum
from typing import Any


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
