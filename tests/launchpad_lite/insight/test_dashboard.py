"""The page of a program, as its server gives it."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.errors import LaunchError
from launchpad_lite.insight._curves import Curves
from launchpad_lite.insight._prometheus import as_prometheus
from launchpad_lite.insight._view import CallRates, NodeRow, ProgramSight
from launchpad_lite.insight.dashboard import PageServer, ProgramPage, serve, show_dashboard
from launchpad_lite.launching import NodeStatus
from launchpad_lite.launching.status_table import mimes
from launchpad_lite.testing import LaunchedProgram, poll_until
from tests.launchpad_lite.insight.served import Caller, Server

Launch = Callable[..., LaunchedProgram]


def test_a_chart_has_a_line_for_each_group_and_for_each_node_that_logs() -> None:
    curves = Curves()
    curves.take_in(
        {"t": t, "kind": "node", "node": node, "state": "running", "cpu": cpu, "mib": None}
        for t, node, cpu in [
            (1, "a[0]", 0.5),
            (1, "a[1]", 1.0),
            (1, "b[0]", None),
            (2, "a[0]", 2.0),
        ]
    )
    curves.take_in([{"t": 2, "kind": "log", "node": "a[1]", "name": "loss", "value": None}])
    assert curves.charts() == [
        {"title": "cores", "lines": [{"name": "a", "t": [1, 2], "v": [1.5, 3.0]}], "more": 0},
        {"title": "loss", "lines": [{"name": "a[1]", "t": [2], "v": [None]}], "more": 0},
    ]
    curves.take_in(
        {"t": t, "kind": "log", "node": "b[0]", "name": "x", "value": t} for t in range(9999)
    )
    (line,) = curves.charts()[-1]["lines"]
    assert len(line["t"]) <= 300
    assert (line["t"][-1], line["v"][-1]) == (9998, 9998)
    assert line["t"] == sorted(line["t"])


def test_numbers_in_the_format_of_prometheus() -> None:
    histogram = {"count": 3, "sum": 4.5, "buckets": [[1.0, 2], [4.0, 1]]}
    metrics = {"counter": {'a"b': 2}, "gauge": {}, "histogram": {"h": histogram}, "log": {}}
    get = {"calls": 7, "errors": 1, "seconds": 0.5}
    numbers = {"calls": {"served": {"get": get}, "made": {}}, "metrics": metrics}
    status = NodeStatus("a[0]", "running", "h", 1, {}, 2, 0.5, 3.0, gpu_memory_mib=8.0)
    sight = ProgramSight("", [NodeRow(status, CallRates(queued=4), "", numbers)], {})
    assert as_prometheus(sight).splitlines() == [
        "# TYPE launchpad_node_state gauge",
        'launchpad_node_state{node="a[0]",state="running"} 1',
        "# TYPE launchpad_node_restarts_total counter",
        'launchpad_node_restarts_total{node="a[0]"} 2',
        "# TYPE launchpad_node_cores gauge",
        'launchpad_node_cores{node="a[0]"} 0.5',
        "# TYPE launchpad_node_memory_bytes gauge",
        'launchpad_node_memory_bytes{node="a[0]"} 3145728',
        "# TYPE launchpad_node_gpu_memory_bytes gauge",
        'launchpad_node_gpu_memory_bytes{node="a[0]"} 8388608',
        "# TYPE launchpad_node_queued gauge",
        'launchpad_node_queued{node="a[0]"} 4',
        "# TYPE launchpad_calls_served_total counter",
        'launchpad_calls_served_total{node="a[0]",method="get"} 7',
        "# TYPE launchpad_calls_served_errors_total counter",
        'launchpad_calls_served_errors_total{node="a[0]",method="get"} 1',
        "# TYPE launchpad_calls_served_seconds_total counter",
        'launchpad_calls_served_seconds_total{node="a[0]",method="get"} 0.5',
        "# TYPE launchpad_counter_total counter",
        'launchpad_counter_total{node="a[0]",name="a\\"b"} 2',
        "# TYPE launchpad_histogram histogram",
        'launchpad_histogram_bucket{node="a[0]",name="h",le="1.0"} 2',
        'launchpad_histogram_bucket{node="a[0]",name="h",le="4.0"} 3',
        'launchpad_histogram_bucket{node="a[0]",name="h",le="+Inf"} 3',
        'launchpad_histogram_sum{node="a[0]",name="h"} 4.5',
        'launchpad_histogram_count{node="a[0]",name="h"} 3',
    ]


def make_program() -> lp.Program:
    program = lp.Program("shown")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("caller"):
        for _ in range(2):
            program.add_node(lp.CourierNode(Caller, server))
    return program


def _fetch(url: str, path: str, **headers: str) -> Any:
    base, _, token = url.partition("#")
    given = {"Authorization": f"Bearer {token}", **headers}
    with urllib.request.urlopen(urllib.request.Request(base + path, headers=given)) as answer:
        data = answer.read()
        return json.loads(data) if path.startswith("api/") else data.decode()


def _states(url: str) -> list[list[str]]:
    return [each[:2] for each in _fetch(url, "api/state")["nodes"]]


def test_connections_of_strangers_do_not_keep_others_out(tmp_path: Path) -> None:
    server = PageServer(ProgramPage(None, tmp_path))
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            stranger = socket.create_connection(server.server_address[:2])
            strangers.enter_context(stranger)
            stranger.sendall(b"GET / HTTP/1.1\r\n")  # and no more
        for _ in range(3):
            assert "has ended" in _fetch(server.url, "api/why")["text"]


_RUNNING = [["server[0]", "serving"], ["caller[0]", "running"], ["caller[1]", "running"]]


def test_a_page_shows_a_program_while_it_runs_and_from_its_folder(launch_program: Launch) -> None:
    running = launch_program(make_program(), "test_mp").running
    url = serve(running)
    poll_until(lambda: _states(url) == _RUNNING)
    poll_until(lambda: _fetch(url, "api/state")["edges"])  # they are in the folder after a second
    state = _fetch(url, "api/state")
    assert state["title"] == "shown: running"
    assert state["groups"] == [["server", 1, 0], ["caller", 2, 0]]
    assert [each[:2] for each in state["edges"]] == [["caller", "server"]]
    assert state["period_s"] >= 1
    lines = "step 1: loss=0.5\nfirst\nsecond red"
    poll_until(lambda: _fetch(url, "api/logs?node=caller[1]") == {"text": lines})
    assert _fetch(url, "api/logs?node=caller[1]&search=RED") == {"text": "second red"}
    assert _fetch(url, "api/logs?node=../x[0]")["text"] == "no such lines are kept"
    assert "in run" in _fetch(url, "api/stacks?node=caller[0]")["text"]
    assert "no node waits" in _fetch(url, "api/why")["text"]
    running.page_url = url
    assert f'<a href="{url}"' in mimes(running)["text/html"]
    assert 'launchpad_log{node="caller[0]",name="loss"} 0.5' in _fetch(url, "metrics")
    poll_until(lambda: "loss" in [each["title"] for each in _fetch(url, "api/curves")["charts"]])
    running.stop()

    closed = threading.Event()
    folder = PageServer(ProgramPage(None, running.log_dir), until=closed.is_set)
    ended = _fetch(folder.url, "api/state")
    assert ended["title"] == "shown: stopped, stop() was called"
    assert {each[1] for each in ended["nodes"]} == {"ended"}
    assert (ended["groups"], ended["period_s"]) == (state["groups"], 0)
    assert _fetch(folder.url, "api/logs?node=caller[0]") == {"text": lines}
    charts = {each["title"]: each["lines"] for each in _fetch(folder.url, "api/curves")["charts"]}
    assert sorted((line["name"], line["v"]) for line in charts["loss"]) == [
        ("caller[0]", [0.5]),
        ("caller[1]", [0.5]),
    ]
    closed.set()


def test_a_page_is_for_whoever_has_the_link_on_this_machine(launch_program: Launch) -> None:
    url = serve(launch_program(make_program(), "test_mp").running)
    assert url.startswith("http://127.0.0.1:")

    def refused(path: str, **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as raised:
            _fetch(url, path, **headers)
        with raised.value as answer:
            return answer.code

    assert refused("api/state", Authorization="Bearer wrong") == 401
    assert refused("metrics", Authorization="") == 401
    assert refused("", Host="a-name-that-leads-here.example:80") == 421
    assert refused("../dashboard.py") == 404
    assert "page.js" in _fetch(url, "", Authorization="")


def test_a_command_serves_the_page_of_a_folder_until_it_is_interrupted(tmp_path: Path) -> None:
    row = {"t": 1.0, "kind": "node", "node": "a[0]", "state": "failed", "restarts": 0}
    (tmp_path / "history.jsonl").write_text(json.dumps({**row, "cpu": 1, "mib": 2}) + "\n{")
    command = [sys.executable, "-m", "launchpad_lite.launch", "dashboard", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        url = process.stdout.readline().strip()
        assert _states(url) == [["a[0]", "failed"]]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_flag_serves_the_page_of_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import launchpad_lite as lp\n"
        "def make_program():\n"
        "    program = lp.Program('flagged')\n"
        "    program.add_node(lp.PyNode(lp.wait_for_stop), label='node')\n"
        "    return program\n"
        "if __name__ == '__main__':\n"
        "    lp.main(make_program)\n"
    )
    command = [sys.executable, str(script), "--dashboard", f"--lp_log_dir={tmp_path / 'logs'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        name, _, url = process.stdout.readline().strip().partition(": ")
        assert name == "flagged"
        assert [node for node, _ in _states(url)] == ["node[0]"]
        process.terminate()
        assert process.wait(20) == 143


def test_a_page_tells_what_is_wrong_with_a_folder_and_reads_the_end_of_long_logs(
    tmp_path: Path,
) -> None:
    row = {"t": 1.0, "kind": "node", "node": "a[0]", "state": "ended", "cpu": None, "mib": None}
    (tmp_path / "history.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.log.1").write_bytes(b"first\n" + b"x" * (2 << 20) + b"\n")
    (tmp_path / "a" / "0.log").write_bytes(b"last\n")
    closed = threading.Event()
    server = PageServer(ProgramPage(None, tmp_path), until=closed.is_set)
    assert [each[0] for each in _fetch(server.url, "api/state")["nodes"]] == ["a[0]"]
    tail = _fetch(server.url, "api/logs?node=a[0]")["text"].split("\n")
    assert [len(line) for line in tail] == [4096, 4]
    assert _fetch(server.url, "api/logs?node=a[0]&search=first")["text"] == "first"
    (tmp_path / "history.jsonl").write_text(json.dumps({"t": 1.0, "kind": "node"}) + "\n")
    page = PageServer(ProgramPage(None, tmp_path), until=closed.is_set)
    with pytest.raises(urllib.error.HTTPError) as raised:
        _fetch(page.url, "api/state")
    with raised.value as answer:
        assert (answer.code, json.load(answer)) == (500, {"error": "KeyError('cpu')"})
    closed.set()
    with pytest.raises(LaunchError, match=r"port 99999: .*--port=0"):
        show_dashboard(None, tmp_path, 99999)
