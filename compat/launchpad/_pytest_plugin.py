"""The pytest plug-in: programs of test types, which no test has stopped, end with their test.

They never hide that tests have failed.
"""

import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Ends them; what has failed in them fails the test."""
    # Who has launched nothing has not loaded it.
    if (module := sys.modules.get("launchpad.launch.worker_manager")) is not None:
        module.end_tests()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets pytest exit with its code even if a thread of a node is stuck."""
    if (module := sys.modules.get("launchpad_lite._exit")) is not None:
        module.note_exit_code(int(session.exitstatus))
