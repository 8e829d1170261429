"""`launch` for tests, on threads."""

from typing import Any

import launchpad_lite as lp
from launchpad.context import LaunchType
from launchpad.launch import launch as launching, worker_manager


def launch(
    program: lp.Program, test_case: Any = None, *, serialize_py_nodes: bool | None = None
) -> worker_manager.WorkerManager:
    """Starts a program; see `launchpad.launch`."""
    kind, picky = LaunchType.TEST_MULTI_THREADING, serialize_py_nodes
    return launching.launch(program, kind, test_case=test_case, serialize_py_nodes=picky)
