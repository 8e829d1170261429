"""The state of nodes survives where the user wants it, and notices from outside give time to save."""

import contextlib
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import call_until_answered
from tests.launchers.counting import Counter
from tests.launchers.running import first_pid, program_of
from tests.launchers.scripts import Script

QUICK = lp.RestartPolicy(backoff_s=0.01, max_restarts=50)


class Runner(Counter):
    """Counts while it runs, and never looks at the stop."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def run(self) -> None:
        while True:
            self.add()
            self._other.add(0)


class Unsaved(Counter):
    def save(self, folder: Path) -> None:
        raise OSError("no way to save")


class Pair:
    """Two numbers that are equal where it says so."""

    def __init__(self) -> None:
        self.first = self.second = 0
        self.seen: list[tuple[int, int]] = []

    def run(self) -> None:
        lp.checkpoint_here()  # before anything changes
        while len(self.seen) < 3:
            self.first += 1
            lp.wait_for_stop(0.001)
            self.second += 1
            lp.checkpoint_here()

    def save(self, folder: Path) -> None:
        self.seen.append((self.first, self.second))

    def restore(self, folder: Path) -> None: ...


class Archive:
    """Its methods are of documents, not of its state."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save(self, document: str) -> list[str]:
        self.saved.append(document)
        return self.saved

    def restore(self, document: str) -> str:
        return document


def make_archive() -> Archive:
    return Archive()


class Stateless:
    def ping(self) -> None: ...


def _program(constructor: Any = Counter) -> lp.Program:
    return program_of(counter=lp.CourierNode(constructor))


def test_state_is_saved_on_a_period(launch_program: Any, tmp_path: Path) -> None:
    checkpoints = lp.Checkpoints(tmp_path / "checkpoints", period_s=0.05, keep=1)
    running = launch_program(_program(), checkpoints=checkpoints)
    running.client("counter").add(42)

    def saved() -> bool:
        for file in tmp_path.glob("checkpoints/counter/0/0*/state/value.json"):
            with contextlib.suppress(FileNotFoundError):  # the next one takes its place
                if file.read_text() == "42":
                    return True
        return False

    poll_until(saved)


def test_a_node_that_says_where_its_state_is_whole_is_saved_there_only(
    launch_program: Any, tmp_path: Path
) -> None:
    pair = Pair()
    program = program_of(pair=lp.PyClassNode(lambda: pair))
    checkpoints = lp.Checkpoints(tmp_path, period_s=0.01)
    launch_program(program, "local_mt", checkpoints=checkpoints).wait()
    assert len(pair.seen) == 4  # and one at its end
    assert all(first == second for first, second in pair.seen)


