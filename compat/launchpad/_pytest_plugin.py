"""The pytest plug-in: programs of test types, which nobody has stopped, end with their test or fixture."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

#: Who has launched nothing has not loaded it.
_MODULE = "launchpad.launch.worker_manager"


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Makes what a fixture of several tests launches end after that fixture, as with `setUpClass`."""
    managers: list[Any] = []
    if fixturedef.scope != "function":
        fixturedef.addfinalizer(lambda: managers and sys.modules[_MODULE].end_tests(managers))
    yield
    if fixturedef.scope != "function" and (module := sys.modules.get(_MODULE)) is not None:
        managers += module.take_tests()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Ends them; what has failed in them fails the test."""
    if (module := sys.modules.get(_MODULE)) is not None:
        module.end_tests()
