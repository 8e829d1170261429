"""Tests an installation: `pytest --pyargs launchpad_lite`.

The launchers that need nothing but this machine hold to the contract of launchers. It makes servers,
clients, threads and processes of nodes, restarts them, keeps their state, and looks for what they left.
"""

from launchpad_lite.testing.contract import LauncherContract


class TestThreads(LauncherContract):
    """Nodes are threads."""

    launcher = "test_mt"


class TestProcesses(LauncherContract):
    """Nodes are processes."""

    launcher = "test_mp"
