import os
import sys
from pathlib import Path

import pytest

from tests.engines import needs_acme
from tests.launchers.scripts import Script

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_acme
@pytest.mark.parametrize("launch_type", ["local_mt", "local_mp"])
def test_an_agent_of_acme_runs_without_a_change(tmp_path: Path, launch_type: str) -> None:
    command = (sys.executable, str(_ROOT / "examples" / "acme" / "launch.py"))
    environment = {
        "HOME": str(tmp_path),  # Acme's own checkpoints go to ~/acme
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'compat'}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with Script(tmp_path, "") as script:
        process = script.start(
            f"--lp_launch_type={launch_type}", "--steps=3000", command=command, env=environment
        )
        stdout, stderr = process.communicate(timeout=240)
        script.assert_gone()
    assert process.returncode == 0, stderr
    assert "CallCancelledError" not in stdout + stderr
