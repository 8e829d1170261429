"""The search that `fuzz_frames` makes, for as long as one likes: COURIER_FUZZ_S, in all."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_TARGETS = ("frames", "handshake", "guest", "link")
_SECONDS = float(os.environ.get("COURIER_FUZZ_S", "600"))


@pytest.mark.long
@pytest.mark.timeout(_SECONDS + 120)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
@pytest.mark.parametrize("target", _TARGETS)
def test_no_input_is_found_that_the_engine_does_not_bear(target: str, tmp_path: Path) -> None:
    findings, corpus = tmp_path / "findings", tmp_path / "corpus"
    corpus.mkdir()
    # By a shell: a process that we start counts the memory that we have used as its own.
    command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-m"]
    command += ["tests.courier.fuzz_frames", target, str(findings)]
    limits = [
        f"-max_total_time={max(1, round(_SECONDS / len(_TARGETS)))}",
        "-max_len=2048",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={tmp_path}/",
    ]
    done = subprocess.run([*command, *limits, str(corpus)], cwd=_ROOT, capture_output=True)
    log = done.stderr.decode("utf-8", "replace")
    found = [path.read_text() for path in findings.glob("*.txt")]
    assert not found, "\n".join(found)
    assert done.returncode == 0, log[-4_000:]
    tried = re.search(r"Done (\d+) runs", log)
    assert tried, log[-4_000:]
    print(f"{target}: {tried[1]} inputs", file=sys.stderr)
