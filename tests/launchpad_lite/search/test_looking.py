"""What is seen of a search in its folder, whatever became of it; and its trials, run again alone."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite import search
from launchpad_lite.parts.escapes import shown
from launchpad_lite.parts.joining import JoinInfo
from launchpad_lite.search._command_line import main
from launchpad_lite.search.results import row_of
from launchpad_lite.testing import poll_until
from tests.launchpad_lite.search.searches import ROOT
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Tasks, fail, square, survive

run = functools.partial(
    search.run, launcher="local_mt", workers=2, timing=QUICK, progress=False, ahead=4
)


def _draw(rng):
    return {"x": rng.random()}


def _evaluate(params):
    trial = search.current_trial()
    search.report(-1.0)
    with (trial.folder / "log").open("a") as file:
        file.write(f"seed {trial.seed}\x1b[2J\n")
    if trial.number == 1:
        raise ValueError(f"it is\x1b]0;owned\x07 {params['x']:.1f}")
    return params["x"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns that of a search whose second trial of four has failed."""
    run(search.RandomSearch(_evaluate, _draw, 4), folder=tmp_path / "run")
    return tmp_path / "run"


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def _command(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def test_a_search_is_loaded_as_it_was_and_nothing_in_its_folder_changes(folder: Path):
    before = _files(folder)
    result = search.load(folder)
    assert (result.state, len(result.trials), result.folder) == ("complete", 4, folder)
    assert isinstance(result.model, search.RandomSearch)
    assert result.best is not None
    assert result.best.score == max(each.params["x"] for each in result.trials if not each.error)
    assert result.errors == {"raised ValueError: it is\x1b]0;owned\x07 0.8": [1]}
    assert "failed 1 times, as trial 1: raised ValueError" in repr(result)
    assert (result.folder_of(result.best) / "log").exists()
    for command in ("show", "tail", "export"):
        assert _command(command, folder) == 0
    assert _files(folder) == before


def test_a_search_that_runs_is_seen_as_of_its_newest_checkpoint(tmp_path: Path, capsys):
    gate, folder = tmp_path / "gate", tmp_path / "run"

    def wait() -> int:
        poll_until(gate.exists, timeout_s=20)
        return 2

    found = []
    model = Tasks(search.Call(square, 1), wait)
    running = threading.Thread(target=lambda: found.append(run(model, folder=folder)))
    running.start()
    try:
        poll_until(lambda: any(folder.glob("model/*/0/0*")), timeout_s=20)
        result = search.load(folder)
        tail = threading.Thread(target=_command, args=("tail", folder))
        tail.start()
    finally:
        gate.touch()
        running.join()
    tail.join(20)
    assert (result.state, [each.score for each in result.trials]) == ("running", [1.0, None])
    assert search.load(folder).state == "complete"
    assert capsys.readouterr().out.splitlines() == [
        "     0 done    1.0                     {}",
        "     1 done    2.0                     {}",
    ]


def test_a_search_whose_trials_all_failed_is_seen_with_their_errors(tmp_path: Path, capsys):
    with pytest.raises(search.SearchError, match="all trials have failed"):
        run(Tasks(*[search.Call(fail, x) for x in "aab"]), folder=tmp_path)
    result = search.load(tmp_path)
    assert result.state == "failed"
    assert result.errors == {"raised KeyError: 'a'": [0, 1], "raised KeyError: 'b'": [2]}
    assert _command("show", tmp_path) == 0
    assert f"{tmp_path}: failed\n" in (text := capsys.readouterr().out)
    assert "failed 2 times, as trial 0: raised KeyError: 'a'\n" in text


_MODULE = """
from launchpad_lite import search
from launchpad_lite.parts.escapes import shown

class Mine(search.RandomSearch):
    maximize = False

class Point:
    x = 1.0

def evaluate(params):
    return params["x"]
"""


def test_a_search_is_seen_where_its_code_is_not(tmp_path: Path, monkeypatch):
    (tmp_path / "gone.py").write_text(_MODULE)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        import gone  # type: ignore[import-not-found]

        run(gone.Mine(gone.evaluate, _draw, 3, maximize=False), folder=tmp_path / "a")
        run(Tasks(search.Call(repr, gone.Point())), folder=tmp_path / "b")
        run(Tasks(search.Call(lambda at: 1, at=gone.Point())), folder=tmp_path / "c")
    del sys.modules["gone"]
    result = search.load(tmp_path / "a")
    assert "No module named 'gone'" in result.model.missing  # type: ignore[attr-defined]
    assert result.best is not None
    assert result.best.score == min(each.params["x"] for each in result.trials)
    assert search.load(tmp_path / "b").best is None
    with pytest.raises(search.SearchError, match="No module named 'gone'"):
        search.load(tmp_path / "c")


def _begun(folder: Path) -> None:
    folder.joinpath("search.json").touch()


def _early(folder: Path) -> None:
    state = folder / "model" / "search_model" / "0" / "00000001" / "state"
    state.mkdir(parents=True)
    import pickle

    (state / "model.pickle").write_bytes(pickle.dumps({"trials": []}))


def _open_to_others(folder: Path) -> None:
    _early(folder)
    (folder / "model" / "search_model" / "0").chmod(0o777)


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (Path.rmdir, "run is no folder= of a search, or none of its trials has ended"),
        (lambda folder: None, "is no folder= of a search"),
        (_begun, "none of its trials has ended"),
        (_early, r"cannot be read by this program: KeyError\('maximize'\)"),
        (_open_to_others, "others could replace what is there .* chmod"),
    ],
)
def test_a_folder_without_a_search_that_can_be_seen_says_what_to_do(
    prepare, text, tmp_path, capsys
):
    (tmp_path / "run").mkdir()
    prepare(tmp_path / "run")
    with pytest.raises(search.SearchError, match=text):
        search.load(tmp_path / "run")
    assert _command("show", tmp_path / "run") == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_all_about_one_trial_is_shown_without_what_a_terminal_obeys(folder: Path, capsys):
    assert _command("show", folder, 1) == 0
    text = capsys.readouterr().out
    for line in (
        "number        1",
        "state         failed",
        "params.x      0.7579544029403025",
        "seed          2839049726",
        "attempts      1",
        "curve         [(0, -1.0)]",
        f"log           {folder}/trials/1/log",
    ):
        assert f"{line}\n" in text
    assert "raise ValueError(" in text
    assert "\x1b" not in text
    assert _command("show", folder, 4) == 1
    assert "has the trials 0 to 3" in capsys.readouterr().err
    assert _command("show", folder, 1, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["folder"]) == (1, str(folder))
    assert [(each["number"], each["curve"]) for each in found["trials"]] == [(1, [[0, -1.0]])]


