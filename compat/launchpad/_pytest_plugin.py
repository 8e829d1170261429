"""The pytest plug-in: programs of test types, which no test has stopped, end with their test."""

import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Ends them; what has failed in them fails the test."""
    # Who has launched nothing has not loaded it.
    if (module := sys.modules.get("launchpad.launch.worker_manager")) is not None:
        module.end_tests()
