from typing import Any

import pytest

from examples.consumer_producers.program import make_program
from tests.examples.running import ROOT, run_python
from tests.launchers.scripts import without_logs_line


def run(*arguments: str) -> str:
    """Runs it as users do; returns what was printed."""
    done = run_python(*arguments)
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    return done.stdout


@pytest.mark.parametrize("num_producers", [1, 3])
def test_threads_consume_everything(launch_program: Any, capsys: Any, num_producers: int) -> None:
    assert launch_program(make_program(num_producers), "test_mt").wait().exit_code == 0
    assert f"total: {sum(range(10 * num_producers))}\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("-m", "examples.consumer_producers.launch"), ("examples/consumer_producers/launch.py",)],
    ids=["module", "file"],
)
def test_the_script_runs_as_a_module_and_as_a_file(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "total: 190\n" in run(*command, "--launcher=local_mt")
