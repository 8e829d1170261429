"""What tests ask of programs that run."""

import shlex
from typing import Any

from launchers.hosts.arrival import host_command
from launchpad_lite.testing import poll_until


def shell_command(pythons: list[str]) -> str:
    """Returns what a host is to run, for a shell there, as SSH has it."""
    return f"exec {shlex.join(host_command(pythons))}"


def states(running: Any) -> set[str]:
    """Returns the states that its nodes are in."""
    return {each.state for each in running.running.status()}


def wait_until_up(running: Any) -> None:
    """Waits until each node runs or serves."""
    poll_until(lambda: states(running) <= {"running", "serving"})


def first_pid(running: Any) -> int:
    """Returns the process of the first node, which may be known later than its state."""
    return int(poll_until(lambda: running.running.status()[0].pid))
