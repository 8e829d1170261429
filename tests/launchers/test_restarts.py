"""Nodes that fail come back, as far as their policy allows."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of

QUICK = lp.RestartPolicy(backoff_s=0.01, max_restarts=50)


class Service:
    """Counts its calls, and fails in many ways."""

    def __init__(self, marks: str) -> None:
        self._calls = 0
        with Path(marks).open("a") as file:
            file.write(f"{lp.restart_count()}\n")

    def count(self) -> tuple[int, int]:
        self._calls += 1
        return self._calls, lp.restart_count()

    def kill_process(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(7)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Fails:
    """Fails when it runs, a number of times."""

    def __init__(self, times: int, error: str = "boom") -> None:
        self._times = times
        self._error = error

    def run(self) -> None:
        if lp.restart_count() < self._times:
            raise ValueError(self._error)


class Stuck:
    """Ends its process by a thread while its code is stuck, to start again."""

    def run(self) -> None:
        if lp.restart_count() < 4:
            threading.Timer(0, os._exit, [os.EX_TEMPFAIL]).start()
            time.sleep(1000)


def _service(marks: Path) -> lp.Program:
    return program_of(service=lp.CourierNode(Service, str(marks)))


def _restarts(result: lp.ProgramResult) -> list[tuple[str, int]]:
    return [(restart.node, restart.attempt) for restart in result.restarts]


@pytest.mark.parametrize("how", ["leave", pytest.param("kill_process", marks=pytest.mark.slow)])
def test_a_killed_node_comes_back_at_its_address_and_knows_that_it_did(
    launch_program: Any, tmp_path: Path, how: str
) -> None:
    running = launch_program(_service(tmp_path / "marks"), "test_mp", restart=QUICK)
    client = running.client("service")
    assert client.count() == (1, 0)
    waiting = [client.futures.wait(1000) for _ in range(5)]
    before = running.running.status()[0]
    for attempt in (1, 2, 3):
        with pytest.raises(courier.ServerLostError):
            getattr(client, how)()
        # The same client, which connects anew; the node's memory is gone, and no call of before
        # is run again.
        assert client.count() == (1, attempt)
    for future in waiting:
        with pytest.raises(courier.ServerLostError):
            future.result(60)
    after = running.running.status()[0]
    assert (after.name, after.endpoints) == (before.name, before.endpoints)
    assert (before.restarts, after.restarts) == (0, 3)
    assert after.pid != before.pid
    result = running.stop()
    assert (tmp_path / "marks").read_text().split() == ["0", "1", "2", "3"]
    assert _restarts(result) == [("service[0]", 1), ("service[0]", 2), ("service[0]", 3)]
    expected = "SIGKILL" if how == "kill_process" else "exit code 7"
    assert all(expected in restart.failure.summary for restart in result.restarts)
    assert result.outcome is lp.Outcome.STOPPED


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_node_that_ends_to_start_again_fails_only_if_it_is_not_restarted(
    launch_program: Any, is_restarted: bool
) -> None:
    program = program_of(stuck=lp.PyClassNode(Stuck))
    if is_restarted:
        policy = lp.RestartPolicy(backoff_s=0.01, max_restarts=1)
        assert len(launch_program(program, "test_mp", restart=policy).wait().restarts) == 4
        return
    with pytest.raises(lp.NodeFailedError, match=r"stuck\[0\].*exit code 75"):
        launch_program(program, "test_mp").wait()


def test_a_long_wait_for_a_restart_is_shown_and_a_stop_ends_it(
    launch_program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    program = program_of("waits", fails=lp.PyClassNode(Fails, 100))
    policy = lp.RestartPolicy(backoff_s=1000, max_backoff_s=1000, jitter=0)
    running = launch_program(program, "test_mp", restart=policy)
    poll_until(lambda: running.running.status()[0].state == "restarting", 30)
    result = running.stop(60)
    assert result.outcome is lp.Outcome.STOPPED
    assert len(result.restarts) == 1
    assert re.search(r"waits: fails\[0\] is restarted in (1000|999)\.\d s", caplog.text)
