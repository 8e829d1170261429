"""What is checked in below `courier/_proto/` is what `protos/` says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_GENERATOR = 3  # protos/generate.py: no Python here can run the pinned generator.


@pytest.mark.slow
@pytest.mark.timeout(600)  # The first run installs the generator.
def test_the_generated_code_is_up_to_date() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
    )
    if check.returncode == NO_GENERATOR and os.environ.get("CI") != "true":
        pytest.skip(check.stderr.strip())
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_generated_code_loads_with_the_installed_protobuf() -> None:
    # A fresh interpreter: warnings at import count, and the descriptor pool starts empty.
    load = (
        "from courier._proto import courier_pb2; "
        "print(courier_pb2.DESCRIPTOR.package, courier_pb2.DESCRIPTOR.name)"
    )
    loaded = subprocess.run(
        [sys.executable, "-W", "error", "-c", load], capture_output=True, text=True, cwd=ROOT
    )
    assert loaded.stdout == "courier.v1 courier/v1/courier.proto\n", loaded.stderr
