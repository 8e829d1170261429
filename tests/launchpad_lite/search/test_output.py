"""Where what trials print goes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchpad_lite import search
from launchpad_lite.search import RunningTrial
from launchpad_lite.search._messages import Life
from launchpad_lite.search._process import TrialOutput, last_lines
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Tasks, square

WORKER = Life("worker", "life")


def trial(folder: Path, number: int) -> RunningTrial:
    return RunningTrial(number, 0, str(folder))


def logs(folder: Path) -> dict[str, str]:
    trials = folder / "trials"
    files = sorted(each for each in trials.rglob("*") if each.is_file())
    return {str(each.relative_to(trials)): each.read_text() for each in files}


def print_everywhere() -> None:
    print("from Python", file=sys.__stdout__)
    os.write(2, b"as an error\n")
    subprocess.run(["echo", "from a child"], check=True)
    ctypes.CDLL(None).puts(b"from C")


def test_what_a_trial_prints_is_in_its_log_and_a_silent_one_has_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = TrialOutput(WORKER)
    before = os.umask(0)
    try:
        for number, run in enumerate([lambda: None, print_everywhere, lambda: None]):
            with output.of(trial(tmp_path, number)):
                run()
    finally:
        os.umask(before)
    os.write(1, b"beside it\n")
    output.close()
    assert {name: sorted(text.split("\n")) for name, text in logs(tmp_path).items()} == {
        "1/log": ["", "as an error", "from C", "from Python", "from a child"]
    }
    modes = [(tmp_path / "trials" / each).stat().st_mode & 0o777 for each in ("", "1", "1/log")]
    assert modes == [0o700, 0o700, 0o600]
    assert capfd.readouterr().out == "beside it\n"


def test_a_trial_that_runs_again_adds_to_its_log(tmp_path: Path) -> None:
    for worker in ("one", "two"):
        output = TrialOutput(Life(worker, worker))
        with output.of(trial(tmp_path, 7)):
            os.write(1, worker.encode() + b"\n")
    assert logs(tmp_path) == {"7/log": "one\n--- run again by two\ntwo\n"}


def test_a_trial_can_be_followed_while_it_runs(tmp_path: Path) -> None:
    output = TrialOutput(WORKER)
    with output.of(trial(tmp_path, 7)):
        os.write(1, b"one\n")
        output.keep()
        os.write(1, b"two\n")
        output.keep()
        assert logs(tmp_path) == {"7/log": "one\ntwo\n"}


def test_without_a_folder_here_output_goes_where_it_went(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in (RunningTrial(0, 0), trial(tmp_path / "elsewhere", 0)):
        with TrialOutput(WORKER).of(each):
            os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\nhere\n"
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_log_is_short_and_found_if_its_worker_died_early(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir(mode=0o700)
    lines = [f"line {number}" for number in range(10_000)]
    (tmp_path / "trials" / ".7-life").write_text("\n".join(lines))
    assert last_lines(str(tmp_path), 7, was_lost=False) == ""
    title, *found = last_lines(str(tmp_path), 7, was_lost=True).splitlines()[1:]
    assert title == f"The end of {tmp_path}/trials/7/log:"
    assert found == lines[-40:]
    assert list(logs(tmp_path)) == ["7/log"]


def fail() -> None:
    print("fails")
    raise ValueError("no")


def die() -> None:
    print("dies")
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    print("hangs", end="", flush=True)
    time.sleep(1000)


@pytest.mark.slow
def test_the_error_of_a_trial_has_what_it_printed_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hung = search.Call(hang)
    hung.timeout_s = 0.3
    result = search.run(
        Tasks(search.Call(fail), search.Call(die), hung, search.Call(square, 2)),
        workers=2,
        launcher="test_mp",
        folder=tmp_path,
        timing=QUICK,
        max_losses=1,
    )
    failed, dead, ended, done = result.trials
    assert done.error == ""
    assert failed.error.endswith(f"ValueError: no\nThe end of {tmp_path}/trials/0/log:\nfails")
    assert dead.error.endswith("trials/1/log:\ndies")
    assert "timeout_s=0.3" in ended.error
    assert "trials/2/log:\nhangs" in ended.error
    assert sorted(logs(tmp_path)) == ["0/log", "1/log", "2/log"]
    assert "[search_worker" not in capfd.readouterr().out
