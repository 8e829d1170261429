"""Replay buffers on Reverb itself, which needs Python 3.11 or older."""

import importlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.engines import needs_reverb

pytestmark = [
    pytest.mark.slow,  # each process loads TensorFlow
    needs_reverb,
    # TensorFlow uses what is deprecated; that is no matter of ours. Nodes filter as the test does.
    pytest.mark.filterwarnings("ignore"),
]
#: For a server to end in, whose tables are kept only if it does.
_NOTICE_S = 60.0


def make_tables() -> list[Any]:
    import reverb

    return [reverb.Table.queue("queue", 100)]


def make_checkpointer(folder: Path) -> Any:
    import reverb

    return reverb.checkpointers.DefaultCheckpointer(str(folder))


class Writer:
    """Inserts numbers, and says so with a file."""

    def __init__(self, replay: Any, numbers: int, done: Path) -> None:
        self._replay, self._numbers, self._done = replay, numbers, done

    def run(self) -> None:
        import numpy as np

        for number in range(self._numbers):
            self._replay.insert(np.float32(number), {"queue": 1.0})
        self._done.touch()


class Reader:
    """Writes down what is in the queue."""

    def __init__(self, replay: Any, numbers: int, output: Path) -> None:
        self._replay, self._numbers, self._output = replay, numbers, output

    def run(self) -> None:
        found = [
            str(int(item.data[0]))
            for sample in self._replay.sample("queue", self._numbers)
            for item in sample
        ]
        self._output.write_text(f"{type(self._replay).__name__} {' '.join(found)}")


def _program(node: lp.ReverbNode, *others: tuple[Any, ...]) -> lp.Program:
    program = lp.Program("replays")
    replay = program.add_node(node, label="replay")
    for constructor, *arguments in others:
        program.add_node(
            lp.PyClassNode(constructor, replay, *arguments), label=constructor.__name__.lower()
        )
    return program


def _fill(launch_program: Any, node: lp.ReverbNode, done: Path, **how: Any) -> None:
    program = _program(node, (Writer, 3, done))
    running = launch_program(program, "test_mp", notice_s=_NOTICE_S, **how)
    assert running.wait(90).outcome is lp.Outcome.COMPLETED
    assert done.exists()


def _contents(launch_program: Any, node: Any, output: Path, **how: Any) -> str:
    program = _program(node, (Reader, 3, output))
    result = launch_program(program, "test_mp", notice_s=_NOTICE_S, **how).wait(90)
    assert (result.outcome, result.killed) == (lp.Outcome.COMPLETED, ())
    return output.read_text()


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_nodes_share_a_queue_and_nothing_is_left(
    launch_program: Any, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    output = tmp_path / "out"
    program = _program(lp.ReverbNode(make_tables), (Writer, 3, tmp_path / "d"), (Reader, 3, output))
    result = launch_program(program, launcher, notice_s=_NOTICE_S).wait(90)
    assert (result.outcome, result.killed) == (lp.Outcome.COMPLETED, ())
    assert output.read_text() == "Client 0 1 2"
    # Its entry in the list of running programs goes a moment later.
    poll_until(lambda: not list(temporary.iterdir()))


def test_the_folder_of_the_launch_keeps_the_tables_whatever_the_node_says(
    launch_program: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"

    def node() -> lp.ReverbNode:
        return lp.ReverbNode(make_tables, lambda: 1 / 0)

    for index in range(3):  # one more than stay
        checkpoints = lp.Checkpoints(folder, keep=2)
        _fill(launch_program, node(), tmp_path / f"done{index}", checkpoints=checkpoints)
    contents = _contents(launch_program, node(), tmp_path / "out", checkpoints={"replay": folder})
    assert contents.startswith("Client 0 1 2")
    names = sorted(path.name for path in (folder / "replay" / "0").iterdir())
    assert names == [".lock", "00000003", "00000004"]


def test_the_checkpointer_of_the_node_keeps_the_tables(launch_program: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"

    def node() -> lp.ReverbNode:
        return lp.ReverbNode(make_tables, lambda: make_checkpointer(folder))

    _fill(launch_program, node(), tmp_path / "done")
    assert len(list(folder.glob("*/DONE"))) == 1
    assert _contents(launch_program, node(), tmp_path / "out") == "Client 0 1 2"


@pytest.mark.parametrize("period_of", ["node", "launch"])
def test_a_server_that_is_killed_goes_on_from_its_last_checkpoint(
    launch_program: Any, tmp_path: Path, period_of: str
) -> None:
    folder, done = tmp_path / "checkpoints", tmp_path / "done"
    own = period_of == "node"
    node = lp.ReverbNode(make_tables, checkpoint_time_delta_minutes=0.2 / 60 if own else None)
    checkpoints = lp.Checkpoints(folder, None if own else 0.2)
    running = launch_program(
        _program(node, (Writer, 3, done), (Waits,)),
        "test_mp",
        restart={"replay": lp.RestartPolicy("on_failure", backoff_s=0.01)},
        checkpoints={"replay": checkpoints},
        notice_s=_NOTICE_S,
    )
    poll_until(done.exists, 60)
    versions = folder / "replay" / "0"

    def newest() -> int:
        return max((int(path.name) for path in versions.glob("0*")), default=0)

    poll_until(newest, 30)
    # The next but one has certainly begun after the last insert.
    after = newest() + 2
    poll_until(lambda: newest() >= after, 30)
    (pid,) = (each.pid for each in running.running.status() if each.name == "replay[0]")
    os.kill(pid, signal.SIGKILL)
    client = running.client("replay")
    lost: Any = importlib.import_module("reverb").ReverbError

    def size() -> int:
        try:
            return int(client.server_info(timeout=1)["queue"].current_size)
        except (RuntimeError, lost):  # it is down, or coming up
            return 0

    poll_until(lambda: size() == 3, 60)
    result = running.stop()
    assert [each.node for each in result.restarts] == ["replay[0]"]
    assert result.killed == ()


class Waits:
    """Lets the program go on until it is stopped."""

    def __init__(self, replay: Any) -> None:
        del replay

    def run(self) -> None:
        lp.wait_for_stop()


def test_tables_that_fail_are_to_blame(launch_program: Any) -> None:
    with pytest.raises(lp.NodeFailedError, match="At least one table must be provided"):
        launch_program(_program(lp.ReverbNode(list)), "test_mp").wait(60)
