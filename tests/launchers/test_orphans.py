"""Whoever is killed, and whenever: nothing of a program is left."""

import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.launchers.scripts import Script, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_FAMILY = """
    import os, pathlib, subprocess, sys, time
    import launchpad_lite as lp

    class Parent:
        def __init__(self, index):
            self.index = index

        def ping(self):
            return self.index

        def run(self):
            subprocess.Popen(["sleep", "1000"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            if os.fork() == 0:
                time.sleep(1000)
            if self.index % 2 and os.fork() == 0:
                os.setsid()
                if os.fork() == 0:  # a daemon, twice removed
                    time.sleep(1000)
                os._exit(0)
            pathlib.Path(f"up{self.index}").touch()
            time.sleep(1000)

    program = lp.Program("family")
    with program.group("parent"):
        for index in range(8):
            program.add_node(lp.CourierNode(Parent, index))
    lp.launch(program, notice_s=30)
"""
#: Four children of each node, a daemon's dead parent aside.
_ALL = 8


def connections_of(process):
    # The name before psutil 6.
    ask = getattr(process, "net_connections", None) or process.connections
    return ask("tcp")


def _family(folder: Path, *, complete: bool = True) -> Script:
    script = Script(folder, _FAMILY)
    script.start(quiet=True)
    if complete:
        script.wait_for("up", _ALL)
    return script


def _worker(script: Script) -> psutil.Process:
    agent = script.agent()
    assert agent is not None
    return next(each for each in agent.children() if each.children())


def _assert_only_logs(script: Script) -> None:
    left = {each.name for each in script.folder.iterdir() if not each.name.startswith("up")}
    assert left <= {"script.py", "logs"}


@pytest.mark.parametrize("moment", range(10))
def test_nothing_is_left_when_the_launcher_is_killed_at_any_moment(
    tmp_path: Path, moment: int
) -> None:
    delay_s = random.Random(moment).uniform(0.0, 1.2)
    with _family(tmp_path, complete=False) as script:
        assert script.process is not None
        time.sleep(delay_s)  # the moment is what is tested
        kill(script.process)
        script.process.wait()
        script.assert_gone()
        _assert_only_logs(script)


@pytest.mark.parametrize("moment", range(4))
def test_nothing_is_left_when_launcher_and_agent_are_killed_together(
    tmp_path: Path, moment: int
) -> None:
    with _family(tmp_path, complete=moment == 0) as script:
        assert script.process is not None
        agent = poll_until(script.agent, 60)
        assert agent is not None
        time.sleep(random.Random(moment).uniform(0.0, 0.6) if moment else 0)
        kill(agent)
        kill(script.process)
        script.process.wait()
        script.assert_gone()
        _assert_only_logs(script)


def test_nothing_is_left_when_the_agent_is_killed_and_the_launcher_says_so(tmp_path: Path) -> None:
    with Script(tmp_path, _FAMILY) as script:
        process = script.start()
        script.wait_for("up", _ALL)
        agent = script.agent()
        assert agent is not None
        kill(agent)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the agent of localhost died" in stderr
        script.assert_gone()


def test_nothing_is_left_when_a_worker_is_killed_and_it_is_named(tmp_path: Path) -> None:
    script = Script(tmp_path, _FAMILY.replace("notice_s=30", "notice_s=0.5"))
    with script:
        process = script.start()
        script.wait_for("up", _ALL)
        kill(_worker(script))
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "parent[" in stderr
        assert "killed by SIGKILL" in stderr
        script.assert_gone()


def test_children_of_a_node_end_with_it_while_the_program_goes_on(tmp_path: Path) -> None:
    source = """
        import os, subprocess, pathlib
        import launchpad_lite as lp

        def short():
            child = subprocess.Popen(["sleep", "1000"])
            pathlib.Path("pid.tmp").write_text(str(child.pid))
            os.rename("pid.tmp", "child")

        program = lp.Program("children")
        program.add_node(lp.PyNode(short), label="short")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
        lp.launch(program)
    """
    with Script(tmp_path, source) as script:
        process = script.start(quiet=True)
        script.wait_for("child")
        pid = int((tmp_path / "child").read_text())
        poll_until(lambda: not psutil.pid_exists(pid))
        assert process.poll() is None


def test_daemons_of_a_node_end_with_a_program_that_ends_well(tmp_path: Path) -> None:
    source = """
        import subprocess
        import launchpad_lite as lp

        def node():  # its daemon never stops printing into the node's output
            subprocess.Popen(["yes"], start_new_session=True)

        program = lp.Program("daemons")
        program.add_node(lp.PyNode(node), label="node")
        lp.launch(program, launcher="test_mp").wait()
    """
    with Script(tmp_path, source) as script:
        assert script.run().code == 0
        assert script.processes() == []


def test_nothing_is_left_if_a_child_of_the_killed_launcher_holds_its_pipes(tmp_path: Path) -> None:
    source = _FAMILY + "\n    if os.fork() == 0:\n        time.sleep(1000)\n"
    with Script(tmp_path, source) as script:
        process = script.start(quiet=True)
        script.wait_for("up", _ALL)
        own = poll_until(
            lambda: [
                each
                for each in psutil.Process(process.pid).children()
                if "script.py" in " ".join(each.cmdline())
            ]
        )
        kill(process)
        process.wait()
        poll_until(lambda: {each.pid for each in script.processes()} == {own[0].pid})


def test_ports_of_a_killed_program_are_free(tmp_path: Path) -> None:
    with _family(tmp_path) as script:
        assert script.process is not None
        listening = {
            connection.laddr.port
            for worker in script.processes()
            for connection in connections_of(worker)
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(listening) >= _ALL
        kill(script.process)
        script.process.wait()
        script.assert_gone()
        # Others of this machine may take one, and give it back.
        poll_until(lambda: not listening & _listening_ports())


def _listening_ports() -> set[int]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {
        int(fields[1].split(":")[1], 16) for fields in map(str.split, lines) if fields[3] == "0A"
    }
