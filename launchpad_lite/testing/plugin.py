"""The pytest plug-in: the fixture `launch_program`, and the exit code of pytest."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launchpad_lite.testing.programs import ProgramLauncher


@pytest.fixture
def launch_program(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ProgramLauncher]":
    """Launches programs; stops them after the test and proves that nothing of them is left.

    Fails the test if something is left, or if a program failed and the test did not `wait` for it.
    """
    # Inside, so that test runs that do not use it import nothing.
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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets pytest exit with its code even if a thread of a node is stuck."""
    if (module := sys.modules.get("launchpad_lite._exit")) is not None:
        module.note_exit_code(int(session.exitstatus))
