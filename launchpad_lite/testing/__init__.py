"""For tests of programs, and of launchers.

The package installs the pytest fixture `launch_program`:

    def test_my_program(launch_program):
        running = launch_program(make_program(), launcher="test_mp")
        learner = running.client("learner")
        assert learner.step() == 1

At the end of the test it stops the program and fails the test if any thread,
process, port or file of it is left. `Monkey` injects faults, to show that a
program survives them. `LauncherContract` has the tests that every launcher must pass.
"""

from launchpad_lite.testing.contract import LauncherContract
from launchpad_lite.testing.leaks import Leftovers, take_inventory
from launchpad_lite.testing.monkey import Fault, Injected, Monkey
from launchpad_lite.testing.programs import LaunchedProgram, poll_until

__all__ = [
    "Fault",
    "Injected",
    "LaunchedProgram",
    "LauncherContract",
    "Leftovers",
    "Monkey",
    "poll_until",
    "take_inventory",
]
