"""A stop is orderly: callers before those they call, each with its share of the notice."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until

LAUNCHERS = ["test_mt", "test_mp"]


class Link:
    """One of a chain: calls the next, and writes down when it was asked to stop and when it left."""

    def __init__(
        self, name: str, log: str, next_one: Any = None, leave_after_s: float = 0.0
    ) -> None:
        self._name = name
        self._log = Path(log)
        self._next = next_one
        self._leave_after_s = leave_after_s

    def note(self, what: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{what} {self._name}\n")

    def run(self) -> None:
        stop = lp.stop_event()  # before it is up: who is asked and does not listen holds up nobody
        if self._next is not None:
            self._next.note(f"up {self._name} to")
        self.note("up")
        stop.wait()
        self.note("asked")
        leaves_at = time.monotonic() + self._leave_after_s
        while time.monotonic() < leaves_at:
            time.sleep(0.01)  # a thread is ended by force between two steps only
        if self._next is not None:
            # Those it calls are still there for its last words.
            self._next.note(f"last words of {self._name} to")
        self.note("left")


def _chain(log: Path, names: Sequence[str], leave_after_s: float = 0.0) -> lp.Program:
    program = lp.Program("chain")
    handle = None
    for name in names:
        node = lp.CourierNode(Link, name, str(log), handle, leave_after_s)
        handle = program.add_node(node, label=name)
    return program


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_callers_stop_before_those_they_call_and_can_still_call_them(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    log = tmp_path / "log"
    running = launch_program(_chain(log, ["a", "b", "c", "d"], 0.1), launcher, notice_s=60)
    poll_until(lambda: log.exists() and log.read_text().count("up ") >= 4 + 3, 30)
    result = running.stop()
    lines = [line for line in log.read_text().splitlines() if not line.startswith("up")]
    expected = []
    for name, next_one in [("d", "c"), ("c", "b"), ("b", "a"), ("a", None)]:
        expected.append(f"asked {name}")
        if next_one is not None:
            expected.append(f"last words of {name} to {next_one}")
        expected.append(f"left {name}")
    assert lines == expected
    assert result.killed == ()


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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_calls_in_flight_finish_and_no_new_ones_begin(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    log = tmp_path / "log"
    program = lp.Program("inflight")
    slow = program.add_node(lp.CourierNode(Slow, str(log)), label="slow")
    program.add_node(lp.PyClassNode(Asks, slow, str(log), 1000), label="asks")
    running = launch_program(program, launcher, notice_s=90)
    poll_until(Path(f"{log}.called").exists, 30)
    started = time.monotonic()
    result = running.stop()
    assert time.monotonic() - started < 30
    assert log.read_text() == "answered\n"
    assert result.killed == ()
    assert result.outcome is lp.Outcome.STOPPED


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_caller_that_takes_its_time_has_a_share_of_the_notice(
    launch_program: Any, tmp_path: Path, launcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    # Each has so much time, on a slow machine, to write down that it was asked.
    running = launch_program(_chain(log, ["a", "b"], leave_after_s=1000), launcher, notice_s=8.0)
    poll_until(lambda: log.exists() and log.read_text().count("up ") >= 3, 30)
    result = running.stop(60)
    lines = [line for line in log.read_text().splitlines() if line.startswith("asked")]
    # The one that is called is asked all the same, while it has some of the notice left.
    assert lines == ["asked b", "asked a"]
    assert set(result.killed) <= {"a[0]", "b[0]"}
    assert "b[0]" in result.killed
    assert f"chain: ended by force after the notice: {', '.join(result.killed)}" in caplog.text


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


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("notice_s", [0.0, 0.3, 1.0])
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


class Circle:
    """Calls one that calls it."""

    def __init__(self, other: Any = None) -> None:
        self._other = other

    def run(self) -> None:
        lp.wait_for_stop()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nodes_that_call_each_other_stop_together(launch_program: Any, launcher: str) -> None:
    program = lp.Program("circle")
    first, second = lp.CourierNode(Circle), lp.CourierNode(Circle)
    first.configure(second.create_handle())
    second.configure(first.create_handle())
    program.add_node(first, label="first")
    program.add_node(second, label="second")
    running = launch_program(program, launcher, notice_s=90)
    poll_until(lambda: {each.state for each in running.running.status()} == {"running"}, 30)
    started = time.monotonic()
    assert running.stop(80).outcome is lp.Outcome.STOPPED
    assert time.monotonic() - started < 30


class Queue:
    """Its readers wait for items, and for the stop."""

    def get(self) -> None:
        while not lp.stop_event().wait(0.02):
            pass


class Reader:
    """Waits in a call for what never comes."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def run(self) -> None:
        while True:
            self._queue.get()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_that_waits_in_a_call_does_not_hold_up_the_stop(
    launch_program: Any, launcher: str
) -> None:
    program = lp.Program("queue")
    queue = program.add_node(lp.CourierNode(Queue), label="queue")
    program.add_node(lp.PyClassNode(Reader, queue), label="reader")
    running = launch_program(program, launcher, notice_s=90)
    poll_until(lambda: {each.state for each in running.running.status()} == {"running", "serving"})
    started = time.monotonic()
    result = running.stop(80)
    assert time.monotonic() - started < 30
    assert result.killed == ()


class Handlers:
    """Counts how often its stop handler is called."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._called = threading.Event()
        lp.register_stop_handler(self._stop)

    def _stop(self) -> None:
        with self._file.open("a") as file:
            file.write("called\n")
        self._called.set()

    def run(self) -> None:
        self._called.wait()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_stop_handlers_run_once_even_if_many_ask_for_the_stop(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    file = tmp_path / "calls"
    program = lp.Program("handlers")
    program.add_node(lp.PyClassNode(Handlers, str(file)), label="handlers")
    running = launch_program(program, launcher, notice_s=60)
    poll_until(lambda: running.running.status()[0].state == "running")
    for _ in range(5):
        running.running.request_stop("again")
    running.stop()
    assert file.read_text() == "called\n"


def _note_what_a_handler_sees(folder: Path, index: int) -> None:
    stop = lp.stop_event()
    lp.register_stop_handler(lambda: (folder / f"{index}.seen").write_text(str(stop.is_set())))
    (folder / f"{index}.up").touch()
    lp.wait_for_stop()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stop_handler_sees_the_stop(launch_program: Any, tmp_path: Path, launcher: str) -> None:
    program = lp.Program("seeing")
    with program.group("node"):
        for index in range(10):
            program.add_node(lp.PyNode(_note_what_a_handler_sees, tmp_path, index))
    running = launch_program(program, launcher, notice_s=60)
    poll_until(lambda: len(list(tmp_path.glob("*.up"))) == 10)
    running.stop()
    # A node that is a thread does not wait for a handler that is slow.
    poll_until(lambda: len([path for path in tmp_path.glob("*.seen") if path.read_text()]) == 10)
    assert [path.read_text() for path in tmp_path.glob("*.seen")] == ["True"] * 10
