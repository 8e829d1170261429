"""What the README shows is true: its Python runs, its picture is what we draw."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launchpad_lite as lp
from examples.consumer_producers.program import make_program

_ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (_ROOT / page).read_text(encoding="utf-8")
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


def file_name(block: str) -> str:
    """Each Python block is a file, named in its first line."""
    found = re.match(r"# (\w+\.py)\n", block)
    assert found, f"a Python block of the README must begin with its file name:\n{block}"
    return found[1]


_FILES = {file_name(block): block for block in blocks("python")}
_OUTPUT = {
    "hello.py": "[visitor[0]] hello, world\n",
    "page_node.py": "[reader[0]] a page\n",
    "survivors.py": "[search[0]] best x: 3\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, block in _FILES.items():
        (tmp_path / name).write_text(block)
    return tmp_path


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "LAUNCHPAD_LOGGING_DIR": str(folder / "logs"),
    }
    # The runs below are none of this test's.
    environment.pop("PYTEST_CURRENT_TEST", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("name", [name for name in _FILES if not name.startswith("test_")])
def test_its_programs_run(folder: Path, name: str) -> None:
    done = run(folder, name)
    assert (done.returncode, done.stderr) == (0, "")
    # An HTTP server logs its requests beside.
    assert _OUTPUT[name] in done.stdout


_PAGES = ("docs/nodes.md", "docs/resources.md")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(block, id=file_name(block))
        for page in _PAGES
        for block in blocks("python", page)
    ],
)
def test_the_programs_of_other_pages_run(folder: Path, program: str) -> None:
    (folder / file_name(program)).write_text(program)
    done = run(folder, file_name(program))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in _FILES if name.startswith("test_")])
def test_its_tests_pass(folder: Path, name: str) -> None:
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_picture_is_the_one_that_render_draws() -> None:
    assert blocks("mermaid") == [lp.render_mermaid(lp.plan(make_program(), "local_mp"))]
