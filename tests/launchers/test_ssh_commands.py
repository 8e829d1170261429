"""What ssh is told, which host gets which node, and a launch where a shell takes the place of ssh."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.hosts.arrival import LOADER
from launchers.ssh import HostSpec, SshLauncher
from launchpad_lite.errors import LaunchError, ProgramError
from tests.launchers.running import shell_command


class Node:
    def run(self) -> None: ...


def make_program(actors: int = 2) -> lp.Program:
    program = lp.Program("placed")
    for group, count in (("actor", actors), ("learner", 1)):
        with program.group(group):
            for _ in range(count):
                program.add_node(lp.CourierNode(Node))
    return program


def command(spec: HostSpec, **options: Any) -> list[str]:
    launcher = SshLauncher([spec], **options)
    return launcher.command(spec, launcher._there(spec))


_OPTIONS = (
    "-T -o BatchMode=yes -o ConnectTimeout={} -o ServerAliveInterval={} -o ServerAliveCountMax=4"
)
_PLAIN = f"ssh {_OPTIONS.format(10, 2)}"


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        (HostSpec("h1"), {}, f"{_PLAIN} -- h1"),
        (HostSpec("h1", user="ann"), {}, f"{_PLAIN} -- ann@h1"),
        (HostSpec("h1", user="ann@realm", port=2222), {}, f"{_PLAIN} -p 2222 -- ann@realm@h1"),
        (HostSpec("fd00::1", user="ann"), {}, f"{_PLAIN} -- ann@fd00::1"),
        # Where others reach it has nothing to do with how ssh does.
        (HostSpec("h1", address="10.0.0.1", gpu=2), {}, f"{_PLAIN} -- h1"),
        # Time limits become those of ssh, a second at least.
        (
            HostSpec("h1"),
            {"silence_s": 60, "connect_s": 90},
            f"ssh {_OPTIONS.format(45, 15)} -- h1",
        ),
        (HostSpec("h1"), {"silence_s": 1, "connect_s": 1}, f"ssh {_OPTIONS.format(1, 1)} -- h1"),
        # Options of the user come first, so that ssh heeds them.
        (
            HostSpec("h1"),
            {"ssh": "ssh -F 'my config'"},
            f"ssh -F 'my config' {_OPTIONS.format(10, 2)} -- h1",
        ),
        (
            HostSpec("h1"),
            {"ssh": ("ssh", "-F", "other config", "-o", "ConnectTimeout=99")},
            f"ssh -F 'other config' -o ConnectTimeout=99 {_OPTIONS.format(10, 2)} -- h1",
        ),
    ],
)
def test_ssh_is_called_so(spec: HostSpec, options: dict[str, Any], expected: str) -> None:
    assert shlex.join(command(spec, **options)[:-1]) == expected


def test_the_interpreter_of_a_host_goes_before_that_of_all_and_this_one() -> None:
    spec = HostSpec("h1", python="/opt/py/bin/python")
    others = [sys.executable, f"python3.{sys.version_info.minor}", "python3"]
    assert command(spec, python="python3.11")[-1] == shell_command(["/opt/py/bin/python"])
    assert command(HostSpec("h2"), python="python3.11")[-1] == shell_command(["python3.11"])
    assert command(HostSpec("h2"))[-1] == shell_command(others)


def test_what_a_host_runs_is_one_line_that_no_shell_changes() -> None:
    assert not set("'\n\\$`!") & set(LOADER)


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hosts"),
        ({"hosts": "-oProxyCommand=touch /tmp/owned"}, "-oProxyCommand"),
        ({"hosts": "h1", "strategy": "scatter"}, "scatter"),
        ({"hosts": "h1", "tunnel": "maybe"}, "maybe"),
        ({"hosts": "h1", "silence_s": 0.5}, "silence_s is at least 1 s, not 0.5"),
        ({"hosts": "h1", "silence_s": float("nan")}, "silence_s is at least 1 s, not nan"),
        ({"hosts": "h1:gpus=2,h1"}, "gpus"),
        ({"hosts": "h1", "cache": "-rf"}, "cache is .* not '-rf'"),
        ({"hosts": "h1", "cache": "\ud800"}, "cache is .* not '.ud800'"),
        ({"hosts": "h1", "python": "-c"}, "python is .* not '-c'"),
        ({"hosts": "h1", "ssh": ()}, "ssh is .* not ''"),
        ({"hosts": "h1", "requirements": "no.txt"}, "cannot read the requirements: .*no.txt"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ProgramError), match=message):
        lp.plan(make_program(), "ssh", **options)


# Plans


@pytest.mark.parametrize(
    ("hosts", "options", "expected"),
    [
        ("h1,h2,h3", {}, "h1 h2 h3"),
        ("h1:cpu=8,h2:cpu=8,h3:cpu=8", {"strategy": "pack"}, "h1 h1 h1"),
        ("h1,h2,h3", {"placement": {"learner": "h2", "actor": ["h1", "h3"]}}, "h1 h3 h2"),
        ("h1:gpu=2,h2:gpu=0,h3:gpu=0", {"resources": {"learner": {"gpu": 1}}}, "h2 h3 h1"),
    ],
)
def test_nodes_are_placed_on_hosts(hosts: Any, options: dict[str, Any], expected: str) -> None:
    where = lp.plan(make_program(), "ssh", hosts=hosts, **options).hosts
    assert list(where) == ["actor[0]", "actor[1]", "learner[0]"]
    assert " ".join(where.values()) == expected


def test_the_plan_shows_each_node_with_its_host() -> None:
    shown = str(lp.plan(make_program(), "ssh", hosts=["h1", "ann@h2"], placement={"actor": "h2"}))
    assert "(ssh: 2 hosts over SSH)" in shown
    assert "actor[1]  CourierNode(Node)  on h2" in shown
    assert "learner[0]  CourierNode(Node)  on h1" in shown


def test_impossible_placements_are_explained_together() -> None:
    resources = {"learner": {"gpu": 4}, "actor[1]": {"gpu": 2}}
    with pytest.raises(ProgramError) as raised:
        lp.plan(make_program(), "ssh", hosts="h1:gpu=1,h2:gpu=0", resources=resources)
    assert "learner[0] wants gpu=4; h1 has gpu=1" in str(raised.value)
    assert "actor[1] wants gpu=2; h1 has gpu=1" in str(raised.value)


def test_a_launcher_serves_several_programs() -> None:
    launcher = SshLauncher("h1,h2")
    first = lp.plan(make_program(), launcher).hosts
    lp.plan(make_program(actors=4), launcher)
    assert lp.plan(make_program(), launcher).hosts == first


# Launches; each host is this machine


class Greeter:
    def greet(self, caller: str) -> str:
        return f"{os.environ['HOST']} greets {caller}"


def ask(greeter: Any, output: Path) -> None:
    output.write_text(greeter.greet(os.environ["HOST"]))


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs what hosts are to run here, and tells it which host it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = tmp_path / "ssh"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nHOST=$2 exec sh -c "$3"\n')
    path.chmod(0o755)
    return [str(path)]


def test_nodes_run_on_their_hosts_and_call_one_another(
    launch_program: Any, ssh: list[str], tmp_path: Path
) -> None:
    program = lp.Program("greeting")
    greeter = program.add_node(lp.CourierNode(Greeter), label="greeter")
    program.add_node(lp.PyNode(ask, greeter, tmp_path / "answer"), label="asking")
    running = launch_program(
        program, "ssh", hosts="h1,h2", placement={"greeter": "h1", "asking": "h2"}, ssh=ssh
    )
    assert running.wait().outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "answer").read_text() == "h1 greets h2"


def test_what_is_wrong_with_hosts_is_told_of_all_together(
    launch_program: Any, ssh: list[str]
) -> None:
    with pytest.raises(LaunchError) as raised:
        launch_program(make_program(), "ssh", hosts="h[1-2]:python=/no/python", ssh=ssh)
    for host in ("h1", "h2"):
        assert f"{host}: no Python was found: there is no /no/python" in str(raised.value)
