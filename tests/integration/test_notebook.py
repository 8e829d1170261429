"""Programs are launched, waited for and interrupted from a real notebook kernel."""

import json
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


def run_cells(folder, *cells):
    """Runs a notebook; a cell is code, or code and the file at whose coming it is interrupted."""
    pairs = [cell if isinstance(cell, tuple) else (cell, None) for cell in cells]
    spec = [{"code": code, "interrupt_at": file and str(file)} for code, file in pairs]
    driver = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
    )
    assert driver.returncode == 0, driver.stderr
    return [tuple(result) for result in json.loads(driver.stdout)]


def test_a_cell_launches_a_program_and_the_next_waits_for_it(tmp_path):
    *earlier, (printed, error) = run_cells(
        tmp_path,
        PROGRAM,
        "running = lp.launch(make_program(), 'local_mp')",
        "print(running.wait().outcome)",
    )
    assert [failed for _, failed in earlier] == [None, None]
    assert error is None
    assert "Outcome.COMPLETED" in printed


def test_interrupting_the_kernel_stops_the_program_and_keeps_the_notebook(tmp_path):
    started = tmp_path / "waiting"
    *_, (_, error), last = run_cells(
        tmp_path,
        PROGRAM,
        TELL_WHEN_WAITING,
        "running = lp.launch(make_program(Waiter), 'local_mp')",
        (f"tell_when_waiting({str(started)!r}); running.wait()", started),
        "print(running.result.outcome, running.result.exit_code)",
    )
    assert error == "KeyboardInterrupt"
    assert last == ("Outcome.INTERRUPTED 130\n", None)
