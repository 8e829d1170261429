"""Colocations of threads: calls inside and from outside, ends, failures, stops, state.

One of processes is planned as so many nodes (`tests/launchpad_lite/test_colocations.py`), and runs as these.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.launchers.counting import Counter
from tests.launchers.running import states

both = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])


class Replay:
    """Serves."""

    def __init__(self) -> None:
        self._items: list[int] = []

    def insert(self, item: int) -> int:
        self._items.append(item)
        return len(self._items)

    def peer(self) -> str:
        peer = courier.current_call().peer
        return "inside" if peer == f"process {os.getpid()}, which is the server's own" else peer

    def wait_long(self) -> None:
        while not lp.stop_event().wait(0.02):
            pass

    def stop(self) -> None:
        lp.stop()


class Learner:
    """Calls another, writes down what it finds, and ends when told."""

    def __init__(self, replay: Any, folder: str, count: int = 3) -> None:
        self._replay = replay
        self._folder = Path(folder)
        self._count = count

    def ask(self) -> str:
        return str(self._replay.peer())

    def run(self) -> None:
        for item in range(self._count):
            self._replay.insert(item)
        (self._folder / "learner").write_text(str(self._replay.insert(-1)))


def _touch(folder: str, name: str) -> None:
    (Path(folder) / name).touch()


def _wait(folder: str, name: str = "asked") -> None:
    _touch(folder, f"{name}.up")
    lp.wait_for_stop()
    _touch(folder, name)


def _wait_for_file(folder: str, name: str) -> None:
    while not (Path(folder) / name).exists():
        if lp.wait_for_stop(0.01):
            return


def _fail(folder: str, *, after: str = "") -> None:
    if after:
        _wait_for_file(folder, after)
    raise KeyError("broken inside")


def _together(*nodes: Any, **options: Any) -> lp.Program:
    program = lp.Program("together")
    program.add_node(lp.ColocationNode(nodes, **options), label="group")
    return program


@both
def test_the_program_ends_when_the_inner_nodes_that_run_have_ended(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    replay = lp.CourierNode(Replay)
    learner = lp.PyClassNode(Learner, replay.create_handle(), str(tmp_path))
    result = launch_program(_together(learner, replay), launcher, notice_s=30).wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert result.killed == ()
    assert (tmp_path / "learner").read_text() == "4"


@both
def test_calls_inside_pass_no_socket_and_calls_from_outside_do_work(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    replay = lp.CourierNode(Replay)
    learner = lp.CourierNode(Learner, replay.create_handle(), str(tmp_path))
    learner.disable_run()
    program = _together(learner, replay)
    outside = lp.CourierNode(Learner, replay.create_handle(), str(tmp_path))
    outside.disable_run()
    program.add_node(outside, label="outside")
    running = launch_program(program, launcher)
    # A call that came before the other one served went by its socket, and waited there.
    poll_until(lambda: learner.create_handle().dereference().ask() == "inside", 30)
    shares = launcher == "test_mt"
    poll_until(lambda: (running.client("outside").ask() == "inside") == shares, 30)
    assert replay.create_handle().dereference().insert(1) == 1


def test_inner_nodes_call_each_other_in_a_circle(launch_program: Any, tmp_path: Path) -> None:
    first, second = lp.CourierNode(Learner), lp.CourierNode(Learner)
    for node, other in ((first, second), (second, first)):
        node.configure(other.create_handle(), str(tmp_path))
        node.disable_run()
    launch_program(_together(first, second))
    for node in (first, second):
        with pytest.raises((AttributeError, courier.CourierError)):
            node.create_handle().dereference().ask()  # it has no `peer`; the call arrived


def test_those_that_only_serve_go_on_until_the_program_ends(
    launch_program: Any, tmp_path: Path
) -> None:
    replay = lp.CourierNode(Replay)
    program = _together(lp.PyClassNode(Learner, replay.create_handle(), str(tmp_path)), replay)
    program.add_node(lp.PyNode(_wait_for_file, str(tmp_path), "enough"), label="other")
    running = launch_program(program)
    poll_until(lambda: {"serving", "running"} == states(running), 30)
    assert replay.create_handle().dereference().insert(1) == 5
    assert running.running.result is None
    _touch(str(tmp_path), "enough")
    assert running.wait().outcome is lp.Outcome.COMPLETED


def test_all_inner_nodes_that_run_are_waited_for(launch_program: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    running = launch_program(
        _together(
            lp.PyNode(_touch, folder, "first"),
            lp.PyNode(_wait_for_file, folder, "second"),
            lp.PyNode(_wait_for_file, folder, "second"),
        )
    )
    poll_until((tmp_path / "first").exists, 30)
    with pytest.raises(TimeoutError):
        running.wait(0.3)
    _touch(folder, "second")
    assert running.wait().outcome is lp.Outcome.COMPLETED


@pytest.mark.parametrize(
    ("launcher", "other"),
    [("test_mt", "wait"), ("test_mt", "serve"), ("test_mt", "step"), ("test_mp", "call")],
)
def test_the_first_end_ends_the_others_if_wanted(
    launch_program: Any, tmp_path: Path, launcher: str, other: str
) -> None:
    folder = str(tmp_path)
    replay = lp.CourierNode(Replay)
    outside = lp.CourierNode(Replay)
    others = {
        "wait": lp.PyNode(_wait, folder),
        "serve": lp.CourierNode(Replay),
        "call": lp.PyClassNode(Caller, outside.create_handle(), "wait_long"),
        "step": lp.PyClassNode(Caller, outside.create_handle(), "insert", 1),
    }
    program = _together(
        lp.PyNode(_wait_for_file, folder, "first"),
        others[other],
        replay,
        return_on_first_completed=True,
    )
    program.add_node(outside, label="outside")
    # A call in flight may finish within the notice, and this one does not.
    running = launch_program(program, launcher, notice_s=1 if other == "call" else 60)
    poll_until(lambda: states(running) == {"running", "serving"}, 30)
    _touch(folder, "first")
    assert running.wait(40).outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "asked").exists() == (other == "wait")


class Caller:
    """Calls for ever, and never looks at the stop."""

    def __init__(self, other: Any, method: str, *args: Any) -> None:
        self._call = getattr(other, method)
        self._args = args

    def run(self) -> None:
        while True:
            self._call(*self._args)


class Late(Replay):
    """Is there when it is told to."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        _wait_for_file(folder, "late")


