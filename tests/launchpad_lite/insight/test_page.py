"""The page of a program in Chromium."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

import launchpad_lite as lp
from launchpad_lite.insight.dashboard import PageServer, ProgramPage, serve
from launchpad_lite.launching import NodeStatus
from launchpad_lite.testing import LaunchedProgram
from tests.beds.ssh_hosts import find_program
from tests.engines import needs_chromium
from tests.launchpad_lite.insight.browser import Browser, browser

pytestmark = [needs_chromium, pytest.mark.slow]

_ERRORS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
_HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def tab() -> Iterator[Browser]:
    with browser(str(find_program("chromium"))) as opened:
        yield opened
        assert [each for each in opened.told if each["method"] in _ERRORS] == []


class Hostile:
    def run(self) -> None:
        print(_HOSTILE, flush=True)
        lp.log({"loss": 0.5}, step=1)
        lp.wait_for_stop()


def test_what_nodes_print_is_shown_as_text(
    launch_program: Callable[..., LaunchedProgram], tab: Browser
) -> None:
    program = lp.Program("hostile")
    with program.group("node"):
        for _ in range(2):
            program.add_node(lp.PyClassNode(Hostile))
    running = launch_program(program, "test_mp").running
    tab.open(serve(running))
    last = "document.querySelector('#rows .last')?.textContent"
    tab.wait_for(f"{last} == 'step 1: loss=0.5'")
    tab.wait_for("location.hash + document.title == 'hostile: running'")
    tab.evaluate("document.querySelector('#rows .row').click()")
    tab.wait_for("document.getElementById('text').textContent.includes('step 1')")
    shown = tab.evaluate("document.getElementById('text').textContent")
    assert shown == f"{_HOSTILE}\nstep 1: loss=0.5"
    assert tab.evaluate("document.querySelectorAll('img, script').length") == 1
    tab.wait_for("document.getElementById('charts').textContent.includes('loss')")
    assert tab.evaluate("document.querySelector('#graph text').textContent") == "node \u00d7 2"
    running.stop()
    tab.wait_for("document.title == 'hostile: stopped, stop() was called'")


class _Many:
    """Tells of 1,000 nodes, which a test cannot start."""

    def __init__(self) -> None:
        self.looks = 0

    def join(self, timeout_s: float) -> bool:
        return False

    def status(self) -> tuple[str, list[NodeStatus]]:
        self.looks += 1
        nodes = [
            NodeStatus(
                f"actor[{n}]", "running", f"h{n % 16}", n, {}, 0, (n + self.looks) % 9 / 9, 99.0
            )
            for n in range(1000)
        ]
        return "many: running", nodes

    def ask(self, question: str, *, timeout_s: float) -> Mapping[str, Any]:
        each = {"errors": 0, "queued": self.looks % 3, "delays": [0, self.looks * 10]}
        served = {"put": {**each, "calls": 10 * self.looks}}
        answer = {"calls": {"served": served, "made": {"actor[0]: put": {"calls": self.looks}}}}
        return {f"actor[{n}]": answer for n in range(1000)}


@pytest.mark.serial
def test_a_page_of_a_thousand_nodes_is_soon_there_and_soon_renewed(tab: Browser) -> None:
    many = _Many()
    closed: list[bool] = []
    page = ProgramPage(cast("Any", many), None)
    tab.open(PageServer(page, until=lambda: bool(closed)).url)
    tab.wait_for("document.querySelectorAll('#rows .row').length > 10")
    assert (
        tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000
    )
    tab.wait_for("took.length >= 6")
    assert sorted(tab.evaluate("took"))[-2] < 200  # the first draws all
    # Nothing is asked while nobody can see the page.
    tab.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    tab.evaluate("renew()")
    looks = many.looks
    tab.evaluate("new Promise(done => setTimeout(done, 2500))")
    assert many.looks <= looks + 1
    closed.append(True)
