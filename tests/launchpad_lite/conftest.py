"""Scripts in processes of their own, run as users run them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of scripts: logs go to the test's folder, pytest is not seen."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return {**ours, "LAUNCHPAD_LOGGING_DIR": str(tmp_path / "logs"), "PYTHONPATH": str(_ROOT)}


@pytest.fixture
def run_script(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Runs source code as a file, with arguments, to its end."""

    def run(
        source: str, *arguments: str, name: str = "script.py"
    ) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / name
        path.write_text(source)
        return _run([sys.executable, str(path), *arguments], tmp_path, environment)

    return run


@pytest.fixture
def run_command(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Runs `python -m launchpad_lite.launch` in the test's folder."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "launchpad_lite.launch", *arguments]
        return _run(command, tmp_path, environment)

    return run


def _run(
    command: list[str], folder: Path, environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
