"""Commands whose thread is forced out of a step of ours: nothing of them is left."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.nodes import command
from launchpad_lite.nodes.command import _Command
from launchpad_lite.testing import poll_until
from tests.launchers.marks import Marked
from tests.launchers.running import program_of

_FAMILY = "sleep 1000 & setsid sleep 1000 & touch up; "


def _take_time(file: Path, seconds: float) -> None:
    """Says where a thread is, and gives others the time to force it out of there."""
    file.mkdir()  # not touch: forced out of that, a thread leaves the file open
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        time.sleep(0.01)


@pytest.mark.parametrize("ready", [None, "^"])
def test_nothing_is_left_of_a_command_whose_thread_is_forced_out_of_its_start(
    launch_program: Any,
    tmp_path: Path,
    marked: Marked,
    ready: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowPopen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _take_time(tmp_path / "starts", 1.0)

    monkeypatch.setattr(subprocess, "Popen", SlowPopen)
    node = lp.CommandNode(_FAMILY + "sleep 1000", cwd=tmp_path, ready=ready)
    running = launch_program(program_of(node=node), "test_mt", notice_s=20.0)
    for file in ("up", "starts"):
        poll_until((tmp_path / file).exists, 20)
    running.running.kill()
    running.running.join(60)
    assert running.running.result.killed == ("node[0]",)
    marked.assert_gone()


def test_a_thread_that_is_forced_out_of_a_look_at_processes_leaves_no_file_open(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = command.marked

    def look_slowly(variable: str, mark: str) -> Iterator[int]:
        file = (tmp_path / "looks").open("w")
        if threading.current_thread().name == "node[0]" and not (tmp_path / "slow").exists():
            _take_time(tmp_path / "slow", 1.0)
        file.close()
        return look(variable, mark)

    monkeypatch.setattr(command, "marked", look_slowly)
    node = lp.CommandNode("touch up; exec sleep 1000", cwd=tmp_path)
    running = launch_program(program_of(node=node), "test_mt", notice_s=20.0)
    poll_until((tmp_path / "up").exists, 20)
    running.running.request_stop("the test")
    poll_until((tmp_path / "slow").exists, 20)
    running.running.kill()
    running.running.join(60)


def test_nothing_is_left_of_a_command_whose_thread_is_forced_out_of_its_end(
    launch_program: Any, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    end = _Command._end

    def slow_end(self: Any, grace_s: float) -> None:
        ends.append(grace_s)
        if len(ends) == 1:
            _take_time(tmp_path / "ends", 60.0)
        end(self, grace_s)

    monkeypatch.setattr(_Command, "_end", slow_end)
    node = lp.CommandNode(_FAMILY + "exit 0", cwd=tmp_path)
    running = launch_program(program_of(node=node), "test_mt", notice_s=20.0)
    poll_until((tmp_path / "ends").exists, 20)
    running.running.kill()
    running.running.join(60)
    # A thread that comes to it late is not waited for.
    poll_until(lambda: len(ends) > 1, 20)
    assert ends == [2.0, 0.0]
    marked.assert_gone()
