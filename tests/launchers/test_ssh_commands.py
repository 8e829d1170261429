import dataclasses
import shlex
import sys
from typing import Any

import pytest

import launchpad_lite as lp
from launchers._hosts import HostSpec
from launchers.host.arrival import LOADER, shell_command
from launchers.ssh import SshLauncher
from launchpad_lite.errors import LaunchError, ProgramError


class Node:
    def run(self) -> None: ...


def make_program(**groups: int) -> lp.Program:
    program = lp.Program("placed")
    for group, count in (groups or {"actor": 2, "learner": 1}).items():
        with program.group(group):
            for _ in range(count):
                program.add_node(lp.CourierNode(Node))
    return program


def command(spec: HostSpec, **options: Any) -> list[str]:
    return SshLauncher([spec], **options).command(spec)


def how(spec: HostSpec, **options: Any) -> str:
    """The command without what runs on the host."""
    return shlex.join(command(spec, **options)[:-1])


_OPTIONS = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=2 -o ServerAliveCountMax=4"
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (HostSpec("h1"), f"{_OPTIONS} -- h1"),
        (HostSpec("h1", user="ann"), f"{_OPTIONS} -- ann@h1"),
        (HostSpec("h1", user="ann@realm", port=2222), f"{_OPTIONS} -p 2222 -- ann@realm@h1"),
        (HostSpec("fd00::1", user="ann"), f"{_OPTIONS} -- ann@fd00::1"),
        # Where others reach it has nothing to do with how ssh does.
        (HostSpec("h1", address="10.0.0.1", gpu=2), f"{_OPTIONS} -- h1"),
    ],
)
def test_ssh_is_called_so(spec: HostSpec, expected: str) -> None:
    assert how(spec) == expected


def test_time_limits_become_those_of_ssh() -> None:
    assert how(HostSpec("h1"), silence_s=60, connect_s=90) == (
        "ssh -T -o BatchMode=yes -o ConnectTimeout=45 -o ServerAliveInterval=15 "
        "-o ServerAliveCountMax=4 -- h1"
    )


def test_the_shortest_time_limits_are_a_second_each() -> None:
    assert "ConnectTimeout=1 -o ServerAliveInterval=1 " in how(
        HostSpec("h1"), silence_s=1, connect_s=1
    )


def test_options_of_the_user_come_first_so_that_ssh_heeds_them() -> None:
    ssh = ("ssh", "-F", "other config", "-o", "ConnectTimeout=99")
    assert how(HostSpec("h1"), ssh=ssh).startswith(
        "ssh -F 'other config' -o ConnectTimeout=99 -T -o BatchMode=yes -o ConnectTimeout=10 "
    )


def test_no_host_is_taken_for_an_option_of_ssh() -> None:
    with pytest.raises(ValueError, match="-oProxyCommand"):
        SshLauncher("-oProxyCommand=touch /tmp/owned")


def test_this_interpreter_is_looked_for_first_then_others_of_its_version() -> None:
    minor = sys.version_info.minor
    expected = shell_command([sys.executable, f"python3.{minor}", "python3"])
    assert command(HostSpec("h1"))[-1] == expected


def test_the_interpreter_of_a_host_goes_before_that_of_all() -> None:
    spec = HostSpec("h1", python="/opt/py/bin/python")
    assert command(spec, python="python3.11")[-1] == shell_command(["/opt/py/bin/python"])
    assert command(HostSpec("h2"), python="python3.11")[-1] == shell_command(["python3.11"])


def test_what_a_host_runs_is_written_out_like_this() -> None:
    script = (
        'for p; do case $p in "~/"*) p=$HOME/${p#"~/"};; esac; '
        'command -v "$p" >/dev/null 2>&1 && exec "$p" -c "$0"; done; '
        'echo "there is no $*" >&2; exit 127'
    )
    assert shell_command(["/a/python", "b c"]) == (
        f"exec sh -c '{script}' '{LOADER}' /a/python 'b c'"
    )


def test_what_a_host_runs_is_one_line_that_no_shell_changes() -> None:
    assert not set("'\n\\$`!") & set(LOADER)


