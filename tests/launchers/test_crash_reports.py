"""A failure is reported with its first cause first, and all that is known of it is kept."""

import faulthandler
import os
import pdb  # noqa: T100
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchers.host.stacks import STACKS_SIGNAL
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of
from tests.launchers.scripts import Script
from tests.launchers.timing import Timing

LAUNCHERS = ["test_mt", "test_mp"]


class Learner:
    def step(self, batch: int) -> int:
        if batch == 3:
            raise ZeroDivisionError("the gradient vanished")
        return batch


class Actor:
    """Calls a learner until one of the calls fails."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def run(self) -> None:
        for batch in range(10):
            self._learner.step(batch)


class LastActor(Actor):
    """Begins when others have."""

    def __init__(self, learner: Any, marks: str, count: int) -> None:
        super().__init__(learner)
        self._marks = Path(marks)
        self._count = count

    def run(self) -> None:
        poll_until(lambda: len(list(self._marks.iterdir())) == self._count, 30)
        super().run()


class Sleeper:
    """Sleeps until the stop; fails first, some times."""

    def __init__(self, mark: str, fails: int = 0) -> None:
        self._mark = Path(mark)
        self._fails = fails

    def run(self) -> None:
        if lp.restart_count() < self._fails:
            raise RuntimeError("once")
        self._mark.touch()
        while not lp.stop_event().is_set():
            self.nap_deep_down()

    def nap_deep_down(self) -> None:
        time.sleep(0.05)


class Dies:
    """Prints something, and ends its process without a word of Python."""

    def __init__(self, how: str) -> None:
        self._how = how

    def run(self) -> None:
        print("the last words", flush=True)
        if self._how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(3)


class HostileError(Exception):
    """Does something when one looks at it: `act` by name, in the method or attribute `place`."""

    released = threading.Event()

    def __init__(self, place: str, act: str) -> None:
        super().__init__("the message")
        self._place, self._act = place, act

    def _do(self, place: str) -> None:
        if place == self._place and self._act == "blocks":
            self.released.wait(60)
        elif place == self._place:
            os._exit(0)

    def __str__(self) -> str:
        self._do("__str__")
        return "the message"

    @property
    def __notes__(self) -> list[str]:
        self._do("__notes__")
        return []

    def __reduce__(self) -> Any:
        self._do("__reduce__")
        return super().__reduce__()


class Hostile:
    def __init__(self, place: str, act: str) -> None:
        self._how = place, act

    def run(self) -> None:
        raise HostileError(*self._how)


def _failed(running: Any) -> lp.NodeFailedError:
    with pytest.raises(lp.NodeFailedError) as failed:
        running.wait()
    return failed.value


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_error_shows_the_lines_of_both_sides_and_the_crash_folder_all_that_is_known(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("crash")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    marks = tmp_path / "marks"
    marks.mkdir()
    with program.group("sleeper"):
        for index in range(2):
            program.add_node(lp.PyClassNode(Sleeper, str(marks / str(index)), index))
    program.add_node(lp.PyClassNode(LastActor, learner, str(marks), 2), label="actor")
    running = launch_program(
        program,
        launcher,
        log_dir=tmp_path / "run",
        notice_s=30,
        restart={"sleeper": lp.RestartPolicy(backoff_s=0.01)},
    )
    error = _failed(running)
    folder = tmp_path / "run"
    assert running.running.crash_dir == folder
    assert f"Crash folder: {folder}" in str(error)
    assert error.failure.node == "actor[0]"
    assert str(error).startswith("actor[0] on ")
    assert "ZeroDivisionError: the gradient vanished" in str(error).splitlines()[0]
    assert 'raise ZeroDivisionError("the gradient vanished")' in str(error)  # there
    assert "self._learner.step(batch)" in str(error)  # here
    assert isinstance(error.__cause__, ZeroDivisionError)
    shown = "".join(traceback.format_exception(error))
    assert shown.count('raise ZeroDivisionError("the gradient vanished")') == 1
    assert "the gradient vanished" in (folder / "report.txt").read_text()
    assert "actor[0]  PyClassNode(LastActor)  calls learner[0]" in (folder / "plan.txt").read_text()
    versions = (folder / "versions.txt").read_text()
    assert f"launchpad-lite {lp.__version__}" in versions
    assert f"Python {sys.version}" in versions
    assert "cloudpickle " in versions
    for name in ("sleeper[0]", "sleeper[1]"):
        assert "run" in (folder / "stacks" / f"{name}.txt").read_text()
    assert "learner[0].txt" in {file.name for file in (folder / "stacks").iterdir()}
    restarts = [restart.node for restart in running.running.result.restarts]
    assert restarts == ["sleeper[1]"]
    assert "Restarts:" in (folder / "report.txt").read_text()
    assert "RuntimeError: once" in (folder / "report.txt").read_text()
    if launcher == "test_mp":
        assert "the gradient vanished" in (folder / "actor" / "0.log").read_text()


class Served:
    def step(self, batch: int) -> int:
        return batch

    def die(self, how: str) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("as asked")


class Caller:
    def __init__(self, served: Any, how: str) -> None:
        self._served, self._how = served, how

    def run(self) -> None:
        for batch in range(20):
            self._served.step(batch)
        self._served.die(self._how)


@pytest.mark.parametrize(
    ("launcher", "how"), [("test_mp", "killed"), ("test_mp", "raises"), ("test_mt", "raises")]
)
def test_the_report_and_the_folder_of_the_run_have_the_last_calls_of_a_node_that_failed(
    launch_program: Any, launcher: str, how: str, tmp_path: Path
) -> None:
    program = lp.Program("calls")
    served = program.add_node(lp.CourierNode(Served), label="served")
    program.add_node(lp.PyClassNode(Caller, served, how), label="caller")
    error = _failed(launch_program(program, launcher, log_dir=tmp_path))
    report = (tmp_path / "report.txt").read_text()
    if how == "killed":
        assert error.failure.node == "served[0]"
        assert "answered die for caller[0]: runs\n" in str(error)
        assert report.count("answered step for caller[0]: ok within ") == 9
        kept = (tmp_path / "served" / "0.calls.txt").read_text()
        assert kept.count("answered step for caller[0]: ok within ") == 20
    else:
        assert "called die of served[0]: raised within " in report
        assert report.count("called step of served[0]: ok within ") == 9
        assert "called step" not in str(error), "the traceback says more"


@pytest.mark.parametrize("place", ["__str__", "__notes__", "__reduce__"])
@pytest.mark.parametrize(
    ("launcher", "act"), [("test_mp", "ends the process"), ("test_mt", "blocks")]
)
def test_a_node_fails_though_its_exception_ends_or_blocks_whoever_looks_at_it(
    launch_program: Any, launcher: str, act: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "__notes__" and sys.version_info < (3, 11):
        pytest.skip("notes are printed from Python 3.11 on")
    if act == "blocks":
        monkeypatch.setattr("launchpad_lite.worker.running._TELLING_S", 0.3)
    HostileError.released.clear()
    program = lp.Program("hostile")
    program.add_node(lp.PyClassNode(Hostile, place, act), label="hostile")
    program.add_node(lp.CourierNode(Learner), label="learner")
    error = _failed(launch_program(program, launcher, notice_s=1))
    HostileError.released.set()
    assert error.failure.node == "hostile[0]"
    assert error.failure.summary.startswith("tests.launchers.test_crash_reports.HostileError: ")
    assert "raise HostileError(*self._how)" in str(error)
    assert ("the message" in error.failure.summary) == (place == "__reduce__")
    if act == "blocks":
        assert isinstance(error.__cause__, courier.RemoteError)


def test_the_report_of_an_exception_of_any_size_is_short(
    launch_program: Any, tmp_path: Path
) -> None:
    program = program_of(long=lp.PyNode(_fail_at_length))
    running = launch_program(program, "test_mp", log_dir=tmp_path / "run")
    error = _failed(running)
    assert len(str(error)) < 1 << 18
    assert "characters are left out]" in str(error)
    assert len(error.failure.headline()) < 2000
    assert isinstance(error.__cause__, courier.RemoteError)
    assert sum(each.stat().st_size for each in (tmp_path / "run").rglob("*.*")) < 1 << 19


def _fail_at_length() -> None:
    raise ValueError("x" * (1 << 23) + "\n" * (1 << 23))


def _fail_beside(launch_program: Any, node: type, folder: Path, notice_s: float) -> str:
    """Has a node fail beside another; returns where the threads of the other were."""
    marks = folder / "marks"
    marks.mkdir()
    program = lp.Program("beside")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    program.add_node(lp.PyClassNode(node, str(marks / "ready")), label="node")
    program.add_node(lp.PyClassNode(LastActor, learner, str(marks), 1), label="actor")
    running = launch_program(program, "test_mp", log_dir=folder / "run", notice_s=notice_s)
    assert "the gradient vanished" in str(_failed(running))
    return (folder / "run" / "stacks" / "node[0].txt").read_text()


class Watchful(Sleeper):
    """Notes the signal by which stacks are written down."""

    def run(self) -> None:
        signalled = self._mark.parent.parent / "signalled"
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(STACKS_SIGNAL, lambda *_: signalled.touch())
        super().run()


def test_who_answers_is_asked_for_its_stacks_without_a_signal(
    launch_program: Any, tmp_path: Path
) -> None:
    stacks = _fail_beside(launch_program, Watchful, tmp_path, notice_s=30.0)
    assert "nap_deep_down" in stacks or "run" in stacks
    assert not (tmp_path / "signalled").exists()


class Stuck(Sleeper):
    """Lets no other thread of its process run."""

    def nap_deep_down(self) -> None:
        sum(range(10**15))


@pytest.mark.slow
def test_who_is_stuck_in_c_shows_its_stacks_all_the_same(
    launch_program: Any, tmp_path: Path
) -> None:
    assert "nap_deep_down" in _fail_beside(launch_program, Stuck, tmp_path, notice_s=1.0)


def test_a_program_that_ends_well_keeps_only_its_logs(launch_program: Any, tmp_path: Path) -> None:
    program = program_of(node=lp.PyNode(print, "hello"))
    running = launch_program(program, "test_mp", log_dir=tmp_path / "run")
    running.wait()
    assert running.running.crash_dir is None
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["node"]


def test_a_debugger_without_a_terminal_says_where_it_works(launch_program: Any) -> None:
    program = program_of(a=lp.PyNode(pdb.set_trace))
    with pytest.raises(lp.NodeFailedError, match=r"a\[0\].*debugger.*breakpoint\(\)"):
        launch_program(program, "test_mp").wait()


@pytest.mark.parametrize(
    ("how", "expected"), [("segfault", "killed by SIGSEGV"), ("exit", "exit code 3")]
)
def test_a_process_that_dies_without_a_word_is_shown_with_its_last_output(
    launch_program: Any, how: str, expected: str
) -> None:
    error = _failed(launch_program(program_of(dies=lp.PyClassNode(Dies, how)), "test_mp"))
    assert expected in error.failure.summary
    assert "the last words" in str(error)
    if how == "segfault":  # faulthandler's own words are the last lines
        assert "Fatal Python error: Segmentation fault" in str(error)
        assert "in run" in str(error)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_followed_is_told_after_the_cause_and_in_one_line_each(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("follows")
    mark = tmp_path / "mark"
    node = lp.CourierNode(Breaks, str(mark))
    breaks = program.add_node(node, label="breaks")
    with program.group("actor"):
        for _ in range(3):
            program.add_node(lp.PyClassNode(Actor, breaks))
    error = _failed(launch_program(program, launcher, notice_s=30))
    assert error.failure.node == "breaks[0]"
    took_s = time.time() - mark.stat().st_mtime
    mark.unlink()
    assert took_s < 20  # it waits for no call in flight
    head, _, followed = str(error).partition("What followed:")
    assert "ValueError: broke" in head
    lines = [line for line in followed.splitlines() if line.startswith("  actor[")]
    assert len(lines) == len(error.consequences)
    assert all(isinstance(each, lp.NodeFailure) for each in error.consequences)


class Breaks:
    """Serves for a moment, then fails."""

    def __init__(self, mark: str) -> None:
        self._mark = Path(mark)
        self._steps = 0

    def step(self, batch: int) -> None:
        self._steps += 1
        # Begins before the mark is there, and continues for as long as it is.
        if batch:
            poll_until(self._mark.exists, 60)
            poll_until(lambda: not self._mark.exists(), 60)

    def run(self) -> None:
        poll_until(lambda: self._steps > 3, 30)
        self._mark.touch()
        raise ValueError("broke")


class Perishes:
    """Serves until it has been called some times, then fails, perhaps with a child that lives."""

    def __init__(self, how: str, *, has_child: bool) -> None:
        self._how = how
        self._has_child = has_child
        self._calls = 0

    def ping(self) -> None:
        self._calls += 1

    def run(self) -> None:
        if self._has_child:
            subprocess.Popen(["sleep", "1000"])
        poll_until(lambda: self._calls > 20, 30)
        if self._how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "os._exit":
            os._exit(5)
        raise ValueError("the cause")


class Answers:
    """Calls a server until that fails, and has an answer of its own to it."""

    def __init__(self, server: Any, how: str) -> None:
        self._server = server
        self._how = how

    def run(self) -> None:
        while True:
            try:
                self._server.ping()
            except courier.CourierError as error:
                if self._how == "os._exit":
                    os._exit(3)
                if self._how == "sys.exit":
                    sys.exit(3)
                if self._how == "from None":
                    raise RuntimeError("my own words") from None
                if self._how == "from":
                    raise RuntimeError("my own words") from error
                raise RuntimeError("my own words")  # noqa: B904 - as people write it


@pytest.mark.parametrize(
    ("callers", "has_child", "how", "answer"),
    [
        (1, False, "SIGKILL", "from None"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (3, True, "SIGKILL", "raise"),
                (3, True, "os._exit", "sys.exit"),
                (3, True, "raise", "os._exit"),
                (1, False, "os._exit", "from"),
                (1, False, "raise", "from None"),
            ]
        ),
    ],
)
def test_a_server_is_named_before_callers_that_answer_its_loss_in_words_of_their_own(
    launch_program: Any, callers: int, has_child: bool, how: str, answer: str
) -> None:
    timing = Timing(blame_s=5.0)  # a slow machine learns of the cause late
    program = lp.Program("answers")
    node = lp.CourierNode(Perishes, how, has_child=has_child)
    server = program.add_node(node, label="server")
    with program.group("caller"):
        for _ in range(callers):
            program.add_node(lp.PyClassNode(Answers, server, answer))
    running = launch_program(program, "test_mp", notice_s=20.0, timing=timing)
    error = _failed(running)
    assert error.failure.node == "server[0]", str(error)
    assert running.running.result.reason == error.failure.headline()
    assert {each.node.partition("[")[0] for each in error.consequences} <= {"caller"}


def test_a_caller_that_fails_first_is_named_before_a_server_that_fails_of_the_stop(
    launch_program: Any,
) -> None:
    program = lp.Program("stops")
    server = program.add_node(lp.CourierNode(FailsWhenAsked), label="server")
    program.add_node(lp.PyClassNode(CallsOnce, server), label="caller")
    error = _failed(launch_program(program, "test_mp", notice_s=30.0))
    assert error.failure.node == "caller[0]"
    assert [each.node for each in error.consequences] == ["server[0]"]


class FailsWhenAsked:
    def ping(self) -> None:
        pass

    def run(self) -> None:
        lp.wait_for_stop()
        os._exit(5)


class CallsOnce:
    def __init__(self, server: Any) -> None:
        self._server = server

    def run(self) -> None:
        self._server.ping()
        raise RuntimeError("my own fault")


def _memory_cgroup() -> Path:
    """Where a control group with a memory limit can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.strip("/")
        if not controllers and (Path("/sys/fs/cgroup") / "cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.strip("/")
    raise FileNotFoundError("no memory controller")


@pytest.fixture
def small_memory() -> Any:
    """Makes a control group of 300 MiB; returns the file that takes its processes."""
    try:
        group = _memory_cgroup() / f"launchpad-test-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        reason = f"cannot make a control group with a memory limit: {error}"
        # The machines of CI let root do it; elsewhere it takes rights that a user may not have.
        pytest.skip(reason)
    try:
        v1 = (group / "memory.limit_in_bytes").exists()
        limit = group / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit.write_text(str(300 << 20))
        yield group / "cgroup.procs"
    finally:
        poll_until(lambda: not (group / "cgroup.procs").read_text(), 30, must=False)
        group.rmdir()


@pytest.mark.slow
def test_a_node_that_takes_all_memory_is_named_as_out_of_memory(
    small_memory: Path, tmp_path: Path
) -> None:
    source = f"""
        import os, pathlib
        pathlib.Path({str(small_memory)!r}).write_text(str(os.getpid()))
        import launchpad_lite as lp

        def greedy():
            taken = []
            while True:
                taken.append(bytearray(os.urandom(1 << 20) * 16))

        program = lp.Program("greedy")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="modest")
        program.add_node(lp.PyNode(greedy), label="greedy")
        lp.launch(program)
    """
    with Script(tmp_path, source) as script:
        ended = script.run()
        assert ended.code == 1
        assert "greedy[0] on localhost failed" in ended.stderr
        assert "out of memory" in ended.stderr
        script.assert_gone()