@both
def test_calls_that_the_stop_of_the_others_ends_are_no_failure(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    folder = str(tmp_path)
    outside = lp.CourierNode(Late, folder)
    # The more, the longer it takes until the last one is asked to end.
    callers = [lp.PyClassNode(Caller, outside.create_handle(), "insert", 1) for _ in range(20)]
    program = _together(
        lp.PyNode(_wait_for_file, folder, "first"), *callers, return_on_first_completed=True
    )
    program.add_node(outside, label="outside")
    running = launch_program(program, launcher)
    poll_until(lambda: "running" in states(running), 30)
    _touch(folder, "first")
    poll_until(lambda: "running" not in states(running), 30)
    _touch(folder, "late")
    assert running.wait(40).outcome is lp.Outcome.COMPLETED


class Handler:
    """Ends when its stop handler is called."""

    def __init__(self, folder: str) -> None:
        self._called = threading.Event()
        self._file = Path(folder) / "handler"

    def _on_stop(self) -> None:
        with self._file.open("a") as file:
            file.write("called\n")
        self._called.set()

    def run(self) -> None:
        lp.register_stop_handler(self._on_stop)
        _touch(str(self._file.parent), "handler.up")
        self._called.wait()


class ThreadHandler(Handler):
    """The same in a thread of its own that knows nothing of the node."""

    def run(self) -> None:
        thread = threading.Thread(target=super().run)
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    ("launcher", "handler", "why"),
    [
        ("test_mp", Handler, "stop"),
        ("test_mt", Handler, "first"),
        ("test_mp", ThreadHandler, "stop"),
    ],
)
def test_stop_handlers_of_inner_nodes_and_of_their_threads_are_called_once(
    launch_program: Any, tmp_path: Path, launcher: str, handler: type[Handler], why: str
) -> None:
    program = _together(
        lp.PyClassNode(handler, str(tmp_path)),
        lp.PyNode(_wait_for_file, str(tmp_path), "first"),
        return_on_first_completed=True,
    )
    running = launch_program(program, launcher, notice_s=60)
    poll_until((tmp_path / "handler.up").exists, 30)
    if why == "stop":
        assert running.stop(40).killed == ()
    else:
        _touch(str(tmp_path), "first")
        assert running.wait(40).outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "handler").read_text() == "called\n"


