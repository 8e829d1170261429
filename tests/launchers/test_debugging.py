"""Debuggers in running nodes, on terminals that are real."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.life.events import Debugged, Said
from launchpad_lite.testing import poll_until
from launchpad_lite.worker.address import AddressTable
from launchpad_lite.worker.debugger import debug
from launchpad_lite.worker.runtime import NodeRuntime, NodeSetup
from tests.launchers.scripts import Script

_OURS = str(Path(__file__).parents[2])
_SOURCE = """
    import launchpad_lite as lp

    class Trainer:
        def __init__(self, number):
            self.number = number

        def run(self):
            total = self.number
            breakpoint()
            total += 1
            print("total:", total, flush=True)

    def make_program():
        program = lp.Program("pausing")
        with program.group("trainer"):
            for number in (10, 20):
                program.add_node(lp.PyClassNode(Trainer, number))
        return program

    if __name__ == "__main__":
        lp.main(make_program)
"""


class _Terminal:
    """A terminal with a command that runs on it; a context manager that ends it."""

    def __init__(self, *command: str, env: dict[str, str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            with contextlib.suppress(OSError):
                os.execve(command[0], command, {**os.environ, "TERM": "dumb", **env})
            os._exit(1)
        self._read = ""

    def expect(self, pattern: str) -> str:
        """Waits until a pattern has been shown; returns what was shown before."""
        give_up_at = time.monotonic() + 30
        while not (found := re.search(pattern, self._read)):
            assert time.monotonic() < give_up_at, f"no {pattern!r} in {self._read!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self._read += os.read(self._fd, 4096).decode()
                except OSError:  # how Linux says that it is closed
                    raise AssertionError(f"no {pattern!r} at the end of {self._read!r}") from None
        before, self._read = self._read[: found.start()], self._read[found.end() :]
        return before

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    def __enter__(self) -> "_Terminal":
        return self

    def __exit__(self, *exc: object) -> None:
        os.kill(self._pid, signal.SIGTERM)
        with contextlib.suppress(OSError):
            while os.read(self._fd, 4096):
                pass
        os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    with Script(tmp_path, _SOURCE) as script:
        yield script


def test_a_breakpoint_has_the_terminal_of_the_launch_one_node_after_the_other(
    script: Script,
) -> None:
    env = {"LAUNCHPAD_LOGGING_DIR": str(script.logs), "PYTHONPATH": _OURS}
    with _Terminal(sys.executable, str(script.path), env=env) as terminal:
        totals = set()
        for _ in range(2):
            # Python 3.13 and later stop at the line itself, others at the next one.
            terminal.expect(r"script\.py\(1[01]\)run\(\)\r\n-> .*\r\n\(Pdb\) ")
            terminal.type("where")
            assert "agent.py" not in terminal.expect(r"-> .*\r\n\(Pdb\) ")
            terminal.type("p total")
            totals.add(terminal.expect(r"\r\n\(Pdb\) ").splitlines()[-1])
            terminal.type("until 12")
            terminal.expect(r'-> print\("total:", total, flush=True\)\r\n\(Pdb\) ')
            terminal.type("total = -1")
            terminal.expect(r"\(Pdb\) ")
            terminal.type("continue")
        assert totals == {"10", "20"}
        terminal.expect("pausing: completed")
    for node in ("trainer[0]", "trainer[1]"):
        assert script.log(node) == b"total: -1\n"


def test_without_a_terminal_a_breakpoint_says_so_and_the_node_goes_on(script: Script) -> None:
    ended = script.run(env={"PYTHONPATH": _OURS})
    assert ended.code == 0, ended.stderr
    attach = "python -m launchpad_lite.launch attach pausing 'trainer[0]'"
    line = f"launchpad: breakpoint() at script.py:10 does not stop trainer[0], to which no terminal leads. To look into it: {attach}"
    assert script.log("trainer[0]").decode() == f"{line}\ntotal: 11\n"


class Server:
    def get(self, key: int) -> None:
        lp.wait_for_stop()


class Client:
    def __init__(self, server: Any) -> None:
        self._server = server

    def run(self) -> None:
        key = 17
        self._server.get(key)


def test_another_shell_looks_at_the_variables_of_threads_that_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = lp.Program("waiting")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyClassNode(Client, server), label="client")
    with lp.launch(program, "test_mp") as running:
        poll_until(lambda: "in get\n" in running.stacks()["server[0]"])
        shell = (sys.executable, "-m", "launchpad_lite.launch", "attach", "waiting", "client[0]")
        with _Terminal(*shell, env={"PYTHONPATH": _OURS}) as terminal:
            terminal.expect(r"-> self\._server\.get\(key\)\r\n\(Pdb\) ")
            terminal.type("key + 1")
            terminal.expect(r"18\r\n\(Pdb\) ")
            terminal.type("next")
            terminal.expect("The thread runs on, so it cannot be stepped")
            terminal.type("thread")
            terminal.expect(r"MainThread  \S*test_debugging\.py:\d+ run")

        def debug(argument: str | None) -> Any:
            return running.ask("debug", argument, nodes=["server[0]"])["server[0]"]

        debug(None)
        debug("=thread courier-handler-1")
        assert debug("=p key") == {"output": "17\n(Pdb) ", "asks": True, "over": False}
        assert debug("=quit") == {"output": "", "asks": False, "over": True}
        running.request_stop("enough")


def test_a_debugger_that_was_forgotten_does_not_keep_a_node_from_being_found_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Said] = []
    setup = NodeSetup("p", "node", 0, liveness=lp.Liveness(heartbeat_s=9.0))
    runtime = NodeRuntime(setup, AddressTable({}, courier.Secret.generate()), said.append)
    first = debug(runtime, None, None)
    try:
        assert "until 10 minutes after your last line" in first["output"]
        assert any(isinstance(each, Debugged) for each in said)
        monkeypatch.setattr("launchpad_lite.worker.debugger._USED_S", 0.0)
        poll_until(lambda: _says_nothing(runtime, said))
    finally:
        debug(runtime, None, "=quit")


def _says_nothing(runtime: NodeRuntime, said: list[Said]) -> bool:
    said.clear()  # a sign may be on its way
    debug(runtime, None, "")
    return not said