def test_the_command_is_the_same_for_every_program_so_that_it_tells_nothing_of_it() -> None:
    launcher = SshLauncher("h1")
    assert launcher.command(HostSpec("h1")) == SshLauncher("h1").command(HostSpec("h1"))


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "h1", "strategy": "scatter"}, "scatter"),
        ({"hosts": "h1", "tunnel": "maybe"}, "maybe"),
        ({"hosts": "h1", "silence_s": 0.5}, "silence_s is at least 1 s, not 0.5"),
        ({"hosts": "h1", "silence_s": float("nan")}, "silence_s is at least 1 s, not nan"),
        ({"hosts": "h1:gpus=2,h1"}, "gpus"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lp.plan(make_program(), "ssh", **options)


def test_without_hosts_it_is_said_how_to_name_them() -> None:
    with pytest.raises((ValueError, LaunchError, ProgramError), match="hosts"):
        lp.plan(make_program(), "ssh")


def test_requirements_that_cannot_be_read_are_told() -> None:
    with pytest.raises(LaunchError, match=r"cannot read the requirements: .*none\.txt"):
        lp.launch(make_program(), "ssh", hosts="h1", requirements="none.txt")


# Plans; nobody is connected to


def placed(hosts: Any, program: lp.Program | None = None, **options: Any) -> dict[str, str]:
    plan = lp.plan(program or make_program(), "ssh", hosts=hosts, **options)
    return dict(plan.hosts)


def test_nodes_are_spread_over_the_hosts() -> None:
    assert placed("h1,h2,h3") == {"actor[0]": "h1", "actor[1]": "h2", "learner[0]": "h3"}


def test_nodes_are_packed_onto_few_hosts() -> None:
    assert set(placed("h1:cpu=8,h2:cpu=8,h3:cpu=8", strategy="pack").values()) == {"h1"}


def test_nodes_are_placed_by_name() -> None:
    assert placed("h1,h2,h3", placement={"learner": "h2", "actor": ["h1", "h3"]}) == {
        "learner[0]": "h2",
        "actor[0]": "h1",
        "actor[1]": "h3",
    }


def test_nodes_are_placed_by_what_they_need() -> None:
    where = placed("h1:gpu=0,h2:gpu=2", resources={"learner": {"gpu": 1}})
    assert where["learner[0]"] == "h2"


def test_the_plan_shows_each_node_with_its_host() -> None:
    shown = str(lp.plan(make_program(), "ssh", hosts=["h1", "ann@h2"], placement={"actor": "h2"}))
    assert "(ssh: 2 hosts over SSH)" in shown
    assert "actor[1]  CourierNode(Node)  on h2" in shown
    assert "learner[0]  CourierNode(Node)  on h1" in shown


def test_impossible_placements_are_explained_together() -> None:
    with pytest.raises((ProgramError, LaunchError)) as raised:
        lp.plan(
            make_program(),
            "ssh",
            hosts="h1:gpu=1,h2:gpu=0",
            resources={"learner": {"gpu": 4}, "actor[1]": {"gpu": 2}},
        )
    text = str(raised.value)
    assert "learner[0]" in text
    assert "actor[1]" in text
    assert "h1" in text


def test_a_placement_on_a_host_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises((ProgramError, LaunchError), match="no host 'h9'; the hosts are: h1, h2"):
        placed("h1,h2", placement={"actor": "h9"})


def test_a_launcher_serves_several_programs() -> None:
    (launcher, other) = SshLauncher("h1,h2"), make_program(actor=4)
    first = launcher.placement(lp.plan(make_program(), "ssh", hosts="h1,h2").executables)
    launcher.placement(lp.plan(other, "ssh", hosts="h1,h2").executables)
    assert launcher.placement(lp.plan(make_program(), "ssh", hosts="h1,h2").executables) == first


def test_hosts_are_read_as_they_are_everywhere() -> None:
    spec = HostSpec("h3", user="ann", gpu=2)
    mappings = [{"name": "h3", "user": "ann", "gpu": 2}]
    assert command(dataclasses.replace(spec)) == command(spec)
    assert placed(mappings) == placed([spec]) == placed("ann@h3:gpu=2")