@pytest.mark.parametrize(("launcher", "sibling"), [("test_mt", "waits"), ("test_mp", "calls")])
def test_a_failure_inside_fails_the_program_and_ends_the_others(
    launch_program: Any, tmp_path: Path, launcher: str, sibling: str
) -> None:
    folder = str(tmp_path)
    replay = lp.CourierNode(Replay)
    siblings = {
        "waits": lp.PyNode(_wait, folder),
        "calls": lp.PyClassNode(Caller, replay.create_handle(), "insert", 1),
    }
    nodes = [lp.PyNode(_fail, folder, after="go"), siblings[sibling], replay]
    running = launch_program(_together(*nodes), launcher, notice_s=30)
    poll_until(lambda: "starting" not in states(running), 30)
    _touch(folder, "go")
    with pytest.raises(lp.NodeFailedError, match="broken inside") as failed:
        running.wait(50)
    assert isinstance(failed.value.__cause__, KeyError)
    assert failed.value.failure.node == "group[0]"
    assert "in _fail" in str(failed.value)
    if sys.version_info >= (3, 11):
        assert "in PyNode(_fail), one of the nodes of group[0]" in str(failed.value)
    assert running.running.result.killed == ()


class Broken:
    def __init__(self, folder: str) -> None:
        _wait_for_file(folder, "asked.up")
        raise ValueError("broken constructor")


def test_a_constructor_that_fails_ends_the_inner_nodes_that_run_already(
    launch_program: Any, tmp_path: Path
) -> None:
    nodes = [lp.PyNode(_wait, str(tmp_path)), lp.CourierNode(Broken, str(tmp_path))]
    running = launch_program(_together(*nodes), notice_s=30)
    with pytest.raises(lp.NodeFailedError, match="broken constructor") as failed:
        running.wait(50)
    assert isinstance(failed.value.__cause__, ValueError)
    assert (tmp_path / "asked").exists(), str(failed.value)


class Fragile:
    """Fails in `run`, which fails the calls that it has taken."""

    def __init__(self) -> None:
        self._called = threading.Event()

    def wait_long(self) -> None:
        self._called.set()
        time.sleep(1000)

    def run(self) -> None:
        self._called.wait()
        raise KeyError("broken inside")


def test_the_cause_is_told_rather_than_what_followed(launch_program: Any) -> None:
    fragile = lp.CourierNode(Fragile)
    caller = lp.PyClassNode(Caller, fragile.create_handle(), "wait_long")
    running = launch_program(_together(caller, fragile), "test_mp", notice_s=30)
    with pytest.raises(lp.NodeFailedError, match="broken inside"):
        running.wait()


class _DeadlyError(Exception):
    def __str__(self) -> str:
        os._exit(7)
        return ""


def _raise_deadly() -> None:
    raise _DeadlyError


def test_the_error_of_a_part_is_told_whatever_its_code_does(launch_program: Any) -> None:
    program = _together(lp.PyNode(_raise_deadly), lp.PyNode(lp.wait_for_stop))
    with pytest.raises(lp.NodeFailedError, match="_DeadlyError: <no message"):
        launch_program(program, "test_mp").wait()


def _fail_at_the_end() -> None:
    try:
        while True:
            time.sleep(0.01)
    except SystemExit:
        raise ValueError("could not be saved") from None


def test_the_error_of_a_part_that_is_ended_by_force_is_told(launch_program: Any) -> None:
    program = _together(lp.PyNode(int), lp.PyNode(_fail_at_the_end), return_on_first_completed=True)
    with pytest.raises(lp.NodeFailedError, match="could not be saved"):
        launch_program(program, "test_mt", notice_s=0.2).wait()


def _note_end(folder: Path, name: str, seconds: float) -> None:
    def note() -> None:
        time.sleep(seconds)
        (folder / name).touch()

    lp.register_stop_handler(note)


def _stop_slowly(folder: Path) -> None:
    _note_end(folder, "slow", 2.5)
    _note_end(folder, "quick", 0.0)
    lp.wait_for_stop()


