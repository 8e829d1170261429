"""From the start of a program to its end."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of
from tests.launchers.timing import Timing


class Server:
    def ping(self, value: int = 1) -> int:
        return value

    def unpicklable(self) -> Any:
        return threading.Lock()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _waiting(name: str = "waiting") -> lp.Program:
    program = lp.Program(name)
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    return program


def test_wait_gives_up_and_the_program_goes_on(launch_program: Any) -> None:
    running = launch_program(_waiting())
    with pytest.raises(TimeoutError, match="still runs"):
        running.wait(0.2)
    assert running.running.result is None
    first = running.stop()
    assert running.stop() == first  # again, after the end
    assert first.outcome is lp.Outcome.STOPPED


def test_a_block_stops_its_program_and_lets_an_error_pass() -> None:
    with lp.launch(_waiting(), "test_mt") as running:
        pass
    assert running.result is not None
    assert running.result.outcome is lp.Outcome.STOPPED
    with pytest.raises(KeyError, match="mine"), lp.launch(_waiting(), "test_mp") as running:
        raise KeyError("mine")
    assert running.result is not None


def test_several_programs_run_side_by_side(launch_program: Any) -> None:
    all_running = []
    for launcher in ("test_mt", "test_mt", "test_mp"):
        program = lp.Program(f"side{len(all_running)}")
        program.add_node(lp.CourierNode(Server), label="server")
        all_running.append(launch_program(program, launcher))
    assert [each.client("server").ping(i) for i, each in enumerate(all_running)] == [0, 1, 2]
    all_running[1].stop()
    assert all_running[0].client("server").ping(5) == 5
    assert all_running[2].client("server").ping(6) == 6


def test_a_result_that_cannot_be_pickled_harms_the_call_only(launch_program: Any) -> None:
    running = launch_program(program_of("unpicklable", server=lp.CourierNode(Server)))
    with pytest.raises((courier.CourierError, TypeError)):
        running.client("server").unpicklable()
    assert running.client("server").ping(3) == 3


def _leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def _leave_a_daemon_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def test_daemon_threads_of_a_node_do_not_hold_it(launch_program: Any) -> None:
    program = program_of(node=lp.PyNode(_leave_a_daemon_thread))
    assert launch_program(program, "test_mp").wait().outcome is lp.Outcome.COMPLETED


@pytest.mark.slow
def test_other_threads_hold_a_node_until_the_notice_is_over(launch_program: Any) -> None:
    running = launch_program(program_of(node=lp.PyNode(_leave_a_thread)), "test_mp", notice_s=0.3)
    poll_until(lambda: running.running.status()[0].state == "running")
    assert running.stop().killed == ("node[0]",)


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_all_stop_handlers_have_returned_when_the_program_has_ended(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    def node(index: int) -> None:
        def handler() -> None:
            time.sleep(0.3)  # longer than the node needs to end
            (tmp_path / str(index)).touch()

        lp.register_stop_handler(handler)
        (tmp_path / f"up{index}").touch()
        lp.wait_for_stop()

    program = lp.Program("handlers")
    with program.group("node"):
        for index in range(3):
            program.add_node(lp.PyNode(node, index))
    timing = Timing(handlers_s=20.0)  # a slow machine needs some of them
    running = launch_program(program, launcher, notice_s=30, timing=timing)
    poll_until(lambda: len(list(tmp_path.glob("up*"))) == 3)
    assert running.stop().killed == ()
    assert {each.name for each in tmp_path.glob("[0-9]")} == {"0", "1", "2"}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _assert_no_launch(match: str) -> None:
    """A launch fails, and leaves neither processes nor threads."""
    before, threads = _children(), threading.active_count()
    with pytest.raises(lp.LaunchError, match=match):
        lp.launch(_waiting(), "test_mp")
    assert _children() <= before  # those of earlier tests may go meanwhile
    assert threading.active_count() <= threads


@pytest.mark.parametrize("script", ["exit 1", ""])
def test_an_agent_that_cannot_start_is_a_launch_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    fake = tmp_path / "python"
    if script:
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    _assert_no_launch("agent of localhost")


def test_a_log_folder_that_cannot_be_made_is_a_launch_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(tmp_path / "file" / "below"))
    _assert_no_launch("folder for logs")


@pytest.mark.parametrize("obstacle", ["node", "node/0.log"])
def test_a_log_that_cannot_be_written_is_a_failure_that_says_so(
    launch_program: Any, tmp_path: Path, obstacle: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "run" / obstacle
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "file")
    running = launch_program(_waiting(), "test_mp", log_dir=tmp_path / "run")
    with pytest.raises(lp.NodeFailedError, match=rf"node\[0\].*not be started.*{path}"):
        running.wait()


class Ends:
    """Serves until it is told to end."""

    def __init__(self) -> None:
        self._end = threading.Event()

    def end(self) -> None:
        self._end.set()

    def run(self) -> None:
        self._end.wait()


class Insists:
    """Calls another that ends in between, and says what it met."""

    def __init__(self, other: Any, file: str) -> None:
        self._other = other
        self._file = Path(file)

    def run(self) -> None:
        while True:
            try:
                self._other.end()
            except courier.ServerLostError:
                continue  # it was just about to end
            except courier.ServerUnreachableError as error:
                self._file.write_text(str(error))
                raise


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_a_call_to_a_node_that_has_ended_fails_instead_of_waiting(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("ended")
    ends = program.add_node(lp.CourierNode(Ends), label="ends")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="waits")
    program.add_node(lp.PyClassNode(Insists, ends, str(tmp_path / "met")), label="insists")
    running = launch_program(program, launcher)
    with pytest.raises(lp.NodeFailedError, match=r"it calls ends\[0\], which had ended") as failed:
        running.wait()
    assert failed.value.failure.node == "insists[0]"
    # The last call before the end may still have met the server.
    met = (tmp_path / "met").read_text()
    assert "no server answers" in met or "the server stops; nothing was run" in met


def test_the_launching_process_too_is_told_that_a_node_has_ended(launch_program: Any) -> None:
    program = program_of(ends=lp.CourierNode(Ends), waits=lp.PyNode(lp.wait_for_stop))
    running = launch_program(program)
    client = running.client("ends")

    def is_lost() -> bool:
        try:
            client.end()
        except courier.CourierError:
            return True
        return False

    poll_until(is_lost)
    with pytest.raises(courier.ServerUnreachableError):
        client.end()
    assert running.running.result is None


def test_errors_after_the_end_name_the_node_and_why_it_is_gone(launch_program: Any) -> None:
    running = launch_program(program_of("killed", server=lp.CourierNode(Server)), "test_mp")
    client = running.client("server")
    # Its program may have ended before the client sees that the connection has.
    errors = (courier.ServerLostError, courier.CallCancelledError)
    with pytest.raises(errors, match=r"^server\[0\] \(127\.0\.0\.1:\d+\): die: "):
        client.die()
    with pytest.raises(lp.NodeFailedError):
        running.wait()
    cause = r"program 'killed' has ended: failed, server\[0\] on \S+ failed: .* killed by SIGKILL"
    with pytest.raises(courier.CallCancelledError, match=rf"^server\[0\] \(.*\): {cause}"):
        client.ping()


def test_a_client_made_after_the_end_of_its_program_does_not_wait(launch_program: Any) -> None:
    running = launch_program(program_of(server=lp.CourierNode(Server)), "test_mt")
    running.stop()
    with pytest.raises(courier.CallCancelledError):
        running.client("server").ping()
