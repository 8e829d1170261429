"""Programs of tests, and what is asked of them when they run."""

import shlex
from typing import Any

import launchpad_lite as lp
from launchers.hosts.arrival import host_command
from launchpad_lite.testing import poll_until


def program_of(name: str = "program", /, **nodes: lp.Node[Any]) -> lp.Program:
    """Returns a program with one node in each group."""
    program = lp.Program(name)
    for label, node in nodes.items():
        program.add_node(node, label=label)
    return program


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
