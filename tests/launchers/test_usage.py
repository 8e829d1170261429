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
