"""`top`, and the rates of calls that it shows."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.insight._view import CallMeter, CallRates, NodeRow, ProgramView, plain
from launchpad_lite.insight.top import show_top, table_of
from launchpad_lite.launching import NodeStatus
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.testing import LaunchedProgram, poll_until

Launch = Callable[..., LaunchedProgram]


def _calls(calls: int, errors: int, queued: int, delays: list[int]) -> dict[str, Any]:
    served = {"calls": calls, "errors": errors, "queued": queued, "delays": delays}
    made = {"server[0]: get": {"calls": calls * 2}, "10.0.0.7:4711: put": {"calls": calls}}
    return {"calls": {"served": {"get": served}, "made": made}}


def test_rates_are_what_sums_gained_between_two_looks() -> None:
    now = [10.0]
    meter = CallMeter(lambda: now[0])
    names = {"server[0]": "server[0]", "10.0.0.7:4711": "server[1]"}
    rates, edges = meter.look({"a": _calls(100, 0, 1, [100])}, names)
    assert rates == {"a": CallRates(queued=1)}
    assert edges == {}
    now[0] += 2
    rates, edges = meter.look({"a": _calls(200, 10, 3, [100, 0, 98, 2])}, names)
    assert rates == {"a": CallRates(50.0, 150.0, 5.0, 3, 4e-6, 8e-6)}
    assert edges == {("a", "server[0]"): 100.0, ("a", "server[1]"): 50.0}
    now[0] += 2
    # It was started again.
    rates, edges = meter.look({"a": _calls(10, 0, 0, [10])}, names)
    assert rates == {"a": CallRates(0.0, 0.0, 0.0, 0, None, None)}
    assert edges == {}


def test_the_last_line_of_a_node_neither_moves_the_cursor_nor_colours_the_table() -> None:
    assert plain("\x1b[31mred\x1b[0m\ttab\x1b[2J\r\x07") == "red     tab\\x07"


class Talking:
    def run(self) -> None:
        print("first\n\x1b]0;title\x07[b]last[/b]", flush=True)
        lp.metrics.view("shown", lambda: {"[b]bar": 1})
        lp.wait_for_stop()


def test_gpu_memory_has_a_column_if_a_node_holds_some() -> None:
    without = NodeStatus("a[0]", "running", "h", 1, {}, 0, 0.5, 3.0)
    with_gpu = NodeStatus("a[1]", "running", "h", 2, {}, 0, 0.5, 3.0, gpu_memory_mib=8.0)
    nodes = [NodeRow(each, CallRates(), "", {}) for each in (without, with_gpu)]
    head, rows = table_of(nodes)
    at = head.index("GPU MiB")
    assert [row[at] for row in rows] == [None, 8.0]
    assert table_of(nodes[:1]) == (
        [*head[:at], *head[at + 1 :]],
        [rows[0][:at] + rows[0][at + 1 :]],
    )


@pytest.fixture
def running(launch_program: Launch) -> lp.RunningProgram:
    program = lp.Program("talking")
    program.add_node(lp.PyClassNode(Talking), label="talker")
    running = launch_program(program, "test_mp").running
    poll_until(lambda: len(list(running.output())) == 2)
    return running


def test_without_a_terminal_top_prints_one_table(
    running: lp.RunningProgram, capsys: pytest.CaptureFixture[str]
) -> None:
    show_top(Inspector(running), running.log_dir)
    title, head, row = capsys.readouterr().out.splitlines()
    assert title == "talking: running"
    assert head.split()[:4] == ["node", "state", "cores", "MiB"]
    assert row.split()[:2] == ["talker[0]", "running"]
    assert row.endswith("\\x1b]0;title\\x07[b]last[/b]")


def test_keys_show_the_output_and_the_stack_of_a_node(running: lp.RunningProgram) -> None:
    from textual.widgets import DataTable, Static

    from launchpad_lite.insight._top_app import TopApp

    app = TopApp(Inspector(running), ProgramView(Inspector(running), running.log_dir))

    async def press() -> list[str]:
        found = []
        async with app.run_test() as pilot:

            async def shown(text: str) -> str:
                while text not in (now := str(app.query_one("#text", Static).content)):  # noqa: ASYNC110 - Textual tells nobody
                    await asyncio.sleep(0.02)
                return now

            table = app.query_one("#nodes", DataTable)
            while not table.row_count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            found.append(str(table.get_cell("talker[0]", "last line")))
            for key, text in (
                ("l", "first"),
                ("s", "wait_for_stop"),
                ("w", "talker[0]"),
                ("v", "█"),
            ):
                await pilot.press(key)
                found.append(await shown(text))
            await pilot.press("q")
        return found

    line, logs, stack, _, views = asyncio.run(asyncio.wait_for(press(), 30))
    assert line == "\\x1b]0;title\\x07[b]last[/b]"
    assert logs == "first\n\\x1b]0;title\\x07[b]last[/b]"
    assert "in run" in stack
    assert views.startswith("shown\n[b]bar █")


def test_on_a_terminal_without_textual_the_table_is_renewed_until_the_end(
    running: lp.RunningProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    written = b""
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.delitem(sys.modules, "launchpad_lite.insight._top_app", raising=False)
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        running.request_stop("the end of a test")
        show_top(Inspector(running), running.log_dir)
    with contextlib.suppress(OSError):
        while data := os.read(ours, 1 << 16):
            written += data
    os.close(ours)
    assert b"talker[0]  ended" in written
    assert written.count(b"\x1b[H") >= 2
