"""Each built-in launcher holds to the contract that plug-in writers test against."""

from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import LauncherContract


class _Contract(LauncherContract):
    """The contract; what waits for real limits is slow."""

    @pytest.mark.slow
    def test_a_node_that_is_stuck_is_found_and_comes_back(self, launch: Any) -> None:
        super().test_a_node_that_is_stuck_is_found_and_comes_back(launch)

    @pytest.mark.slow
    def test_a_stubborn_node_is_ended_after_the_notice(self, launch: Any) -> None:
        super().test_a_stubborn_node_is_ended_after_the_notice(launch)


class TestThreads(_Contract):
    launcher = "local_mt"


class TestThreadsWithCopies(_Contract):
    launcher = "test_mt"


class TestQuietProcesses(_Contract):
    launcher = "test_mp"

    @pytest.mark.slow
    def test_state_survives_restarts_and_launches(self, launch: Any, tmp_path: Path) -> None:
        super().test_state_survives_restarts_and_launches(launch, tmp_path)


@pytest.mark.slow
class TestProcesses(_Contract):
    launcher = "local_mp"
