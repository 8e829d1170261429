"""A hung node is found, its stack kept, and its policy decides what follows.

Which limits hold when is the state machine's, see `tests/launchpad_lite/test_life.py`. Here each
limit is shown once, in real time.
"""

import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from tests.launchers.running import program_of
from tests.launchers.timing import Timing

OFTEN = lp.RestartPolicy(max_restarts=50, backoff_s=0.01)
HEALTH = lp.Liveness(health_s=2.0)
#: Where one that a slow machine stops for a moment must not be taken for hung.
SLOW_HEARTBEAT = lp.Liveness(heartbeat_s=5.0)


class Stuck:
    """Goes on for a while, then is stuck, once; at later starts it ends.

    A slow machine may have it taken for hung before, or after, and started once more.
    """

    def __init__(self, how: str, mark: str) -> None:
        self._how = how
        self._mark = Path(mark)
        if how == "constructor" and not self._mark.exists():
            self.stuck_here()

    def stuck_here(self) -> None:
        self._mark.touch()
        if self._how == "gil":
            # Sleeps in C and keeps the lock that all Python code needs.
            ctypes.PyDLL(None).sleep(1000)
        elif self._how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(0.01)

    def run(self) -> None:
        for _ in range(5):
            lp.heartbeat()
            time.sleep(0.05)
        if not self._mark.exists():
            self.stuck_here()


def _program(how: str, folder: Path) -> lp.Program:
    return program_of(stuck=lp.CourierNode(Stuck, how, str(folder / "mark")))


@pytest.mark.parametrize(
    ("how", "limits", "summary"),
    [
        ("loop", lp.Liveness(heartbeat_s=0.5), "lp.heartbeat() for 0.5 s"),
        ("constructor", lp.Liveness(startup_s=0.5), "took longer than 0.5 s"),
    ],
)
def test_a_hung_node_is_restarted_and_its_stack_is_kept(
    launch_program: Any, tmp_path: Path, how: str, limits: lp.Liveness, summary: str
) -> None:
    # A thread that is not ended in this time is given up.
    timing = Timing(terminate_s=10.0, give_up_s=10.0)
    running = launch_program(_program(how, tmp_path), liveness=limits, restart=OFTEN, timing=timing)
    _check_restarts(running.wait(), summary)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gil", "stopped"])
def test_a_process_that_answers_no_health_check_is_restarted(
    launch_program: Any, tmp_path: Path, how: str
) -> None:
    running = launch_program(_program(how, tmp_path), "test_mp", liveness=HEALTH, restart=OFTEN)
    _check_restarts(running.wait(), "answered no health check for 2 s")


def _check_restarts(result: lp.ProgramResult, summary: str) -> None:
    assert result.outcome is lp.Outcome.COMPLETED
    failures = [restart.failure for restart in result.restarts]
    assert all(each is not None and summary in each.summary for each in failures), failures
    assert any(each is not None and "in stuck_here" in each.stacks for each in failures), failures


@pytest.mark.slow
def test_without_a_policy_a_hung_node_ends_the_program_with_its_stack(
    launch_program: Any, tmp_path: Path
) -> None:
    program = _program("loop", tmp_path)
    limits = {"stuck": SLOW_HEARTBEAT}
    running = launch_program(program, "test_mp", liveness=limits, log_dir=tmp_path / "run")
    with pytest.raises(lp.NodeFailedError, match=r"stuck\[0\].*hung: it did not call") as failed:
        running.wait()
    assert "stuck_here" in str(failed.value)
    assert "stuck_here" in (tmp_path / "run" / "stacks" / "stuck[0].txt").read_text()
    report = (tmp_path / "run" / "report.txt").read_text()
    assert re.search(r"by force:\n.*\nstuck\[0\]\.\w+ \w+ \(", report)


@pytest.mark.slow
def test_a_node_that_shows_its_life_is_left_alone(launch_program: Any) -> None:
    program = program_of(busy=lp.CourierNode(Busy), beats=lp.PyNode(beat))
    limits = {
        "busy": lp.Liveness(health_s=9.0),
        "beats": lp.Liveness(health_s=9.0, heartbeat_s=9.0),
    }
    running = launch_program(program, "test_mp", liveness=limits)
    client = running.client("busy")
    # All handlers are busy for longer than the limit, which is no reason to take it for hung.
    calls = [client.futures.work(6.0) for _ in range(32)]
    assert {call.result(60) for call in calls} == {"done"}
    assert running.running.result is None
    assert running.stop().restarts == ()


class Busy:
    def work(self, seconds: float) -> str:
        lp.stop_event().wait(seconds)
        return "done"


def beat() -> None:
    while not lp.wait_for_stop(0.1):
        lp.heartbeat()


@pytest.mark.slow
def test_a_thread_that_is_stuck_for_good_is_named_and_not_started_twice(
    launch_program: Any,
) -> None:
    release = threading.Event()
    program = lp.Program("thread")
    # Waits in C for longer than any test: no exception gets in.
    program.add_node(lp.PyNode(release.wait, 100), label="stuck")
    running = launch_program(
        program, "local_mt", liveness=SLOW_HEARTBEAT, restart=OFTEN, notice_s=0.5
    )
    try:
        with pytest.raises(lp.NodeFailedError, match="cannot be ended by force"):
            running.wait(30)
        assert running.running.result.restarts == ()
    finally:
        release.set()
