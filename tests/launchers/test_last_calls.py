"""What nodes still hand in when the program stops, and what is told of those that could not."""

from typing import Any

import pytest

import launchpad_lite as lp

LAUNCHERS = ["test_mt", "test_mp"]


class Learner:
    """Stops the program and returns."""

    def __init__(self) -> None:
        self._got: list[str] = []

    def push(self, what: str) -> int:
        self._got.append(what)
        return len(self._got)

    def run(self) -> None:
        lp.stop()


class Worker:
    """Works until the stop, and hands in what it has after the learner has returned."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def run(self) -> None:
        lp.wait_for_stop()
        assert self._learner.push("the last one") == 1


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
    """Calls what nobody answers any more."""

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def run(self) -> None:
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
    program.add_node(lp.PyNode(lp.stop), label="stops")
    result = launch_program(program, launcher, notice_s=60).wait()
    assert (result.exit_code, result.failures) == (0, ())
    (lost,) = result.cut_short
    assert lost.node == "worker[0]"
    assert "ServerUnreachableError" in lost.summary
    assert caplog.text.count("a call of worker[0] failed while the program stopped") == 1
