"""The generated code that is checked in is what `protos/` says."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from courier._proto import courier_pb2
from launchpad_lite.search._proto import search_pb2

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


@pytest.mark.parametrize(
    ("package", "name"), [("courier._proto", "courier"), ("launchpad_lite.search._proto", "search")]
)
def test_the_generated_code_loads_with_the_installed_protobuf(package: str, name: str) -> None:
    # A fresh interpreter: warnings at import count, and the descriptor pool starts empty.
    load = (
        f"from {package}.{name}_pb2 import DESCRIPTOR; print(DESCRIPTOR.package, DESCRIPTOR.name)"
    )
    loaded = subprocess.run(
        [sys.executable, "-W", "error", "-c", load], capture_output=True, text=True, cwd=ROOT
    )
    assert loaded.stdout == f"{name}.v1 {name}/v1/{name}.proto\n", loaded.stderr


@pytest.mark.parametrize("file", [courier_pb2.DESCRIPTOR, search_pb2.DESCRIPTOR])
def test_no_message_has_a_map_whose_bytes_have_a_free_order_and_are_sealed(file: Any) -> None:
    kinds = list(file.message_types_by_name.values())
    for kind in kinds:
        kinds.extend(kind.nested_types)
    assert [kind.full_name for kind in kinds if kind.GetOptions().map_entry] == []
