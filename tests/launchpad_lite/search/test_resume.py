"""Searches whose script ends in the middle, and is called again."""

import collections
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite import search
from tests.courier.waiting import wait_until
from tests.launchers.marks import Marked, mark_all
from tests.launchpad_lite.search.searches import ROOT

pytestmark = pytest.mark.slow

_TASKS = 240
_SCRIPT = """
import json, sys
from pathlib import Path

import launchpad_lite as lp
from launchpad_lite import search
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Counting

if __name__ == "__main__":
    here = Path(sys.argv[1])
    result = search.run(
        Counting(int(sys.argv[2]), here / "notes", 0.1),
        workers=3,
        folder=here / "search",
        timing=QUICK,
        checkpoints={"search_model": lp.Checkpoints(here / "search" / "model", period_s=0.5)},
    )
    print(json.dumps(sorted(result.model.told.items())))
"""


class Script:
    """The script of a user, and what it has left on disk."""

    def __init__(self, folder: Path, marked: Marked) -> None:
        self._folder = folder
        self._marked = marked
        self._path = folder / "tune.py"
        self._path.write_text(_SCRIPT)
        (folder / "notes").touch()

    def start(self) -> "subprocess.Popen[str]":
        """Calls it."""
        return started(self._path, self._folder, _TASKS, start_new_session=True)

    def start_until(self, begun: int) -> "subprocess.Popen[str]":
        """Calls it, and waits until so many different tasks have begun."""
        process = self.start()
        wait_until(lambda: len(self.runs()) >= begun, timeout_s=60)
        return process

    def finish(self) -> "collections.Counter[int]":
        """Calls it, and returns how often its model was told each task."""
        process = self.start()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        self._marked.assert_gone()
        return collections.Counter(dict(json.loads(output.splitlines()[-1])))

    def runs(self) -> "collections.Counter[int]":
        return collections.Counter(map(int, (self._folder / "notes").read_text().split()))

    def rows(self) -> list[dict[str, str]]:
        with (self._folder / "search" / "trials.csv").open() as file:
            return list(csv.DictReader(file))

    def told(self) -> set[int]:
        """Returns the tasks whose results its newest checkpoint has."""
        trials = search.load(self._folder / "search").trials
        return {each.number for each in trials if each.state is search.TrialState.DONE}


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    yield from mark_all(monkeypatch)


