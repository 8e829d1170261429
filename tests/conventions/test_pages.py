"""What the README and the documentation show is true: their Python runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from examples.consumer_producers.program import make_program
from tests.launchers.scripts import without_logs_line

_ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (_ROOT / page).read_text(encoding="utf-8")
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


def file_name(block: str) -> str:
    """Each Python block is a file, named in its first line."""
    found = re.match(r"# (\w+\.py)\n", block)
    assert found, f"a Python block must begin with its file name:\n{block}"
    return found[1]


#: The page of promises has a test of its own.
_PAGES = [
    "README.md",
    *(f"docs/{path.name}" for path in (_ROOT / "docs").glob("*.md") if path.stem != "promises"),
]
_BLOCKS = [block for page in _PAGES for block in blocks("python", page)]
_FILES = {file_name(block): block for block in _BLOCKS}
#: What is printed by programs whose page says it.
_OUTPUT = {
    "announcing.py": "starting greeter[0]\nhello\n",
    "cell.py": "steps: 1\n",
    "changed.py": "[trainer[0]] training\n",
    "in_code.py": "Outcome.COMPLETED\n",
    "powers.py": "[32, 9]\n",
    "rates.py": "best: {'rate': 0.1}\n",
    "ready.py": "[0, 1, 4, 9]\n[0, 1, 4, 9]\n",
    "serial.py": "[caller[0]] counted: 100\n",
    "sheet.py": (
        "[actor[0]] 2\n[actor[0]] 3\n[actor[0]] [0, 1, 2]\n[actor[0]] 4\n[actor[0]] actor[0]\n"
    ),
    "train.py": "training\n",
    "hello.py": "[visitor[0]] hello, world\n",
    "which_barrier.py": (
        "BSP(): 17 steps, waited 90%\n"
        "SSP(staleness=4): 36 steps, waited 79%\n"
        "PSP(sample_size=10, staleness=4, resample=0.1): 150 steps, waited 24%\n"
        "ASP(): 200 steps, waited 0%\n"
    ),
    "words.py": "[('and', 1), ('cat', 2), ('hat', 2), ('in', 1), ('the', 4)]\n",
    "fit.py": "[evaluator[0]] weights: [1. 2. 3.]\n",
    "first.py": "the total is now 20\n",
    "from_submitit.py": "best: rate 0.5, depth 1, loss 0\n",
    "futures.py": "[driver[0]] squares: [0, 1, 4]\n[driver[0]] stream: [0, 1, 2]\n",
    "keeping.py": "runs: 2, lost workers: 1\n['state.json']\n",
    "models.py": "999000\n",
    "pausing.py": "[trainer[0]] total: 3\n",
    "page_node.py": "[reader[0]] a page\n",
    "replicate.py": "[6.0, 6.0]\n",
    "set_up.py": "[trainer[0]] threads of BLAS: 1 11\n",
    "sharded_sum.py": "[worker[0]] the sum of a is [5 5 5]\n",
    "square.py": "[driver[0]] 285\n",
    "squares.py": "[0, 1, 4, 9, 16]\n",
    "survivors.py": "[search[0]] best x: 3\n",
    "tune.py": "best rate: 0.1\n",
    "watched.py": "[learner[0]] step 0: loss=1\n[learner[0]] step 99: loss=0.01\n",
    "typed.py": "[visitor[0]] hello, world\n",
}


#: How programs run that are not run by their file alone: with the package of the original; in a cell.
_COMMANDS = {
    "train.py": ("-m", "launchpad_lite.launch", "--compat", "train.py"),
    "cell.py": ("-c", _FILES["cell.py"] + "running.stop()"),
}
#: Pages that list, or show no Python of their own; others begin with a program.
_LISTS = """
    architecture benchmarks command_line examples index other_languages post_training promises recipes security troubleshooting
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a folder that has all files of the pages."""
    for name, block in _FILES.items():
        (folder / name).write_text(block)
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "LAUNCHPAD_LOGGING_DIR": str(folder / "logs"),
    }
    # The runs below are none of this test's.
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def files(*, are_tests: bool) -> list[Any]:
    names = [name for name in _FILES if name.startswith("test_") is are_tests]
    marks = {name: () if name == "hello.py" else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.mark.parametrize("name", files(are_tests=False))
def test_the_programs_of_the_pages_run(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, *_COMMANDS.get(name, (name,)))
    if name in _OUTPUT:
        assert without_logs_line(done.stderr) == ""
        # An HTTP server logs its requests beside.
        assert _OUTPUT[name] in done.stdout


@pytest.mark.parametrize("page", [page for page in _PAGES if Path(page).stem not in _LISTS.split()])
def test_a_page_begins_with_a_program_that_runs(page: str) -> None:
    languages = [language for language, _ in _BLOCK.findall((_ROOT / page).read_text("utf-8"))]
    assert "reference_" in page or languages[0] == "python"


def test_no_two_blocks_have_the_same_name() -> None:
    assert len(_FILES) == len(_BLOCKS)


@pytest.mark.parametrize("name", files(are_tests=True))
def test_its_tests_pass(tmp_path: Path, name: str) -> None:
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", name)


def test_its_picture_is_the_one_that_render_draws() -> None:
    assert blocks("mermaid") == [lp.render_mermaid(lp.plan(make_program(), "local_mp"))]


def test_the_tests_that_the_page_of_security_names_exist() -> None:
    page = (_ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)::(\w+)`", page)
    assert len(named) > 20
    for path, name in named:
        source = (_ROOT / "tests" / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"
