"""Programs that are launched at a prompt: an interpreter that a person types into."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_LAUNCH = """
import os, signal, sys
import launchpad_lite as lp

class Server:
    def who(self): return "it serves"

program = lp.Program("prompt")
handle = program.add_node(lp.CourierNode(Server), label="server")
running = lp.launch(program, LAUNCHER)
print(handle.dereference().who())
"""
_TYPED = """
1 / 0
os.kill(os.getpid(), signal.SIGINT)
print("still running:", running.result is None)
"""


@pytest.mark.parametrize("launcher", ["local_mt", "test_mp"])
def test_mistakes_and_interrupts_at_a_prompt_end_nothing_and_its_end_ends_all(
    tmp_path: Path, environment: dict[str, str], launcher: str
) -> None:
    typed = _LAUNCH.replace("LAUNCHER", repr(launcher)) + _TYPED
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=typed,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["it serves", "still running: True"], done.stderr
    # Python 3.14 itself ends so if it was interrupted at its prompt.
    assert done.returncode == (0 if sys.version_info < (3, 14) else -signal.SIGINT)
    assert "ZeroDivisionError" in done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "launchpad:" not in done.stderr


def test_a_script_that_only_serves_says_so_when_it_has_ended(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LAUNCH.replace("LAUNCHER", "'local_mt'"))
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stderr: Any = process.stderr
        assert (
            stderr.readline() == "launchpad: the nodes of 'prompt' only serve; Ctrl-C stops them\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
