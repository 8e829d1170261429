"""Traces of calls: their format, and that of a real program."""

import gzip
import json
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import launchpad_lite as lp
from launchpad_lite.launching.call_trace import RunTrace, take_trace, trace
from launchpad_lite.testing import poll_until


def _call(began: float, seconds: float, number: int, **changes: Any) -> dict[str, Any]:
    call = {"began": began, "seconds": seconds, "is_served": False, "peer": "b[0]", "method": "m"}
    return {**call, "end": "ok", "thread": 7, "tag": 1, "number": number, **changes}


def _answer(now: float, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"now": now, "threads": {"7": "MainThread"}, "calls": list(calls)}


def test_calls_that_overlap_in_a_thread_have_rows_of_their_own_and_others_nest() -> None:
    calls = [
        _call(1.0, 2.0, 1),
        _call(1.5, 0.5, 2),
        _call(2.5, 2.0, 3),
        _call(6.0, 3.0, 4, end="runs"),
    ]
    events = trace({"a[0]": _answer(9.0, *calls)}, {"a[0]": "h"}, 9.0)["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    assert [each["tid"] for each in slices] == [1, 1, 2, 1]
    assert [each["ts"] for each in slices] == [0.0, 5e5, 1.5e6, 5e6]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {1: "MainThread", 2: "MainThread (2)"}


def test_clocks_of_hosts_are_aligned_so_that_each_answer_lies_within_its_call() -> None:
    answers = {
        "a[0]": _answer(100.0, _call(10.0, 1.0, 1), _call(20.0, 0.1, 2)),
        # Its clock is 5000 s ahead.
        "b[0]": _answer(
            5100.5,
            _call(5010.6, 0.2, 1, is_served=True, peer="a"),
            _call(5020.04, 0.02, 2, is_served=True, peer="a"),
        ),
    }
    events = trace(answers, {"a[0]": "h1", "b[0]": "h2"}, 0.0)["traceEvents"]
    made, served = ([e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (1, 2))
    for call, answer in zip(made, served, strict=True):
        assert call["ts"] < answer["ts"]
        assert answer["ts"] + answer["dur"] < call["ts"] + call["dur"]
    assert served[1]["ts"] - made[1]["ts"] == pytest.approx(4e4, abs=1.0)
    assert {each["args"]["peer"] for each in served} == {"a[0]"}


class Fast:
    """Stands in for a running program whose node records more than it has room for."""

    def __init__(self, rounds: int) -> None:
        self.plan = types.SimpleNamespace(program="fast")
        self._left = rounds

    @property
    def result(self) -> str | None:
        return None if self._left else "ended"

    def status(self) -> list[Any]:
        return [types.SimpleNamespace(name="a[0]", host="h")]

    def ask(self, question: str, since: dict[str, float], timeout_s: float) -> Any:
        assert question == "trace"
        self._left -= 1
        call = _call(1.0 + self._left, 0.1, 1)
        count = 1000 * (2 - self._left)
        threads = {"7": "MainThread" * self._left}  # it has ended at last
        answer = {**_answer(9.0, call), "threads": threads}
        return {"a[0]": {**answer, "pid": 7, "count": count, "room": 900}}


def test_a_trace_of_a_run_says_how_many_calls_it_lacks_and_names_threads_that_ended(
    tmp_path: Path,
) -> None:
    program: Any = Fast(2)
    traced = RunTrace(program, tmp_path / "run.json")
    traced.thread.join(30)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["otherData"]["calls"].startswith("2 calls of 1 nodes; 200 more are missing")
    (name,) = [each for each in found["traceEvents"] if each["name"] == "thread_name"]
    assert name["args"]["name"] == "MainThread"


class Learner:
    def step(self, number: int) -> int:
        return number


class Actor:
    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def run(self) -> None:
        for number in range(30):
            self._learner.step(number)
        print("done", flush=True)
        lp.wait_for_stop()


@pytest.mark.parametrize("launcher", ["test_mp", "test_mt"])
def test_a_trace_of_a_program_has_rows_calls_and_arrows(launcher: str, tmp_path: Path) -> None:
    program = lp.Program("traced")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    with program.group("actor"):
        for _ in range(2):
            program.add_node(lp.PyClassNode(Actor, learner))
    with (
        flagsaver.flagsaver(lp_trace=str(tmp_path / "run.json")),
        lp.launch(program, launcher) as running,
    ):
        hosts = {each.name: each.host for each in running.status()}
        poll_until(lambda: _steps(running.ask("calls")) == 60)
        with pytest.raises(ValueError, match=r"ends in \.json or \.json\.gz"):
            take_trace(running.ask, hosts, 0, tmp_path / "trace.txt")
        text = take_trace(running.ask, hosts, 0, tmp_path / "trace.json.gz")
        running.request_stop("enough")
    assert text.startswith("120 calls of 3 nodes: ")
    _check(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"])
    for each in threading.enumerate():
        if each.name == "launchpad-trace":
            each.join(30)  # it writes the file
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["otherData"] == {"calls": "120 calls of 3 nodes"}
    _check(found["traceEvents"])


def _check(events: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    for each in slices.values():
        assert each.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys()
    assert len(begins) == 60
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        caller, callee = (slices[each["pid"], each["tid"], each["ts"]] for each in (begin, end))
        assert caller["name"] == "learner[0]: step"
        assert names[callee["pid"]] == "learner[0]"
        assert callee["args"]["peer"] == names[caller["pid"]] != "learner[0]"


def _steps(answers: Any) -> int:
    calls = (call for each in answers.values() for call in each["calls"])
    return sum(call["is_served"] and call["end"] == "ok" for call in calls)
