"""The ways in which a node's code can leave, and what each means for it and for others."""

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.launchers.running import first_pid, wait_until_up
from tests.launchers.timing import Timing

LAUNCHERS = ["test_mt", "test_mp"]
ONCE = lp.RestartPolicy(max_restarts=1, backoff_s=0.01)


def _program(work: Any, *arguments: Any) -> lp.Program:
    program = lp.Program("out")
    program.add_node(lp.PyNode(work, *arguments), label="node")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    return program


def _fail_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("the cause")


@pytest.mark.slow
def test_a_failure_is_told_although_a_thread_of_the_node_goes_on(launch_program: Any) -> None:
    running = launch_program(_program(_fail_beside_a_thread), "test_mp", notice_s=0.5)
    with pytest.raises(lp.NodeFailedError, match=r"node\[0\].*the cause"):
        running.wait(30)


def _fail_with_an_odd_name() -> None:
    raise FileNotFoundError(os.fsdecode(b"caf\xe9.npz"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_message_that_is_no_utf8_is_told_and_kept(
    launch_program: Any, launcher: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Logs are a part of pytest's report, and pytest-xdist cannot send such text.
    caplog.set_level(logging.ERROR, logger="launchers.thread")
    running = launch_program(
        _program(_fail_with_an_odd_name), launcher, restart=ONCE, log_dir=tmp_path / "run"
    )
    with pytest.raises(lp.NodeFailedError, match="FileNotFoundError: caf") as failed:
        running.wait(30)
    assert len(failed.value.failure.restarts) == 1
    assert "caf\\udce9.npz" in (tmp_path / "run" / "report.txt").read_text()


def _clean_up_slowly(file: str) -> None:
    try:
        Path(f"{file}.up").touch()
        while True:
            time.sleep(0.01)
    finally:
        for step in range(5):
            time.sleep(0.1)
            Path(file).write_text(str(step))


@pytest.mark.slow
def test_whoever_is_ended_by_force_can_clean_up_undisturbed(
    launch_program: Any, tmp_path: Path
) -> None:
    timing = Timing(terminate_s=10.0)
    file = tmp_path / "step"
    running = launch_program(
        _program(_clean_up_slowly, str(file)), "test_mp", notice_s=2.0, timing=timing
    )
    poll_until(Path(f"{file}.up").exists)
    pid = first_pid(running)
    running.running.request_stop("now")
    poll_until(file.exists)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)  # somebody has no patience
    result = running.stop(30)
    assert file.read_text() == "4"
    assert "node[0]" in result.killed


def _leave_slowly(file: str) -> None:
    lp.register_stop_handler(lambda: poll_until(Path(f"{file}.again").exists))
    Path(file).touch()
    lp.wait_for_stop()


def test_a_notice_that_comes_twice_is_one(launch_program: Any, tmp_path: Path) -> None:
    file = tmp_path / "up"
    running = launch_program(_program(_leave_slowly, str(file)), "test_mp", notice_s=60)
    poll_until(file.exists, 30)
    wait_until_up(running)
    pid = first_pid(running)
    os.kill(pid, signal.SIGTERM)
    poll_until(lambda: running.running.status()[1].state == "ended", 30)
    os.kill(pid, signal.SIGTERM)  # while its stop handler takes its time
    Path(f"{file}.again").touch()
    with pytest.raises(SystemExit) as exited:
        running.wait(30)
    assert exited.value.code == 143
    assert running.running.result.failures == ()


class Coordinator:
    """Knows when all is done, and takes what was found."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._done = False
        self._asked = 0

    def finished(self) -> bool:
        self._asked += 1
        return self._done

    def asked(self) -> int:
        return self._asked

    def finish(self) -> None:
        self._done = True
        lp.stop()

    def hand_in(self, result: int) -> None:
        self._file.write_text(str(result))


class Worker:
    """Asks another whether it is to go on, instead of looking at the stop."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def run(self) -> None:
        result = 0
        try:
            while not self._coordinator.finished():
                result = 42
        finally:
            self._coordinator.hand_in(result)


def test_a_node_that_does_not_look_at_the_stop_has_a_moment_for_its_last_calls(
    launch_program: Any, tmp_path: Path
) -> None:
    timing = Timing(unaware_s=5.0)  # a moment, on a slow machine
    program = lp.Program("last")
    coordinator = program.add_node(
        lp.CourierNode(Coordinator, str(tmp_path / "result")), label="coordinator"
    )
    program.add_node(lp.PyClassNode(Worker, coordinator), label="worker")
    running = launch_program(program, notice_s=20, timing=timing)
    client = running.client("coordinator")
    poll_until(lambda: client.asked() > 3, 30)
    client.finish()
    assert running.wait(30).outcome is lp.Outcome.STOPPED
    assert (tmp_path / "result").read_text() == "42"


def _mistake_after_the_stop(coordinator: Any, up: str) -> None:
    stop = lp.stop_event()  # whose code does not look at it has but a moment for its last calls
    Path(up).touch()
    stop.wait()
    coordinator.hand_over(1)  # no such method


def test_a_mistake_in_the_last_calls_is_a_failure(launch_program: Any, tmp_path: Path) -> None:
    program = lp.Program("mistake")
    coordinator = program.add_node(lp.CourierNode(Coordinator, str(tmp_path / "x")), label="c")
    up = tmp_path / "up"
    program.add_node(lp.PyNode(_mistake_after_the_stop, coordinator, str(up)), label="node")
    running = launch_program(program, notice_s=60)
    poll_until(up.exists)
    wait_until_up(running)
    with pytest.raises(lp.NodeFailedError, match="hand_over"):
        running.stop(30)


def _note_stop(file: str) -> None:
    lp.register_stop_handler(Path(file).touch)
    Path(f"{file}.up").touch()
    lp.wait_for_stop()


def test_a_program_of_threads_calls_its_own_stop_handlers_only(
    launch_program: Any, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    runs = {
        file: launch_program(_program(_note_stop, str(file)), "test_mt") for file in (first, second)
    }
    for file in runs:
        poll_until(Path(f"{file}.up").exists)
    runs[first].stop()
    poll_until(first.exists)  # a thread's handlers may end after it
    assert not second.exists()
    runs[second].stop()
    poll_until(second.exists)


class Counting:
    """A function with a state."""

    def __call__(self) -> None:
        lp.wait_for_stop()

    def save(self, folder: Path) -> None:
        (folder / "saved").touch()

    def restore(self, folder: Path) -> None: ...


def test_an_object_that_is_called_keeps_its_state_too(launch_program: Any, tmp_path: Path) -> None:
    running = launch_program(_program(Counting()), checkpoints={"node": tmp_path}, notice_s=30)
    wait_until_up(running)
    running.stop()
    assert len(list(tmp_path.glob("node/0/0*/state/saved"))) == 1


def test_a_thread_of_a_node_that_belongs_to_none_does_not_speak_for_another(
    launch_program: Any,
) -> None:
    errors: list[str] = []
    program = lp.Program("threads")
    for _ in range(2):
        program.add_node(lp.PyNode(_beat_in_a_thread, errors), label="node")
    launch_program(program, "local_mt").wait(30)
    assert len(errors) == 2
    assert "copy_context" in errors[0]


_both = threading.Barrier(2)


def _beat_in_a_thread(errors: list[str]) -> None:
    def beat() -> None:
        try:
            lp.heartbeat()
        except lp.NoProgramError as error:
            errors.append(str(error))

    _both.wait(30)
    thread = threading.Thread(target=beat)
    thread.start()
    thread.join()
    _both.wait(30)
