"""A hung node is found, its stack kept, and its policy decides what follows."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until

LAUNCHERS = ["test_mt", "test_mp"]
ONCE = lp.RestartPolicy(max_restarts=5, backoff_s=0.01)
HEALTH = lp.Liveness(health_s=2.0)
HEARTBEAT = lp.Liveness(heartbeat_s=1.0)


class Stuck:
    """Goes on for a while at its first start, then is stuck; later it ends."""

    def __init__(self, how: str) -> None:
        self._how = how
        if how == "constructor" and lp.restart_count() == 0:
            self.stuck_here()

    def stuck_here(self) -> None:
        if self._how == "gil":
            # Sleeps in C and keeps the lock that all Python code needs.
            ctypes.PyDLL(None).sleep(1000)
        elif self._how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(0.01)

    def run(self) -> None:
        for _ in range(20):
            lp.heartbeat()
            time.sleep(0.05)
        if lp.restart_count() == 0:
            self.stuck_here()


def _program(how: str, label: str = "stuck") -> lp.Program:
    program = lp.Program("hung")
    program.add_node(lp.CourierNode(Stuck, how), label=label)
    return program


@pytest.mark.parametrize("how", ["gil", "stopped"])
@pytest.mark.slow
def test_a_process_that_answers_no_health_check_is_restarted(launch_program: Any, how: str) -> None:
    running = launch_program(_program(how), "test_mp", liveness=HEALTH, restart=ONCE)
    result = running.wait()
    assert result.outcome is lp.Outcome.COMPLETED
    (restart,) = result.restarts
    assert "answered no health check for 2 s" in restart.failure.summary
    assert "stuck_here" in restart.failure.stacks


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_without_a_heartbeat_is_restarted(launch_program: Any, launcher: str) -> None:
    running = launch_program(_program("loop"), launcher, liveness=HEARTBEAT, restart=ONCE)
    result = running.wait()
    assert result.outcome is lp.Outcome.COMPLETED
    (restart,) = result.restarts
    assert "lp.heartbeat() for 1 s" in restart.failure.summary
    assert "stuck_here" in restart.failure.stacks


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_constructor_that_takes_too_long_is_found(launch_program: Any, launcher: str) -> None:
    limits = lp.Liveness(startup_s=2.0)
    running = launch_program(_program("constructor"), launcher, liveness=limits, restart=ONCE)
    result = running.wait()
    (restart,) = result.restarts
    assert "constructor took longer than 2 s" in restart.failure.summary


def test_without_a_policy_a_hung_node_ends_the_program_with_its_stack(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(
        _program("loop"), "test_mp", liveness={"stuck": HEARTBEAT}, log_dir=tmp_path / "run"
    )
    with pytest.raises(lp.NodeFailedError, match=r"stuck\[0\].*hung: it did not call") as failed:
        running.wait()
    assert "stuck_here" in str(failed.value)
    assert "stuck_here" in (tmp_path / "run" / "stacks" / "stuck[0].txt").read_text()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.slow
def test_a_node_that_shows_its_life_is_left_alone(launch_program: Any, launcher: str) -> None:
    program = lp.Program("alive")
    program.add_node(lp.CourierNode(Busy), label="busy")
    program.add_node(lp.PyNode(beat), label="beats")
    limits = {
        "busy": lp.Liveness(health_s=4.0),
        "beats": lp.Liveness(health_s=4.0, heartbeat_s=4.0),
    }
    running = launch_program(program, launcher, liveness=limits)
    client = running.client("busy")
    # All handlers are busy for longer than the limit, which is no reason to take it for hung.
    calls = [client.futures.work(3.0) for _ in range(32)]
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


def test_a_thread_that_is_stuck_for_good_is_named_and_not_started_twice(
    launch_program: Any,
) -> None:
    release = threading.Event()
    program = lp.Program("thread")
    program.add_node(lp.PyNode(_wait_deaf, release), label="stuck")
    running = launch_program(program, "local_mt", liveness=HEARTBEAT, restart=ONCE, notice_s=0.5)
    try:
        with pytest.raises(lp.NodeFailedError, match="cannot be ended by force"):
            running.wait(30)
        assert running.running.result.restarts == ()
    finally:
        release.set()


def _wait_deaf(release: threading.Event) -> None:
    # Waits in C for longer than any test: no exception gets in.
    release.wait(100)


def test_limits_hold_again_after_a_restart(launch_program: Any) -> None:
    program = lp.Program("again")
    program.add_node(lp.PyNode(_stuck_twice), label="stuck")
    running = launch_program(program, "test_mp", liveness=HEARTBEAT, restart=ONCE)
    assert [restart.attempt for restart in running.wait().restarts] == [1, 2]


def _stuck_twice() -> None:
    if lp.restart_count() < 2:
        poll_until(lambda: False, 1000)
