import sys
from pathlib import Path

import pytest

from tests.launchers.scripts import Script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others adopt no orphans")


def test_who_ignores_sigterm_is_ended_though_the_sweeper_stood_still(tmp_path: Path) -> None:
    source = """
        import itertools, os, subprocess, sys
        from launchers.host import sweep

        child = subprocess.Popen(
            [sys.executable, "-c", "import signal, sys, time;"
             "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"],
            stdout=subprocess.PIPE,
        )
        child.stdout.readline()
        clock = itertools.chain([0.0, 0.1], itertools.count(60.0, 0.01))
        sweep.end_children(clock=lambda: next(clock))
        print("left" if os.path.exists(f"/proc/{child.pid}") else "gone", flush=True)
        child.kill()
        child.returncode = 0
    """
    with Script(tmp_path, source) as script:
        assert script.run().stdout.splitlines()[-1] == "gone"
