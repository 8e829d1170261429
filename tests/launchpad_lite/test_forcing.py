import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite._forcing import ForcedExit, Forcing
from launchpad_lite.testing.programs import poll_until


class Runner:
    """Runs code in a thread that can be forced out of it."""

    def __init__(self, code: Callable[["Runner"], None]) -> None:
        self.forcing = Forcing()
        self.begun = threading.Event()
        self.steps: list[str] = []
        self._code = code
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.forcing.run(lambda: self._code(self))
        except ForcedExit:
            self.steps.append("forced")

    def start(self) -> None:
        self._thread.start()

    def end(self) -> list[str]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.steps

    def work(self, step: str, seconds: float = 30.0) -> None:
        """Takes its time, in small steps."""
        self.begun.set()
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            time.sleep(0.01)
        self.steps.append(step)


def test_a_thread_is_forced_out_of_its_code() -> None:
    runner = Runner(lambda self: self.work("whole"))
    runner.start()
    runner.begun.wait(30)
    runner.forcing.force()
    assert runner.end() == ["forced"]


def test_a_thread_that_is_forced_before_it_begins_does_not() -> None:
    runner = Runner(lambda self: self.work("whole", 0.0))
    runner.forcing.force()
    runner.start()
    assert runner.end() == ["forced"]


def test_what_is_done_as_a_whole_is_so_and_the_exit_comes_behind_it() -> None:
    def code(self: Runner) -> None:
        with self.forcing.held_back():
            self.work("whole", 0.5)
        self.work("behind")

    runner = Runner(code)
    runner.start()
    runner.begun.wait(30)
    runner.forcing.force()
    assert runner.end() == ["whole", "forced"]


def test_who_is_forced_out_cleans_up_undisturbed() -> None:
    def code(self: Runner) -> None:
        try:
            self.work("whole")
        finally:
            self.steps.append("cleans up")
            self.work("cleaned up", 0.5)

    runner = Runner(code)
    runner.start()
    runner.begun.wait(30)
    runner.forcing.force()
    poll_until(lambda: runner.steps)
    for _ in range(20):
        runner.forcing.force()
        time.sleep(0.01)
    assert runner.end() == ["cleans up", "cleaned up", "forced"]


def test_code_that_has_ended_is_not_forced_out_of_what_follows() -> None:
    forcing = Forcing()
    assert forcing.run(lambda: 1) == 1
    forcing.force()
    time.sleep(0.05)


def test_elsewhere_nothing_is_held_back() -> None:
    runner = Runner(lambda self: self.work("whole"))
    runner.start()
    runner.begun.wait(30)
    with runner.forcing.held_back():
        runner.forcing.force()
        assert runner.end() == ["forced"]


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
