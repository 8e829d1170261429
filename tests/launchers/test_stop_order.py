"""A stop is orderly: callers before those they call, each with its share of the notice."""

import time
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until


class Slow:
    """Answers slowly."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)

    def answer(self, seconds: float) -> str:
        Path(f"{self._log}.called").touch()
        # It is asked to stop when its caller may not begin new calls any more.
        lp.stop_event().wait(60)
        time.sleep(seconds)
        return "answered"


class Asks:
    """Makes one call, and looks at nothing else."""

    def __init__(self, slow: Any, log: str, times: int) -> None:
        self._slow = slow
        self._log = Path(log)
        self._times = times

    def run(self) -> None:
        for _ in range(self._times):
            answer = self._slow.answer(3.0)
            with self._log.open("a") as file:
                file.write(f"{answer}\n")


@pytest.mark.slow
def test_calls_in_flight_finish_and_no_new_ones_begin(launch_program: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = lp.Program("inflight")
    slow = program.add_node(lp.CourierNode(Slow, str(log)), label="slow")
    program.add_node(lp.PyClassNode(Asks, slow, str(log), 1000), label="asks")
    running = launch_program(program, "test_mp", notice_s=90)
    poll_until(Path(f"{log}.called").exists, 30)
    started = time.monotonic()
    result = running.stop()
    assert time.monotonic() - started < 30
    assert log.read_text() == "answered\n"
    assert result.killed == ()
    assert result.outcome is lp.Outcome.STOPPED


class Deaf:
    """Answers, and lets itself be stopped, later than anybody waits for."""

    def __init__(self, answers_for_s: float) -> None:
        self._answers_for_s = answers_for_s
        lp.register_stop_handler(lambda: time.sleep(1.5))

    def answer(self, mark: str) -> None:
        Path(mark).touch()
        time.sleep(self._answers_for_s)


class CallsAlways:
    def __init__(self, deaf: Deaf, mark: str) -> None:
        self._deaf, self._mark = deaf, mark

    def run(self) -> None:
        while True:
            self._deaf.answer(self._mark)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "notice_s"), [("test_mt", 0.3), ("test_mp", 0.0), ("test_mp", 1.0)]
)
def test_a_server_that_is_ended_by_force_leaves_nothing(
    launch_program: Any, tmp_path: Path, launcher: str, notice_s: float
) -> None:
    def is_ended_by_force(folder: Path) -> bool:
        folder.mkdir()
        program = lp.Program("deaf")
        deaf = program.add_node(lp.CourierNode(Deaf, 2.0 + notice_s), label="deaf")
        for index in range(2):
            caller = lp.PyClassNode(CallsAlways, deaf, str(folder / f"called-{index}"))
            program.add_node(caller, label="caller")
        running = launch_program(program, launcher, notice_s=notice_s)
        poll_until(lambda: len(list(folder.glob("called-*"))) == 2)
        return "caller[0]" in running.stop().killed

    # Where we or the supervisor come late, its call is over and it ends by itself.
    assert any(is_ended_by_force(tmp_path / str(attempt)) for attempt in range(5))


def _note_what_a_handler_sees(folder: Path, index: int) -> None:
    stop = lp.stop_event()
    lp.register_stop_handler(lambda: (folder / f"{index}.seen").write_text(str(stop.is_set())))
    (folder / f"{index}.up").touch()
    lp.wait_for_stop()


def test_a_stop_handler_sees_the_stop(launch_program: Any, tmp_path: Path) -> None:
    program = lp.Program("seeing")
    with program.group("node"):
        for index in range(10):
            program.add_node(lp.PyNode(_note_what_a_handler_sees, tmp_path, index))
    running = launch_program(program, notice_s=60)
    poll_until(lambda: len(list(tmp_path.glob("*.up"))) == 10)
    running.stop()
    # A node that is a thread does not wait for a handler that is slow.
    poll_until(lambda: len([path for path in tmp_path.glob("*.seen") if path.read_text()]) == 10)
    assert [path.read_text() for path in tmp_path.glob("*.seen")] == ["True"] * 10
