"""`launch` for tests, on processes."""

from typing import Any

import launchpad_lite as lp
from launchpad.launch import launch as launching, worker_manager


def launch(
    program: lp.Program, test_case: Any, local_resources: Any = None
) -> worker_manager.WorkerManager:
    """Starts a program; see `launchpad.launch`."""
    return launching.launch(program, "test_mp", None, local_resources, test_case)
