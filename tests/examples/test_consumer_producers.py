import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.consumer_producers.program import make_program

_ROOT = Path(__file__).parents[2]
_PROGRAM = "examples.consumer_producers.program:make_program"


def run(*arguments: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def launch_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("-m", "launchpad_lite.launch", *arguments)


@pytest.mark.parametrize("num_producers", [1, 3])
def test_threads_consume_everything(launch_program: Any, capsys: Any, num_producers: int) -> None:
    assert launch_program(make_program(num_producers), "test_mt").wait().exit_code == 0
    assert f"total: {sum(range(10 * num_producers))}\n" in capsys.readouterr().out


def test_processes_consume_everything(launch_program: Any, tmp_path: Path) -> None:
    launched = launch_program(make_program(num_producers=2), "test_mp", log_dir=tmp_path)
    assert launched.wait().exit_code == 0
    assert "total: 190\n" in (tmp_path / "consumer" / "0.log").read_text()


@pytest.mark.parametrize(
    "command",
    [("-m", "examples.consumer_producers.launch"), ("examples/consumer_producers/launch.py",)],
    ids=["module", "file"],
)
def test_the_script_runs_as_a_module_and_as_a_file(command: tuple[str, ...]) -> None:
    done = run(*command, "--launcher=local_mt", env={"PYTHONPATH": str(_ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "total: 190\n" in done.stdout


@pytest.mark.parametrize("launcher", ["local_mp", "local_mt"])
def test_the_command_line_runs_it(launcher: str, tmp_path: Path) -> None:
    done = launch_command(f"--launcher={launcher}", _PROGRAM, "--num_producers=4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "total: 780\n" in done.stdout


def test_the_command_line_plans_it() -> None:
    done = launch_command("plan", _PROGRAM, "--num_producers=3")
    assert done.returncode == 0
    assert "producer[2]  CourierNode(Range)" in done.stdout
    assert "consumer[0]  CourierNode(Consumer)  calls producer[0], producer[1], producer[2]" in (
        done.stdout
    )


def test_the_command_line_renders_it_as_mermaid() -> None:
    done = launch_command("render", _PROGRAM)
    assert done.returncode == 0
    assert done.stdout.startswith("flowchart LR\n")
    assert done.stdout.count(" --> ") == 2


def test_the_command_line_renders_it_as_svg(tmp_path: Path) -> None:
    if shutil.which("dot") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have Graphviz, so that drawing is tested")
        pytest.skip("the program 'dot' of Graphviz is not installed")
    output = tmp_path / "graph.svg"
    done = launch_command("render", _PROGRAM, f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    svg = output.read_text()
    assert "<svg" in svg
    assert len(re.findall(r'class="edge"', svg)) == 2
