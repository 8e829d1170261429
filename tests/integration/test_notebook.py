"""Programs are launched, waited for and interrupted from a real notebook kernel."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupyter_client", reason="needs jupyter_client and ipykernel")
pytest.importorskip("ipykernel", reason="needs jupyter_client and ipykernel")

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("notebook.py")

PROGRAM = """
import launchpad_lite as lp

class Range:
    def __init__(self, start, end):
        self._numbers = iter(range(start, end))
    def produce(self):
        return next(self._numbers)

class Consumer:
    def __init__(self, producer, count):
        self._producer, self._count = producer, count
    def run(self):
        assert [self._producer.produce() for _ in range(self._count)] == list(range(self._count))

class Waiter:
    def run(self):
        lp.wait_for_stop()

def make_program(*others):
    program = lp.Program("notebook")
    producer = program.add_node(lp.CourierNode(Range, 0, 5), label="producer")
    program.add_node(lp.CourierNode(Consumer, producer, 5), label="consumer")
    for node in others:
        program.add_node(lp.PyClassNode(node), label="other")
    return program
"""

# Before the cell waits, an interrupt would end the cell only.
TELL_WHEN_WAITING = """
import pathlib, sys, threading, traceback
from launchpad_lite.testing import poll_until

def is_joining():
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    return any(frame.name == "join" for frame in stack)

def tell_when_waiting(path):
    def tell():
        poll_until(is_joining, timeout_s=30)
        pathlib.Path(path).touch()
    threading.Thread(target=tell).start()
"""


def run_cells(folder, *cells, with_displays=False):
    """Runs a notebook; a cell is code, or what `notebook.py` takes."""
    spec = [
        {"code": cell, "interrupt_at": None} if isinstance(cell, str) else cell for cell in cells
    ]
    driver = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
    )
    assert driver.returncode == 0, driver.stderr
    *results, displays = json.loads(driver.stdout)
    return [*map(tuple, results), displays] if with_displays else [*map(tuple, results)]


def test_a_cell_waits_for_a_program_and_an_interrupt_stops_it_and_keeps_the_notebook(tmp_path):
    started = tmp_path / "waiting"
    *_, first, _, _, (_, error), last = run_cells(
        tmp_path,
        PROGRAM,
        "running = lp.launch(make_program(), 'local_mp')",
        "print(running.wait().outcome)",
        TELL_WHEN_WAITING,
        "running = lp.launch(make_program(Waiter), 'local_mp')",
        {
            "code": f"tell_when_waiting({str(started)!r}); running.wait()",
            "interrupt_at": str(started),
        },
        "print(running.result.outcome, running.result.exit_code)",
    )
    assert first[1] is None
    assert "Outcome.COMPLETED" in first[0]
    assert error == "KeyboardInterrupt"
    assert last == ("Outcome.INTERRUPTED 130\n", None)


def test_a_running_program_is_a_table_in_all_its_cells_until_it_has_ended(tmp_path):
    *results, displays = run_cells(
        tmp_path,
        PROGRAM,
        "running = lp.launch(make_program(Waiter), 'local_mp')",
        "running",
        "running",
        "running.stop()",
        "import threading\n"
        "tables = [each for each in threading.enumerate() if each.name == 'launchpad-table']\n"
        "[each.join(60) for each in tables]\n"
        "print(len(tables) < 2, any(each.is_alive() for each in tables))",
        with_displays=True,
    )
    assert [error for _, error in results] == [None] * len(results)
    assert results[-1][0] == "True False\n"
    kinds, (place,) = [kind for kind, _, _ in displays], {place for _, place, _ in displays}
    assert place
    assert kinds.count("display_data") == 2
    assert kinds[-1] == "update_display_data"
    first, last = displays[0][2], displays[-1][2]
    assert first["text/html"].startswith(
        "<pre>RunningProgram(&#x27;notebook&#x27;, 3 nodes, running"
    )
    assert "other[0]" in first["text/plain"]
    assert "3 nodes, stopped" in last["text/plain"]


def test_tab_and_shift_tab_show_the_methods_of_a_node(tmp_path):
    *_, methods, futures, shown, _ = run_cells(
        tmp_path,
        PROGRAM,
        "class Learner:\n"
        "    def step(self, k: int = 1) -> int:\n"
        "        'Makes k steps.'\n"
        "program = lp.Program('notebook')\n"
        "handle = program.add_node(lp.CourierNode(Learner), label='learner')\n"
        "running = lp.launch(program, 'local_mp')\n"
        "learner = handle.dereference()\n"
        "learner.step()",
        {"key": "complete", "text": "learner."},
        {"key": "complete", "text": "learner.futures."},
        {"key": "inspect", "text": "learner.step"},
        "running.stop()",
    )
    assert methods[0].split() == ["address", "aio", "futures", "step"]
    assert futures[0] == "step"
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown[0])
    assert "learner.step(k: int = 1) -> int" in text
    assert "Makes k steps." in text