@pytest.mark.slow
def test_a_process_waits_for_the_stop_handlers_of_its_parts(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(_together(lp.PyNode(_stop_slowly, tmp_path)), "test_mp", notice_s=20)
    poll_until(lambda: states(running) == {"running"}, 20)
    running.stop()
    assert {each.name for each in tmp_path.iterdir()} >= {"slow", "quick"}


def test_an_inner_node_can_stop_the_program(launch_program: Any, tmp_path: Path) -> None:
    replay = lp.CourierNode(Replay)
    program = _together(lp.PyNode(_wait, str(tmp_path)), replay)
    running = launch_program(program, notice_s=30)
    poll_until((tmp_path / "asked.up").exists, 30)
    with contextlib.suppress(courier.CourierError):  # the program may have stopped meanwhile
        replay.create_handle().dereference().stop()
    result = running.wait()
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ()
    assert (tmp_path / "asked").exists()


def test_a_stop_ends_calls_between_inner_nodes_and_to_others(launch_program: Any) -> None:
    inside, outside = lp.CourierNode(Replay), lp.CourierNode(Replay)
    program = _together(
        lp.PyClassNode(Caller, inside.create_handle(), "wait_long"),
        lp.PyClassNode(Caller, outside.create_handle(), "wait_long"),
        lp.PyClassNode(Caller, inside.create_handle(), "insert", 1),
        inside,
    )
    program.add_node(outside, label="outside")
    running = launch_program(program, notice_s=60)
    poll_until(lambda: states(running) == {"running", "serving"}, 30)
    result = running.stop(50)
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ()


def _step(folder: str) -> None:
    _touch(folder, "stepping")
    while True:
        time.sleep(0.01)


@pytest.mark.slow
@both
def test_an_inner_node_that_never_looks_at_the_stop_is_ended_by_force(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    program = _together(lp.PyNode(_step, str(tmp_path)), lp.PyNode(_wait, str(tmp_path)))
    running = launch_program(program, launcher, notice_s=4)  # which the other one needs
    poll_until(lambda: (tmp_path / "stepping").exists() and (tmp_path / "asked.up").exists(), 30)
    result = running.stop(30)
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ("group[0]",)
    assert (tmp_path / "asked").exists()


@pytest.mark.slow
def test_an_inner_node_that_is_stuck_is_killed_with_its_process(
    launch_program: Any, tmp_path: Path
) -> None:
    program = _together(lp.PyNode(time.sleep, 1000), lp.PyNode(_wait, str(tmp_path)))
    running = launch_program(program, "test_mp", notice_s=0.3)
    poll_until((tmp_path / "asked.up").exists, 30)
    assert running.stop(30).killed == ("group[0]",)


@pytest.mark.slow
def test_after_the_first_end_a_stuck_inner_node_is_left_when_the_notice_is_over(
    launch_program: Any,
) -> None:
    program = _together(lp.PyNode(time.sleep, 1000), lp.PyNode(int), return_on_first_completed=True)
    running = launch_program(program, "test_mp", notice_s=0.3)
    assert running.wait().outcome is lp.Outcome.COMPLETED


def _beat(folder: str) -> None:
    while not lp.wait_for_stop(0.05):
        lp.heartbeat()
        if (Path(folder) / "enough").exists():
            return


@pytest.mark.slow
def test_heartbeats_of_inner_nodes_are_those_of_the_whole(
    launch_program: Any, tmp_path: Path
) -> None:
    program = _together(lp.PyNode(_beat, str(tmp_path)), lp.PyNode(_wait, str(tmp_path)))
    running = launch_program(program, "test_mp", liveness=lp.Liveness(heartbeat_s=6))
    with pytest.raises(TimeoutError):
        running.wait(9)
    assert running.stop().outcome is lp.Outcome.STOPPED


def test_each_inner_node_finds_its_own_state_again(launch_program: Any, tmp_path: Path) -> None:
    for launch in (1, 2, 3):
        program = lp.Program("state")
        counters = [lp.CourierNode(Counter) for _ in range(4)]
        with program.group("group"):
            nested = lp.ColocationNode(counters[2:])
            program.add_node(lp.ColocationNode([counters[0], nested]))
            program.add_node(counters[1])
        running = launch_program(program, checkpoints={"group": tmp_path}, notice_s=30)
        for index, counter in enumerate(counters):
            by = index + 1
            assert counter.create_handle().dereference().add(by) == launch * by
        running.stop()


class FailsOnce:
    """Fails the first time, when the other is there."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def run(self) -> None:
        self._replay.insert(1)
        if not lp.restart_count():
            raise ValueError("once more")


def test_threads_are_started_anew_together(launch_program: Any) -> None:
    replay = lp.CourierNode(Replay)
    program = _together(lp.PyClassNode(FailsOnce, replay.create_handle()), replay)
    policy = lp.RestartPolicy(backoff_s=0.01)
    result = launch_program(program, restart=policy).wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert len(result.restarts) == 1


@pytest.mark.slow
def test_nested_colocations_end_stop_and_fail_as_one(launch_program: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def nest(*nodes: Any) -> lp.Program:
        inner = lp.ColocationNode([*nodes, lp.CourierNode(Replay)])
        return _together(lp.CourierNode(Replay), inner)

    assert launch_program(nest(lp.PyNode(int))).wait().outcome is lp.Outcome.COMPLETED
    running = launch_program(nest(lp.PyNode(_wait, folder)), notice_s=60)
    poll_until((tmp_path / "asked.up").exists, 30)
    assert running.stop(40).killed == ()
    running = launch_program(nest(lp.PyNode(_step, folder)), notice_s=0.3)
    poll_until((tmp_path / "stepping").exists, 30)
    assert running.stop(40).killed == ("group[0]",)
    with pytest.raises(lp.NodeFailedError, match="broken inside"):
        launch_program(nest(lp.PyNode(_fail, folder))).wait()
