"""What nodes still hand in when the program stops, and what is told of those that could not."""

import queue
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp

LAUNCHERS = ["test_mt", "test_mp"]


class Learner:
    """Stops the program once it has got something, and returns."""

    def __init__(self) -> None:
        self._got: queue.Queue[str] = queue.Queue()

    def push(self, what: str) -> str:
        self._got.put(what)
        return what

    def run(self) -> None:
        self._got.get()
        lp.stop()


class Worker:
    """Works until the stop, and hands in what it has after the learner has returned."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def run(self) -> None:
        self._learner.push("the first one")
        lp.wait_for_stop()
        assert self._learner.push("the last one") == "the last one"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_whose_run_has_returned_answers_until_its_callers_have_ended(
    launch_program: Any, launcher: str
) -> None:
    program = lp.Program("last")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    program.add_node(lp.PyClassNode(Worker, learner), label="worker")
    result = launch_program(program, launcher, notice_s=60).wait()
    assert result.outcome is lp.Outcome.STOPPED
    assert (result.killed, result.cut_short) == ((), ())


class Loses:
    """Stops the program, and calls what nobody answers any more."""

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def run(self) -> None:
        lp.stop()
        lp.wait_for_stop()
        self._ended.push("lost")


class Gone:
    """Serves nothing: its server never starts."""

    def set_courier_server(self, server: object) -> None:
        """Does not start it."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_who_loses_its_work_in_the_stop_is_named_once(
    launch_program: Any, launcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = lp.Program("lost")
    gone = program.add_node(lp.CourierNode(Gone), label="gone")
    program.add_node(lp.PyClassNode(Loses, gone), label="worker")
    result = launch_program(program, launcher, notice_s=60).wait()
    assert (result.exit_code, result.failures) == (0, ())
    (lost,) = result.cut_short
    assert lost.node == "worker[0]"
    assert "ServerUnreachableError" in lost.summary
    assert caplog.text.count("a call of worker[0] failed while the program stopped") == 1


class Counts:
    """Notes in a file when it has been called 500 times."""

    def __init__(self, done: Path) -> None:
        self._done = done
        self._calls = 0

    def push(self, _: int) -> None:
        self._calls += 1
        if self._calls == 500:
            self._done.touch()

    def push_late(self) -> None:
        """Answers only when the program stops."""
        lp.wait_for_stop()


class SendsMany:
    """Sends calls, with a client that it drops, and reads no answer."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def run(self) -> None:
        for number in range(500):
            self._counts.futures.push(number)
        del self._counts


class SendsOne:
    """Sends a call that gets no answer in time."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def run(self) -> None:
        self._counts.futures.push_late()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_calls_of_unread_futures_run_before_their_node_ends(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("unread")
    # One thread, or two calls at a time could count as one.
    counts = program.add_node(lp.CourierNode(Counts, tmp_path / "all", serial=True), label="counts")
    program.add_node(lp.PyClassNode(SendsMany, counts), label="worker")
    assert launch_program(program, launcher, notice_s=60).wait().exit_code == 0
    assert (tmp_path / "all").exists()


def test_a_node_says_how_many_of_its_calls_got_no_answer(
    launch_program: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = lp.Program("unanswered")
    counts = program.add_node(lp.CourierNode(Counts, tmp_path / "all"), label="counts")
    program.add_node(lp.PyClassNode(SendsOne, counts), label="worker")
    assert launch_program(program, "test_mt", notice_s=1).wait().exit_code == 0
    assert "worker[0] ends, and 1 of its calls got no answer within 0.5 s" in caplog.text
    assert "counts[0]" in caplog.text
