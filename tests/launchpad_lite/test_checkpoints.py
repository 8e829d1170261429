"""What users ask of checkpoints: where, how often, how many."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp


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
    (
        "period_s",
        [0, -1.0, float("inf"), float("nan")],
        ValueError,
        "period_s cannot be .*: it is above 0 and finite",
    ),
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
