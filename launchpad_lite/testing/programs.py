"""Running programs in tests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import courier
from launchpad_lite.errors import LaunchError
from launchpad_lite.graph.program import Program
from launchpad_lite.launching import Launcher, Outcome, ProgramResult, RunningProgram
from launchpad_lite.launching.launch import launch
from launchpad_lite.life.result import indented
from launchpad_lite.testing.leaks import Inventory, Leftovers

R = TypeVar("R")

#: The notice for nodes in tests: a long one only delays tests with nodes that ignore the stop.
_NOTICE_S = 2.0
_SETTLE_S = 10.0  # seconds after the end in which leftovers may disappear
#: A thread of a node that was left behind counts as stuck if it stays at one place for so long.
_STILL_S = 0.7
_THREADS = ("local_mt", "test_mt")
_POLL_S = 0.01


class LaunchedProgram:
    """A running program of a test; forwards to its `RunningProgram`.

    Example:
        def test_counts(launch_program):
            launched = launch_program(program, "test_mt")
            assert launched.wait().outcome is lp.Outcome.COMPLETED
    """

    def __init__(self, program: Program, running: RunningProgram) -> None:
        self.program = program
        self.running = running
        self._clients: list[object] = []

    def client(self, label: str, replica: int = 0) -> Any:
        """Returns a client of a node.

        Args:
            label: Its group.
            replica: Its index in the group.

        Raises:
            LookupError: There is no such node.
        """
        try:
            node = self.program.groups[label][replica]
        except (KeyError, IndexError):
            known = ", ".join(each.name for each in self.running.plan.executables)
            raise LookupError(f"no node {label}[{replica}]; there are: {known}") from None
        client = node.create_handle().dereference()
        self._clients.append(client)
        return client

    def wait(self, timeout_s: float = 60.0) -> ProgramResult:
        """Waits for the end. Raises as `RunningProgram.wait`; a TimeoutError shows where nodes are."""
        try:
            return self.running.wait(timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}{self.places()}") from None

    def stop(self, timeout_s: float = 60.0) -> ProgramResult:
        """Stops the program. Raises as `wait`."""
        self.running.request_stop("stop() was called")
        return self.wait(timeout_s)

    def places(self) -> str:
        """Returns who waits for whom, and where the threads of the nodes are, as text."""
        try:
            why, stacks = self.running.why(), self.running.stacks()
        except LaunchError as error:
            return f"; {error}"
        return f"\n\n{why}" + "".join(
            f"\n\n{node}:\n\n{indented(text)}" for node, text in stacks.items()
        )

    def close(self) -> str:
        """Stops a running program; returns a failure that the test does not know, or ""."""
        is_known = self.running.collected
        for client in self._clients:
            if isinstance(client, courier.Client):
                courier.close(client)
        self.running.request_stop("the end of the test")
        self.running.collected = True
        if not self.running.join(30.0):
            self.running.kill()
            self.running.join(10.0)
        result = self.running.result
        has_failed = result is not None and result.outcome is Outcome.FAILED
        return str(self.running.failure()) if has_failed and not is_known else ""


class ProgramLauncher:
    """The type of the fixture `launch_program`: call it to launch a program."""

    def __init__(self, inventory: Inventory, log_dir: Path) -> None:
        self._inventory = inventory
        self._log_dir = log_dir
        self._launched: list[LaunchedProgram] = []

    def __call__(
        self, program: Program, launcher: str | Launcher = "test_mt", **options: Any
    ) -> LaunchedProgram:
        """Launches a program, to be stopped when the test ends.

        Args:
            program: The program.
            launcher: `test_mt` for threads, `test_mp` for processes, or any other.
            **options: As for `lp.launch`; nodes have 2 s notice, and their output goes to a folder
            of the test, by default.
        """
        options.setdefault("notice_s", _NOTICE_S)
        options.setdefault("log_dir", self._log_dir / f"{program.name}-{len(self._launched)}")
        running = launch(program, launcher, **options)
        launched = LaunchedProgram(program, running)
        self._launched.append(launched)
        return launched

    def places(self) -> str:
        """Returns where the threads of the nodes of all programs are, as text."""
        return "".join(launched.places() for launched in self._launched).strip()

    def close(self) -> tuple[list[str], Leftovers]:
        """Stops all programs; returns failures that the test does not know, and leftovers."""
        for launched in self._launched:  # so that the notices of several run at the same time
            launched.running.request_stop("the end of the test")
        failures = [text for launched in self._launched if (text := launched.close())]
        programs = [each.running for each in self._launched]
        threads = [each for each in programs if each.plan.launcher in _THREADS]
        is_hung = any(each.result is not None and each.result.killed for each in threads)
        before, began_at = None, time.monotonic()
        while left := self._inventory.leftovers():
            now = time.monotonic()
            if left != before:
                before, moved_at = left, now
            if now > began_at + _SETTLE_S or (is_hung and now > moved_at + _STILL_S):
                break
            time.sleep(_POLL_S)
        return failures, left


def call_until_answered(method: Callable[[], R]) -> R:
    """Calls a method of a restarting node, and repeats the call while it is lost."""
    while True:
        try:
            return method()
        except courier.ServerLostError:
            continue


def poll_until(condition: Callable[[], R], timeout_s: float = 30.0, *, must: bool = True) -> R:
    """Waits until a condition holds and returns its value.

    Args:
        condition: Asked every 10 ms.
        timeout_s: Seconds to wait.
        must: Raise if it never holds; otherwise return its last value.

    Raises:
        TimeoutError: It did not hold in time.

    Example:
        poll_until(lambda: client.count() > 10, timeout_s=30)
    """
    give_up_at = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > give_up_at:
            if must:
                raise TimeoutError(f"the condition did not hold within {timeout_s} s")
            break
        time.sleep(_POLL_S)
    return value