def test_what_a_task_prints_is_followed_without_what_a_terminal_obeys(folder: Path, capsys):
    assert _command("tail", folder, 1) == 0
    assert capsys.readouterr().out == "seed 2839049726\n"
    (folder / "trials" / "1" / "log").unlink()
    assert _command("tail", folder, 1) == 1
    assert f"trial 1 has no log: there is no {folder}/trials/1/log" in capsys.readouterr().err


def test_trials_are_exported_as_tables(folder: Path, tmp_path: Path, capsys):
    assert _command("export", folder) == 0
    assert capsys.readouterr().out == shown((folder / "trials.csv").read_bytes().decode())
    assert _command("export", folder, "--format=json", "-o", tmp_path / "trials.json") == 0
    rows = json.loads((tmp_path / "trials.json").read_text())
    assert [row["state"] for row in rows] == ["done", "failed", "done", "done"]
    assert (rows[1]["seed"], rows[1]["curve"]) == (2839049726, [[0, -1.0]])


class Again(search.RandomSearch):
    """Its trials go on from the first one."""

    def ask(self):
        task = super().ask()
        if task is not None and self._asked > 1:
            task.parent = 0
        return task


@pytest.mark.parametrize("number", [0, 1])
def test_a_trial_runs_again_alone_with_all_that_it_had_but_its_folder(number, tmp_path, capsys):
    seen: list[Any] = []

    def look(params):
        trial = search.current_trial()
        seen.append((trial.number, trial.seed, trial.parent, params, trial.folder))
        search.report(2.5)
        (trial.folder / "checkpoint").touch(exist_ok=False)
        assert number == 0 or trial.number == 0, "one that has failed"
        return 7

    Again.look = staticmethod(look)  # type: ignore[attr-defined]
    result = run(Again(_look, _draw, 2, seed=5), folder=tmp_path)
    before = _files(tmp_path)
    again = contextlib.nullcontext() if number == 0 else pytest.raises(AssertionError, match="one")
    with again:
        assert search.rerun(tmp_path, number) == 7
    assert capsys.readouterr().out == "reports 0 2.5\n"
    first, second = [each for each in seen if each[0] == number]
    assert first[:4] == second[:4]
    parent = tmp_path / "trials" / "0" if number else None
    assert first[1:] == (
        result.trials[number].seed,
        parent,
        first[3],
        tmp_path / "trials" / str(number),
    )
    assert second[4].parent == tmp_path / "reruns"
    shutil.rmtree(second[4].parent)
    assert _files(tmp_path) == before


