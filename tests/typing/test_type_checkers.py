"""Type checkers follow calls from the node's class to the client: they report planted mistakes."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SNIPPET = Path(__file__).with_name("planted_mistakes.py")

#: Behind lines that each type checker reports; and those that mypy does with our plug-in.
_MARKS = ("# mistake", "# mistake for the plug-in")

#: Pinned, as its verdict changes with its version.
_PYRIGHT_VERSION = "1.1.414"
_PYRIGHT_FOLDER = _ROOT / ".cache" / "pyright"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def planted_lines(*marks: str) -> list[int]:
    lines = _SNIPPET.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith(marks)]


def test_mypy_reports_exactly_the_planted_mistakes(tmp_path: Path) -> None:
    try:
        importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mypy is not installed")
    done = run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--cache-dir", str(tmp_path), _SNIPPET]
    )
    reported = re.findall(rf"{_SNIPPET.name}:(\d+): error", done.stdout)
    assert sorted({int(number) for number in reported}) == planted_lines(*_MARKS), done.stdout
    assert len(set(re.findall(r"^(.*?):\d+: error", done.stdout, re.MULTILINE))) == 1, done.stdout


def test_pyright_reports_exactly_the_planted_mistakes() -> None:
    done = run([find_pyright(), "--outputjson", "--pythonpath", sys.executable, _SNIPPET])
    diagnostics = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in diagnostics if each["severity"] == "error"]
    reported = sorted({each["range"]["start"]["line"] + 1 for each in errors})
    assert reported == planted_lines(_MARKS[0]), "\n".join(each["message"] for each in errors)


def find_pyright() -> Path:
    """Returns pyright's command; CI installs it, other machines need not have it."""
    command = _PYRIGHT_FOLDER / "node_modules" / ".bin" / "pyright"
    if not command.exists() and os.environ.get("CI") == "true":
        npm = shutil.which("npm")
        assert npm is not None, "CI checks with pyright, which needs Node: install nodejs and npm"
        package = f"pyright@{_PYRIGHT_VERSION}"
        done = run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", _PYRIGHT_FOLDER, package]
        )
        assert done.returncode == 0, done.stderr
    if not command.exists():
        pytest.skip(
            f"needs pyright: npm install --prefix .cache/pyright pyright@{_PYRIGHT_VERSION}"
        )
    return command


def run(command: "list[str | Path]") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280)
