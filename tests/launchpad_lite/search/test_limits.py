"""Limits that end a task: what is decided, and processes that are ended."""

import ctypes
import dataclasses
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad_lite import search
from launchpad_lite.parts.joining import JOIN_FILE
from launchpad_lite.search import TrialState
from launchpad_lite.search._messages import Limits
from launchpad_lite.search._process import look
from tests.launchpad_lite.search.searches import output_of, searching, worker
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Tasks, square

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limits", "ran_s", "idle_s", "used", "expected"),
    [
        (Limits(), 1e9, 1e9, GIB, ("", math.inf)),
        (Limits(3.0), 2.0, 2.0, 0, ("", 1.0)),
        (Limits(3.0), 3.0, 0.0, 0, ("it ran longer than timeout_s=3", 0.0)),
        (Limits(3.0, 0.5), 2.0, 0.25, 0, ("", 0.25)),
        (Limits(3.0, 0.5), 2.0, 0.5, 0, ("it showed no progress within progress_timeout_s=0.5", 0)),
        (Limits(memory_bytes=GIB), 0.0, 0.0, GIB, ("", math.inf)),
        (Limits(9.0, memory_bytes=5), 1, 1, 6, ("it used 6 bytes, more than memory_bytes=5", 0.0)),
        # It has not begun: its code is imported.
        (Limits(3.0, 0.5), -math.inf, -math.inf, 0, ("", math.inf)),
    ],
)
def test_a_look_at_a_task_tells_which_limit_it_exceeds_and_when_to_look_again(
    limits: Limits, ran_s: float, idle_s: float, used: int, expected: tuple[str, float]
) -> None:
    assert look(limits, ran_s, idle_s, lambda: used) == expected


def limited(task: Any, **limits: Any) -> Any:
    for name, value in limits.items():
        setattr(task, name, value)
    return task


def note(file: Path, *pids: int) -> None:
    with file.open("a") as notes:
        notes.write("".join(f"{pid}\n" for pid in pids))


def hang(file: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    note(file, os.getpid(), child.pid)
    time.sleep(1000)


def hang_once(file: Path) -> int:
    if not file.exists():
        note(file, os.getpid())
        time.sleep(1000)
    return os.getpid()


def stand(file: Path) -> None:
    for _ in range(3):
        time.sleep(0.2)
        search.report()
    note(file, os.getpid())
    time.sleep(1000)


def eat() -> None:
    eaten = bytearray(GIB // 8)
    time.sleep(1000 + len(eaten) // GIB)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_task_beyond_a_limit_ends_with_its_process_and_others_go_on(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result = search.run(
        Tasks(
            *(search.Call(square, x) for x in range(3)),  # so that the next ones come together
            limited(search.Call(hang, pids), timeout_s=0.3, retries=1),
            limited(search.Call(hang_once, tmp_path / "once"), timeout_s=0.3, retries=1),
            limited(search.Call(stand, tmp_path / "stood"), progress_timeout_s=0.5),
            limited(search.Call(eat), memory_bytes=GIB // 8),
            *(search.Call(square, x) for x in range(30)),
        ),
        workers=2,
        launcher="test_mp",
        timing=dataclasses.replace(QUICK, lease_s=5.0),
    )
    hung, once, stood, ate = result.trials[3:7]
    assert "it was run 2 times, and failed each time" in hung.error
    assert "it ran longer than timeout_s=0.3, and was ended here" in hung.error
    assert "in hang\n    time.sleep(1000)" in hung.error
    assert (once.state, once.attempts) == (TrialState.DONE, 2)
    assert "it showed no progress within progress_timeout_s=0.5" in stood.error
    assert (tmp_path / "stood").exists(), "it was ended though it showed progress"
    assert "more than memory_bytes=134,217,728" in ate.error
    assert [trial.state for trial in result.trials].count(TrialState.DONE) == 34
    assert [trial.lost_workers for trial in result.trials] == [0] * 37
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


@pytest.mark.slow
def test_a_task_that_holds_the_interpreter_fails_and_its_process_ends() -> None:
    stuck = limited(search.Call(hold_the_interpreter), timeout_s=0.3)
    begun_at = time.monotonic()
    result = search.run(
        Tasks(stuck, search.Call(square, 2)), workers=1, launcher="test_mp", timing=QUICK
    )
    assert "it ran longer than timeout_s=0.3" in result.trials[0].error
    assert result.model.results == [4]
    assert time.monotonic() - begun_at < 20


def test_a_worker_from_outside_says_by_its_exit_code_that_it_is_to_start_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "search").mkdir()
    hung = limited(search.Call(hang, tmp_path / "pids"), timeout_s=0.3)
    join = tmp_path / "search" / JOIN_FILE
    with searching(Tasks(hung, search.Call(square, 3)), tmp_path / "search") as client:
        with worker(join) as process:
            assert "ends with its task: it ran longer than timeout_s=0.3" in output_of(process)
            assert process.returncode == os.EX_TEMPFAIL
        with worker(join) as process:
            assert "works for" in output_of(process)
        assert client.model().results == [9]
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
