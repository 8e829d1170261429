"""Each built-in launcher holds to the contract that plug-in writers test against."""

from launchpad_lite.testing import LauncherContract


class TestThreads(LauncherContract):
    launcher = "local_mt"


class TestThreadsWithCopies(LauncherContract):
    launcher = "test_mt"


class TestProcesses(LauncherContract):
    launcher = "local_mp"


class TestQuietProcesses(LauncherContract):
    launcher = "test_mp"
