import collections
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from examples.map_reduce.program import (
    default_paths,
    library,
    make_program,
    reducer_of,
    table,
    words_of,
)
from launchpad_lite.testing import poll_until
from tests.examples.running import ROOT, run_example
from tests.launchers.scripts import without_logs_line


def count_alone(paths: list[Path]) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for path in paths:
        counts.update(words_of((library() / path).read_text(encoding="utf-8", errors="replace")))
    return dict(counts)


def test_only_files_are_read_that_every_build_of_this_python_has() -> None:
    paths = default_paths(10_000)
    assert not any(path.is_absolute() for path in paths)
    names = {path.parts[0].removesuffix(".py") for path in paths}
    assert names <= sys.stdlib_module_names
    # Apart in Debian and others.
    assert not names & {"tkinter", "idlelib", "turtle", "lib2to3", "distutils", "ensurepip"}


def test_files_of_the_user_are_where_they_were_named_whatever_is_in_them(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes("caf\xe9 und tee und Tee".encode("latin-1"))
    output = tmp_path / "counts.json"
    monkeypatch.chdir(tmp_path)
    program = make_program(output=output, paths=[Path("empty"), Path("latin")])
    monkeypatch.chdir(ROOT)
    launch_program(program, "test_mt").wait()
    assert json.loads(output.read_text()) == {"caf": 1, "und": 2, "tee": 2}


def test_a_file_that_is_missing_ends_the_program_and_is_named(
    launch_program: Any, tmp_path: Path
) -> None:
    paths = [library() / "inspect.py", tmp_path / "nothing.py"]
    with pytest.raises(lp.NodeFailedError, match=r"mapper\[1\].*nothing\.py"):
        launch_program(make_program(paths=paths), "test_mt").wait()


def test_without_an_output_the_reporter_prints_the_table(
    launch_program: Any, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_text("two words")
    launch_program(make_program(paths=[path]), "test_mt").wait()
    shown = capsys.readouterr().out
    assert "100%   1/1 files" in shown
    assert shown.endswith(table(count_alone([path])) + "\n")


def test_every_reducer_gets_words_and_the_same_ones_in_every_process() -> None:
    assert [reducer_of(word, 3) for word in ("self", "def", "the", "return")] == [0, 2, 0, 1]


@pytest.mark.slow
def test_the_demo_shows_progress_and_a_table_and_leaves_nothing() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = run_example("map_reduce", "--files=3", "--reducers=2")
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    assert "[reporter[0]] 100%   3/3 files" in done.stdout
    assert table(count_alone(default_paths(3))) in done.stdout
    assert "words, " in done.stdout
    folder = Path(done.stdout.partition("\nLogs: ")[2].strip())
    assert len(list((folder / "mapper").glob("*.log"))) == 3
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left
    # Workers lead sessions of their own, so look for them by what they are told apart by, too. Who
    # sees to it that they end may be the last one to.
    poll_until(lambda: not any(_is_of(process, folder) for process in psutil.process_iter()))


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in file.path for file in process.open_files())
    except psutil.Error:
        return False
