"""The page of a program in Chromium."""

import html
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import launchpad_lite as lp
from launchpad_lite.insight.dashboard import PageServer, ProgramPage, serve
from launchpad_lite.testing import LaunchedProgram
from tests.beds.ssh_hosts import find_program
from tests.engines import needs_chromium
from tests.launchpad_lite.insight.browser import Browser, browser
from tests.launchpad_lite.insight.many import Many

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
        threading.current_thread().name = _HOSTILE
        print(_HOSTILE, flush=True)
        lp.log({"loss": 0.5}, step=1)
        lp.metrics.view("shown", lambda: _HOSTILE)
        lp.metrics.view("bars", lambda: {_HOSTILE: 1})
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
    assert (
        tab.evaluate("document.querySelector('#head > :nth-child(7)').offsetWidth") == 0
    )  # no GPU
    tab.evaluate("document.querySelector('#rows .row').click()")
    tab.wait_for("document.getElementById('text').textContent.includes('step 1')")
    shown = tab.evaluate("document.getElementById('text').textContent")
    assert shown == f"{_HOSTILE}\nstep 1: loss=0.5"
    views = "document.getElementById('views').textContent"
    tab.wait_for(f"{views}.includes('node[1]')")
    assert tab.evaluate(views).count(_HOSTILE) == 4
    assert tab.evaluate("document.querySelectorAll('#views img, script').length") == 1
    tab.evaluate("document.querySelector('[data-tab=profile]').click()")
    flame = "document.getElementById('flame')"
    tab.wait_for(f"!document.getElementById('picture').hidden && {flame}.naturalHeight > 50")
    assert "Hostile.run" in tab.evaluate("document.getElementById('text').textContent")
    assert html.escape(_HOSTILE) in tab.evaluate(f"decodeURIComponent({flame}.src)")
    tab.wait_for("document.getElementById('charts').textContent.includes('loss')")
    assert tab.evaluate("document.querySelector('#graph text').textContent") == "node \u00d7 2"
    running.stop()
    tab.wait_for("document.title == 'hostile: stopped, stop() was called'")


def test_a_page_of_a_thousand_nodes_draws_those_that_are_seen(tab: Browser) -> None:
    page = ProgramPage(cast("Any", Many(answering=10)), None)
    closed: list[bool] = []
    tab.open(PageServer(page, until=lambda: bool(closed)).url)
    tab.wait_for("document.querySelectorAll('#rows .row').length > 10")
    assert tab.evaluate("document.querySelectorAll('#rows .row').length") < 100
    assert tab.evaluate("document.getElementById('count').textContent") == "1000 of 1000"
    seventh = "document.querySelector('#rows .row > :nth-child(7)')"
    assert tab.evaluate(f"{seventh}.textContent + ({seventh}.offsetWidth > 0)") == "512true"
    tab.evaluate("document.getElementById('scroll').scrollTop = 1e9")
    tab.wait_for("document.querySelector('#rows .row:last-child').dataset.node == 'actor[999]'")
    cores = tab.evaluate("state.nodes[999][4]")
    tab.wait_for(f"state.nodes[999][4] != {cores}")  # it is renewed
    # Nothing is asked while nobody can see the page.
    tab.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    requests = "performance.getEntriesByType('resource').length"
    before = tab.evaluate(requests)
    for _ in range(3):
        tab.evaluate("renew()")
    assert tab.evaluate(requests) <= before + 1  # one was on its way
    closed.append(True)