def _look(params):
    return Again.look(params)  # type: ignore[attr-defined]


def test_a_search_that_may_run_elsewhere_is_followed_until_ctrl_c(folder: Path):
    JoinInfo("127.0.0.1:1", None).write(folder)
    there = json.loads((folder / "search.json").read_text())
    (folder / "search.json").write_text(json.dumps(there | {"process": "process 7 on elsewhere"}))
    state = "unknown: process 7 on elsewhere does not answer here; it runs, or was killed"
    assert search.load(folder).state == state
    command = [sys.executable, "-m", "launchpad_lite.search", "tail", str(folder)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, cwd=ROOT) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline().startswith(b"     0 done    0.8444218515250481")
        tail.send_signal(signal.SIGINT)
        _, errors = tail.communicate(timeout=20)
    assert (tail.returncode, errors) == (130, b"")


def test_a_reader_may_have_seen_enough(folder: Path):
    command = [sys.executable, "-m", "launchpad_lite.search", "export", str(folder)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (141, b"")


def test_of_other_models_small_tasks_that_failed_can_be_run_again(tmp_path: Path):
    tasks = [search.Call(fail, "a"), search.Call(fail, b"x" * (1 << 17)), search.Call(square, 2)]
    run(Tasks(*tasks), folder=tmp_path)
    with pytest.raises(KeyError, match="a"):
        search.rerun(tmp_path, 0)
    for number in (1, 2, 3):
        with pytest.raises(search.SearchError, match=f"trial {number} has not ended, or its task"):
            search.rerun(tmp_path, number)


def _fail_once(params):
    trial = search.current_trial()
    mark = trial.folder / str(trial.seed)
    if not mark.exists():
        mark.touch()
        raise ValueError
    return trial.seed


def test_a_trial_has_the_same_seed_whenever_it_runs(tmp_path: Path):
    for trials in (2, 4):
        result = run(search.RandomSearch(_fail_once, _draw, trials, retries=1), folder=tmp_path)
        assert [each.score for each in result.trials] == [each.seed for each in result.trials]
    seeds = {each.seed for each in result.trials}
    assert len(seeds) == 4
    assert {row["seed"] for row in map(row_of, search.load(tmp_path).trials)} == seeds


def test_a_trial_whose_worker_was_lost_finds_its_own_folder_again(tmp_path: Path):
    folder = tmp_path / "run"
    umask = os.umask(0o002)
    try:
        model = search.RandomSearch(survive, _draw, 1)
        result = run(model, folder=folder, launcher="test_mp", workers=1)
    finally:
        os.umask(umask)
    (trial,) = result.trials
    assert (trial.score, trial.attempts, trial.lost_workers) == (1.0, 2, 1)
    made = [result.folder_of(trial), result.folder_of(trial).parent]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 2
    assert "workers lost: 1; runs: 2" in repr(search.load(folder))


def test_without_a_folder_of_the_search_a_trial_has_none():
    result = run(Tasks(lambda: str(search.current_trial().folder), search.Call(square, 1)))
    text = "trials have folders only if the search has one: search.run(folder=)"
    assert text in result.trials[0].error
    with pytest.raises(search.SearchError, match=re.escape(text)):
        result.folder_of(result.trials[0])
