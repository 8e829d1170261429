"""Code of a thread is ended by force: at any step, but not where it does something as a whole."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.process.forcing import ForcedExit, Forcing
from launchpad_lite.testing import poll_until


class Runner:
    """Runs code in a thread that can be forced out of it."""

    def __init__(self, code: Callable[["Runner"], None]) -> None:
        self.forcing = Forcing()
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.steps: list[str] = []
        self._code = code
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.forcing.run(lambda: self._code(self))
        except ForcedExit:
            self.steps.append("forced")

    def start(self) -> "Runner":
        """Returns when the code works."""
        self._thread.start()
        assert self.begun.wait(30)
        return self

    def end(self) -> list[str]:
        """Returns what the code did."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.steps

    def work(self, step: str) -> None:
        """Works until it may end."""
        self.begun.set()
        poll_until(self.may_end.is_set)
        self.steps.append(step)


def test_a_thread_is_forced_out_of_its_code() -> None:
    runner = Runner(lambda self: self.work("whole")).start()
    # From elsewhere nothing is held back.
    with runner.forcing.held_back():
        runner.forcing.force()
        assert runner.end() == ["forced"]


def test_what_is_done_as_a_whole_is_so_and_the_exit_comes_behind_it() -> None:
    def code(self: Runner) -> None:
        with self.forcing.held_back():
            self.work("whole")
        self.work("behind")

    runner = Runner(code).start()
    runner.forcing.force()
    runner.may_end.set()
    assert runner.end() == ["whole", "forced"]


def test_who_is_forced_out_cleans_up_undisturbed() -> None:
    def code(self: Runner) -> None:
        try:
            self.work("whole")
        finally:
            self.steps.append("cleans up")
            self.work("cleaned up")

    runner = Runner(code).start()
    runner.forcing.force()
    poll_until(lambda: runner.steps)
    for _ in range(20):
        runner.forcing.force()
    runner.may_end.set()
    assert runner.end() == ["cleans up", "cleaned up", "forced"]


def test_who_is_forced_before_the_code_begins_or_after_its_end_is_not_interrupted() -> None:
    forcing = Forcing()
    assert forcing.run(lambda: 1) == 1
    forcing.force()
    assert sum(1 for _ in range(1000)) == 1000
    forced = Forcing()
    forced.force()
    with pytest.raises(ForcedExit):
        forced.run(lambda: pytest.fail("it began"))


def test_an_error_of_what_is_done_as_a_whole_is_kept() -> None:
    forcing = Forcing()

    def code() -> None:
        with forcing.held_back():
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        forcing.run(code)


def test_a_node_that_is_forced_before_it_begins_ends_without_a_word(
    launch_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Forcing.run

    def begin_late(self: Forcing, code: Callable[[], Any]) -> Any:
        begins.set()
        assert forced.wait(30)
        return run(self, code)

    begins, forced = threading.Event(), threading.Event()
    monkeypatch.setattr(Forcing, "run", begin_late)
    program = lp.Program("late")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    running = launch_program(program, "test_mt").running
    assert begins.wait(30)
    force = Forcing.force

    def note(self: Forcing) -> None:
        force(self)
        forced.set()

    monkeypatch.setattr(Forcing, "force", note)
    running.kill()
    assert running.join(30)  # what a thread raises would fail this test