def test_a_node_that_ends_since_its_calls_end_is_saved_too(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("runner")
    other = program.add_node(lp.CourierNode(Counter), label="other")
    program.add_node(lp.CourierNode(Runner, other), label="runner")
    running = launch_program(program, checkpoints={"runner": tmp_path}, notice_s=30)
    poll_until(lambda: running.client("runner").add(0) > 3)
    running.stop()
    (file,) = tmp_path.glob("runner/0/0*/state/value.json")
    assert int(file.read_text()) > 3


def test_a_folder_for_all_leaves_nodes_without_state_alone(
    launch_program: Any, tmp_path: Path
) -> None:
    program = _program(Stateless)
    program.add_node(lp.CourierNode(Counter), label="other")
    running = launch_program(program, "test_mt", checkpoints=tmp_path / "checkpoints")
    running.client("counter").ping()
    running.client("other").add()  # a node that is asked to stop before it has begun saves nothing
    running.stop()
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["other"]


def test_save_and_restore_of_a_node_that_keeps_its_state_are_hidden_from_callers(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(_program(), "test_mt", checkpoints=tmp_path / "checkpoints")
    assert courier.list_methods(running.client("counter")) == ["add"]
    running.stop()


@pytest.mark.parametrize("node", [lp.CourierNode, lp.PyClassNode])
@pytest.mark.parametrize("constructor", [Archive, functools.partial(Archive)])
@pytest.mark.parametrize("colocated", [False, True])
def test_save_of_something_else_is_a_mistake_of_a_program_with_checkpoints(
    node: Any, constructor: Any, colocated: bool, tmp_path: Path
) -> None:
    program = lp.Program("archive")
    archive = node(constructor)
    program.add_node(lp.ColocationNode([archive]) if colocated else archive, label="archive")
    lp.plan(program, "test_mt")
    with pytest.raises(
        lp.ProgramError, match=r"archive\[0\].*Archive has save\(document: str\).*`folder`"
    ):
        lp.plan(program, "test_mt", checkpoints=tmp_path)


def test_save_of_something_else_is_not_called_where_it_is_found_late(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(_program(make_archive), "test_mt", checkpoints=tmp_path)
    with pytest.raises(
        lp.NodeFailedError, match=r"counter\[0\].*Archive has save\(document: str\)"
    ):
        running.wait()


def test_save_of_something_else_is_served_as_any_method(launch_program: Any) -> None:
    running = launch_program(_program(Archive), "test_mt")
    assert running.client("counter").save("a") == ["a"]
    running.stop()


def test_state_that_cannot_be_saved_at_the_end_is_a_failure(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(
        _program(Unsaved), "test_mt", checkpoints=tmp_path / "checkpoints", notice_s=30
    )
    running.client("counter").add()
    with pytest.raises(lp.NodeFailedError, match="no way to save"):
        running.stop()


@pytest.mark.slow
def test_nothing_half_done_is_left_of_a_node_that_is_killed_while_it_saves(
    launch_program: Any, tmp_path: Path
) -> None:
    program = program_of(hanging=lp.CourierNode(Hanging, str(tmp_path / "saving")))
    folder = tmp_path / "checkpoints"
    running = launch_program(program, "test_mp", checkpoints=folder, notice_s=60)
    running.client("hanging").add()
    running.running.request_stop("so that it saves")
    poll_until((tmp_path / "saving").exists)
    running.running.kill()
    result = running.wait(30)
    assert result.killed == ("hanging[0]",)
    assert [path.name for path in (folder / "hanging" / "0").iterdir()] == [".lock"]


class Torn:
    """Is broken off in the middle of a change, while a checkpoint waits for the end of that."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._waits = folder / "a checkpoint waits"

    def save(self, folder: Path) -> None:
        if self._done:
            self._waits.touch()
        with self._lock:
            (folder / "done").write_text(str(self._done))

    def restore(self, folder: Path) -> None: ...

    def run(self) -> None:
        with self._lock:
            self._done = 1
            while True:
                time.sleep(0.01)


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_no_checkpoint_is_made_of_what_a_forced_end_has_broken_off(
    launch_program: Any, tmp_path: Path, launcher: str
) -> None:
    program = program_of(torn=lp.PyClassNode(Torn, tmp_path))
    checkpoints = lp.Checkpoints(tmp_path / "kept", period_s=0.02)
    running = launch_program(program, launcher, notice_s=0.1, checkpoints={"torn": checkpoints})
    poll_until((tmp_path / "a checkpoint waits").exists)
    running.stop()
    assert [each.read_text() for each in (tmp_path / "kept").rglob("done")] in ([], ["0"])


class Hanging(Counter):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = Path(mark)

    def save(self, folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        self._mark.touch()
        time.sleep(1000)


# Notices from outside


def test_a_node_told_from_outside_to_end_saves_and_comes_back(
    launch_program: Any, tmp_path: Path
) -> None:
    running = launch_program(
        _program(), "test_mp", restart=QUICK, checkpoints=tmp_path, notice_s=30
    )
    client = running.client("counter")
    assert client.add(7) == 7
    os.kill(first_pid(running), signal.SIGTERM)
    poll_until(lambda: running.running.status()[0].restarts == 1)
    assert call_until_answered(client.add) == 8
    (restart,) = running.stop().restarts
    assert "from outside" in restart.failure.summary
    assert "SIGTERM" in restart.failure.summary


def test_a_node_told_from_outside_to_end_ends_its_program_in_order_without_a_policy(
    launch_program: Any, tmp_path: Path
) -> None:
    program = _program()
    program.add_node(lp.CourierNode(Counter), label="other")
    running = launch_program(program, "test_mp", checkpoints=tmp_path, notice_s=30)
    running.client("counter").add(1)
    running.client("other").add(2)
    os.kill(first_pid(running), signal.SIGTERM)
    with pytest.raises(SystemExit) as exited:
        running.wait()
    assert exited.value.code == 143
    assert running.running.result.outcome is lp.Outcome.INTERRUPTED
    assert "counter[0]" in running.running.result.reason
    values = sorted(file.read_text() for file in tmp_path.glob("*/0/0*/state/value.json"))
    assert values == ["1", "2"]


@pytest.mark.slow
def test_a_signal_to_every_process_of_the_program_is_one_orderly_stop(tmp_path: Path) -> None:
    source = """
        import pathlib, json
        import launchpad_lite as lp

        class Node:
            def __init__(self, index, other=None):
                self.index, self.other = index, other

            def get(self):
                return self.index

            def run(self):
                if self.other is not None:
                    self.other.get()
                pathlib.Path(f"up{self.index}").touch()
                lp.wait_for_stop()

            def save(self, folder):
                (folder / "index").write_text(str(self.index))

            def restore(self, folder):
                pass

        program = lp.Program("preempted")
        other = program.add_node(lp.CourierNode(Node, 0), label="other")
        with program.group("node"):
            for index in range(1, 5):
                program.add_node(lp.CourierNode(Node, index, other))
        lp.launch(program, restart={"node": "on_failure"}, checkpoints="state", notice_s=60)
        pathlib.Path("launched").touch()
    """
    with Script(tmp_path, source) as script:
        process = script.start()
        script.wait_for("up", 5)
        script.wait_for("launched")  # nodes may be up before signals are looked at
        everybody = [each.pid for each in script.processes()]
        for pid in everybody:  # as a batch system does
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        # The second, if the script gets its signal when the program has ended already.
        assert process.returncode in (143, -signal.SIGTERM), stderr
        script.assert_gone()
    saved = sorted(file.read_text() for file in tmp_path.glob("state/*/*/0*/state/index"))
    assert saved == ["0", "1", "2", "3", "4"]