def started(script: Path, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """Calls a script."""
    return subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_after_all_was_killed_the_same_call_goes_on(tmp_path: Path, marked: Marked):
    script = Script(tmp_path, marked)
    first = script.start_until(80)
    marked.kill()
    first.communicate()
    marked.assert_gone()
    told, runs = [script.told()], [script.runs()]
    second = script.start_until(160)
    os.killpg(second.pid, signal.SIGKILL)  # nodes are orphans, and end by themselves
    second.communicate()
    marked.assert_gone()
    told.append(script.told())
    runs.append(script.runs())
    assert script.finish() == collections.Counter(range(_TASKS))
    rows = script.rows()
    assert [int(row["number"]) for row in rows] == list(range(_TASKS))
    assert {row["state"] for row in rows} == {"done"}
    assert 0 < len(told[0]) < len(told[1])
    for safe, before, after in zip(told, runs, [runs[1], script.runs()], strict=True):
        assert not safe.intersection(after - before)
    print(f"{script.runs().total()} runs of {_TASKS} tasks")


def test_after_ctrl_c_the_same_call_goes_on(tmp_path: Path, marked: Marked):
    script = Script(tmp_path, marked)
    first = script.start_until(60)
    begun_at = time.monotonic()
    os.killpg(first.pid, signal.SIGINT)
    output, _ = first.communicate(timeout=30)
    assert first.returncode == -signal.SIGINT, output
    marked.assert_gone()
    print(f"ended {time.monotonic() - begun_at:.1f} s after Ctrl-C")
    assert script.finish() == collections.Counter(range(_TASKS))
    assert script.runs() == collections.Counter(range(_TASKS))
    assert len(script.rows()) == _TASKS


_CHANGING = """
import sys, time
from pathlib import Path

from launchpad_lite import search
from tests.launchpad_lite.search.tasks_for_tests import QUICK


def train(params):
    with (Path(sys.argv[1]) / "runs").open("a") as file:
        file.write(f"{value}\\n")
    time.sleep(0.1)
    return {value}


class Many(search.Model):
    total = {trials}
    asked = 0

    def ask(self):
        self.asked += 1
        return search.Call(train, {{"x": self.asked}}) if self.asked <= self.total else None


if __name__ == "__main__":
    result = search.run(Many(), workers=2, folder=Path(sys.argv[1]) / "search", timing=QUICK, ahead=20)
    print("RESULT", sorted({{trial.score for trial in result.trials}}), len(result.trials))
"""


def test_after_a_stop_the_newest_code_of_the_script_runs(tmp_path: Path, marked: Marked):
    """Also of tasks that waited in the broker."""
    runs = tmp_path / "runs"
    runs.touch()

    def start(value: int, trials: int) -> "subprocess.Popen[str]":
        (tmp_path / "tune.py").write_text(_CHANGING.format(value=value, trials=trials))
        return started(tmp_path / "tune.py", tmp_path)

    first = start(1, 60)
    wait_until(lambda: len(runs.read_text().split()) >= 10, timeout_s=60)
    marked.kill()
    first.communicate()
    old = len(runs.read_text().split())
    second = start(2, 70)
    output, _ = second.communicate(timeout=120)
    assert "tune.py has changed: what is tried from now on runs its newest code" in output
    assert "RESULT [1.0, 2.0] 70" in output
    assert runs.read_text().split()[old:] == ["2"] * (len(runs.read_text().split()) - old)


_POPULATION = """
import sys, time
from pathlib import Path

import launchpad_lite as lp
from launchpad_lite import search
from tests.launchpad_lite.search.tasks_for_tests import QUICK


def train(params):
    trial = search.current_trial()
    line = trial.folder / "line"
    if not line.exists():  # else it has lost its worker
        before = "" if trial.parent is None else (trial.parent / "line").read_text()
        line.write_text(f"{before}/{trial.number}")
    time.sleep(0.1)
    return params


if __name__ == "__main__":
    here = Path(sys.argv[1])
    search.run(
        search.PopulationBasedTraining(
            train, lambda rng: rng.random(), lambda x, rng: x * 1.1, population=4, rounds=12
        ),
        workers=2,
        folder=here,
        timing=QUICK,
        checkpoints={"search_model": lp.Checkpoints(here / "model", period_s=0.5)},
    )
"""


def test_a_population_goes_on_after_a_kill_from_checkpoints_of_its_own_trials(
    tmp_path: Path, marked: Marked
):
    (tmp_path / "tune.py").write_text(_POPULATION)
    lines = tmp_path / "search" / "trials"
    for count in (14, 30):
        process = started(tmp_path / "tune.py", tmp_path / "search")
        wait_until(lambda least=count: len([*lines.glob("*/line")]) >= least, timeout_s=60)
        marked.kill()
        process.communicate()
        marked.assert_gone()
    process = started(tmp_path / "tune.py", tmp_path / "search")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    with (tmp_path / "search" / "trials.csv").open() as file:
        parents = {row["number"]: row["parent"] for row in csv.DictReader(file)}
    assert len(parents) == 4 * 12
    for number, parent in parents.items():
        before = (lines / parent / "line").read_text() if parent else ""
        assert (lines / number / "line").read_text() == f"{before}/{number}"


_MOVED = """
import sys, time
from pathlib import Path

from launchpad_lite import search
from tests.launchpad_lite.search.tasks_for_tests import QUICK


def train(params):
    trial = search.current_trial()
    mark = trial.folder / "mark"
    with open(sys.argv[1], "a") as file:
        print(trial.number, trial.seed, mark.exists(), trial.folder, file=file)
    mark.touch()
    time.sleep(0.1)
    return 1.0


def draw(rng):
    return {"x": rng.random()}


if __name__ == "__main__":
    model = search.RandomSearch(train, draw, 50)
    search.run(model, workers=2, folder=sys.argv[2], timing=QUICK, ahead=20)
"""


def test_a_search_that_was_killed_goes_on_in_a_folder_that_was_moved(
    tmp_path: Path, marked: Marked
):
    """As on another machine that sees it elsewhere."""
    (tmp_path / "tune.py").write_text(_MOVED)
    (runs := tmp_path / "runs").touch()

    def lines() -> list[list[str]]:
        return [line.split() for line in runs.read_text().splitlines()]

    first = started(tmp_path / "tune.py", runs, tmp_path / "a")
    wait_until(lambda: len(lines()) >= 10, timeout_s=60)
    assert search.load(tmp_path / "a").state == "running"
    marked.kill()
    first.communicate()
    old = lines()
    before = search.load(tmp_path / "a")
    assert before.state == "stopped"
    there = json.loads((tmp_path / "a" / "search.json").read_text())
    there["process"] = "process 1 on elsewhere"
    (tmp_path / "a" / "search.json").write_text(json.dumps(there))
    state = search.load(tmp_path / "a").state
    assert state == "unknown: process 1 on elsewhere does not answer here; it runs, or was killed"
    (tmp_path / "a").rename(tmp_path / "b")
    output, _ = started(tmp_path / "tune.py", runs, tmp_path / "b").communicate(timeout=120)
    after = search.load(tmp_path / "b")
    assert (after.state, len(after.trials)) == ("complete", 50), output
    assert {each.state.value for each in after.trials} == {"done"}
    again = lines()[len(old) :]
    assert {Path(place).parent for *_, place in again} == {tmp_path / "b" / "trials"}
    seeds = {each.number: each.seed for each in after.trials}
    assert all(seeds[int(number)] == int(seed) for number, seed, *_ in (*old, *again))
    begun = {number for number, *_ in old}
    assert all((found == "True") == (number in begun) for number, _, found, _ in again)
