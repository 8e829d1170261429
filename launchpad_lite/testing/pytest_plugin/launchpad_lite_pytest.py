"""The pytest plug-in: the fixture `launch_program`, the end of programs of the original, the exit code.

A module of its own, because pytest loads it in every test run, also of projects that do not use us and
may have folders `launchers` or `courier`. It imports our packages only where a test uses them.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launchpad_lite.testing.programs import ProgramLauncher

#: Only loaded if the test has launched a program of the original.
_ORIGINAL = "launchpad.launch.worker_manager"


@pytest.fixture
def launch_program(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ProgramLauncher]":
    """Launches programs; stops them after the test and checks that nothing of them is left.

    Fails the test if something is left, or if a program failed and the test did not `wait` for it.
    """
    from launchpad_lite.testing.leaks import take_inventory
    from launchpad_lite.testing.programs import ProgramLauncher

    log_dir = tmp_path_factory.mktemp("launch_program")
    launcher = ProgramLauncher(take_inventory(), log_dir)
    yield launcher
    failures, leftovers = launcher.close()
    for failure in failures:
        pytest.fail(f"the test did not ask how its program ended: {failure}", pytrace=False)
    if leftovers:
        pytest.fail(f"the test left something behind:\n{leftovers}", pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Shows the stacks of nodes when pytest-timeout ends a test."""
    outcome: Any = yield
    launcher = getattr(item, "funcargs", {}).get("launch_program")
    is_late = call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value)
    if launcher is not None and call.when == "call" and is_late:
        outcome.get_result().sections.append(("where the nodes are", launcher.places()))


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Ends programs of fixtures of several tests after the fixture, as with `setUpClass`."""
    managers: list[Any] = []
    if fixturedef.scope != "function":
        fixturedef.addfinalizer(lambda: managers and sys.modules[_ORIGINAL].end_tests(managers))
    yield
    if fixturedef.scope != "function" and (module := sys.modules.get(_ORIGINAL)) is not None:
        managers += module.take_tests()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Ends programs of test types that still run; what has failed in them fails the test."""
    if (module := sys.modules.get(_ORIGINAL)) is not None:
        module.end_tests()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets pytest exit with its code even if a thread of a node is stuck."""
    if (module := sys.modules.get("launchpad_lite.process.exit")) is not None:
        module.note_exit_code(int(session.exitstatus))
