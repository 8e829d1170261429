"""Tests an installation on this machine: `pytest --pyargs launchpad_lite`."""

from launchpad_lite.testing.contract import LauncherContract


class TestThreads(LauncherContract):
    """Nodes are threads."""

    launcher = "test_mt"


class TestProcesses(LauncherContract):
    """Nodes are processes."""

    launcher = "test_mp"
