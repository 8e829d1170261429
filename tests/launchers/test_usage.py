import os
import signal
import subprocess
import sys

import psutil
import pytest

from launchers.host.usage import UsageMeter
from launchpad_lite.testing import poll_until


def test_a_worker_that_computes_is_seen_and_one_that_has_gone_is_left_out() -> None:
    meter = UsageMeter()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        poll_until(lambda: (meter.look({"node": busy.pid})["node"]["cpu"] or 0) > 0)
        memory_mib = psutil.Process(busy.pid).memory_info().rss / (1 << 20)
        usage = meter.look({"node": busy.pid})
        assert usage["node"]["memory_mib"] == pytest.approx(memory_mib, rel=0.1)
    finally:
        busy.kill()
        busy.wait()
    assert meter.look({"node": busy.pid}) == {}


def test_what_children_of_a_worker_use_counts_as_its_own() -> None:
    meter = UsageMeter()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        child = poll_until(psutil.Process(worker.pid).children)[0]
        poll_until(lambda: (meter.look({"node": worker.pid})["node"]["cpu"] or 0) > 0.3)
        both = psutil.Process(worker.pid).memory_info().rss + child.memory_info().rss
        usage = meter.look({"node": worker.pid})
        assert usage["node"]["memory_mib"] == pytest.approx(both / (1 << 20), rel=0.1)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
