"""What users ask of checkpoints: where, how often, how many; when a node is saved."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.worker.state import NodeCheckpoints, NodeState


@pytest.mark.parametrize("given", ["some/where", Path("some/where")])
def test_a_relative_folder_is_taken_from_the_current_one_at_once(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = lp.Checkpoints(given)
    monkeypatch.chdir("/")
    assert asked.folder == tmp_path / "some" / "where"
    assert isinstance(asked.folder, Path)
    assert not asked.folder.exists()
    assert (asked.period_s, asked.keep) == (60.0, 2)
    assert dataclasses.replace(asked, keep=3) == lp.Checkpoints(asked.folder, keep=3)


WRONG: list[tuple[str, list[Any], type[Exception], str]] = [
    ("folder", [None, 3, b"bytes", ["list"], True], TypeError, "folder is a path"),
    ("folder", [""], ValueError, "folder cannot be empty"),
    ("period_s", [True, "60", [1], 1j], TypeError, "period_s is a number, not"),
    ("period_s", [0, -1.0, float("inf"), float("nan")], ValueError, ".*: it is above 0 and fin"),
    ("keep", [True, 2.0, "2", None], TypeError, "keep is a whole number"),
    ("keep", [0, -1], ValueError, "keep is at least 1"),
]


@pytest.mark.parametrize(("option", "values", "error", "words"), WRONG)
def test_wrong_options_are_refused(
    option: str, values: list[Any], error: type[Exception], words: str
) -> None:
    for value in values:
        options: Any = {"folder": "x", option: value}
        with pytest.raises(error, match=words):
            lp.Checkpoints(**options)


class SlowToSave:
    """Its first save waits for an event."""

    def __init__(self) -> None:
        self.steps = 0
        self.saved: list[int] = []
        self.saves, self.may_go_on = threading.Event(), threading.Event()

    def save(self, folder: Path) -> None:
        steps = self.steps
        (folder / "steps").write_text(str(steps))
        self.saves.set()
        assert self.may_go_on.wait(30)
        self.saved.append(steps)

    def restore(self, folder: Path) -> None:
        raise AssertionError


def test_a_node_that_is_asked_to_end_while_a_save_ends_is_saved_again(tmp_path: Path) -> None:
    is_asked = threading.Event()

    def leaves_well(error: BaseException) -> bool:
        assert isinstance(error, ConnectionError)
        return is_asked.is_set()

    def ask() -> None:
        is_asked.set()
        node.may_go_on.set()

    node = SlowToSave()
    kept = NodeCheckpoints(tmp_path / "node", period_s=0.01, keep=2, required=True)
    state = NodeState("node[0]", kept, leaves_well)

    def work() -> None:
        assert node.saves.wait(30)
        node.steps = 7
        threading.Timer(0.1, ask).start()
        raise ConnectionError  # its server has ended, as the first of all

    with pytest.raises(ConnectionError), state.kept(node):
        work()
    assert node.saved[-1] == 7
