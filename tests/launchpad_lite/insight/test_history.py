"""What is kept of a run in its folder."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.insight.history import FollowedHistory, thin
from launchpad_lite.testing import LaunchedProgram, poll_until
from tests.launchpad_lite.insight.served import Caller, Server

Launch = Callable[..., LaunchedProgram]


def _line(t: float, **row: Any) -> bytes:
    return json.dumps({"t": t, **row}).encode() + b"\n"


def _times(lines: list[bytes]) -> list[float]:
    return [json.loads(line)["t"] for line in lines]


def test_of_older_rows_fewer_stay_but_all_changes_of_state() -> None:
    now = 100_000.0
    rows = [_line(0, kind="program", nodes={})]
    rows += [_line(now - age, kind="node", node="a", state="running") for age in range(4000, 0, -1)]
    rows[2000] = _line(now - 2001, kind="node", node="a", state="restarting")
    kept = thin([*rows, b'{"t": 1, "kind'], now, 1e9)
    times = _times(kept)
    assert times[0] == 0
    assert times[-300:] == [now - age for age in range(300, 0, -1)]
    assert now - 2001 in times
    assert len([each for each in times if now - 3600 < each < now - 300]) == pytest.approx(
        331, abs=3
    )
    assert len([each for each in times if 0 < each < now - 3600]) == pytest.approx(8, abs=1)
    few = thin(rows, now, 5000)
    assert sum(map(len, few)) <= 5000
    assert _times(few)[0] == 0
    assert now - 2001 in _times(few)


def _program(name: str) -> lp.Program:
    program = lp.Program(name)
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.CourierNode(Caller, server), label="caller")
    return program


def _log_and_fail() -> None:
    lp.log({"loss": 0.5}, step=3)
    raise ValueError


def test_a_run_that_fails_at_once_has_its_end(launch_program: Launch) -> None:
    program = lp.Program("failing")
    program.add_node(lp.PyNode(_log_and_fail), label="node")
    launched = launch_program(program, "test_mp")
    with pytest.raises(lp.NodeFailedError):
        launched.wait()
    folder = launched.running.log_dir
    assert folder is not None
    # The last of each kind: on a slow machine, there are earlier states.
    rows = {row["kind"]: row for row in FollowedHistory(folder).read()[1]}
    assert list(rows) == ["program", "node", "log", "end"]
    assert rows["program"]["nodes"] == {"node[0]": []}
    assert rows["node"]["state"] == rows["end"]["outcome"] == "failed"
    assert [rows["log"][field] for field in ("name", "value", "step")] == ["loss", 0.5, 3]
    assert stat.S_IMODE((folder / "history.jsonl").stat().st_mode) == 0o600


def test_a_history_that_cannot_be_written_is_one_warning(
    launch_program: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "history.jsonl").mkdir()
    launched = launch_program(_program("full"), "test_mp", log_dir=tmp_path)
    poll_until(lambda: "history.jsonl cannot be written" in caplog.text)
    launched.stop()
    assert caplog.text.count("cannot be written") == 1
