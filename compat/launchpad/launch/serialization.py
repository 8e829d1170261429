"""Checks that nodes can be pickled."""

import contextlib
from collections.abc import Sequence
from typing import Any

import launchpad_lite as lp
from launchpad_lite.launching import UnfreezableError, freeze
from launchpad_lite.nodes.base import PlanContext

__all__ = ["check_nodes_are_serializable", "check_program", "enable_lru_cache_pickling_once"]


def check_program(program: lp.Program) -> None:
    """Checks all nodes of a program. Mistakes of other kinds are left to the launch, which names them all."""
    for label, nodes in program.groups.items():
        with contextlib.suppress(ValueError):
            check_nodes_are_serializable(label, nodes)


def check_nodes_are_serializable(label: str, nodes: Sequence[lp.Node[Any]]) -> None:
    """Checks the nodes of a group; a RuntimeError tells what in one cannot be pickled."""
    for replica, node in enumerate(nodes):
        try:
            context = PlanContext("local_mp", label, replica, lp.Resources())
            for task in node.to_executables(context):
                freeze(task.work)
        except UnfreezableError as error:
            raise RuntimeError(
                f"The nodes associated to the label {label!r}: {label}[{replica}]: {error}. Or pass "
                "serialize_py_nodes=False to launch, if it only ever runs in threads"
            ) from error


def enable_lru_cache_pickling_once() -> None:
    """Does nothing: functions of `functools.lru_cache` can be pickled."""
