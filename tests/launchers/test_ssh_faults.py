"""What a program on several hosts does when one of them, its link or a process fails.

Hosts are real ones of the bed. What any engine must do then is in `host_contract`; faults at random
are in `test_host_chaos`. Of each fault the seconds are measured until the launcher has ended, or
until calls go on; `pytest -s` shows them.
"""

import re
import signal
import time
from typing import Any

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import PLACEMENT, SshDesk, is_python

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

#: Lost nodes move, and callers are patient.
_MOVING: dict[str, Any] = {"restart": "on_failure", "how": {"patient": True}}
#: All but one caller stay on h1.
_ONE_MOVES = {"store": "h1", "caller[0]": "h1", "caller[1]": ["h2", "h3", "h1"]}


# A host goes


@pytest.mark.parametrize(
    ("fault", "tunnel"), [("crash", "never"), ("cut", "never"), ("cut", "always")]
)
def test_nodes_of_a_lost_host_move_clients_follow_and_nothing_comes_back(
    ssh: SshDesk, fault: str, tunnel: str
) -> None:
    placement = {**PLACEMENT, "store": ["h2", "h3"]}
    run = ssh.begin(placement=placement, tunnel=tunnel, **_MOVING)
    assert run.host("store[0]") == "h2"
    run.strike()
    getattr(ssh.hosts, fault)("h2")
    run.await_restart("store[0]", "h3")
    run.await_calls()
    assert all(run.told(f"caller{index}")["there"] == "h3" for index in range(2))
    assert run.status()["caller[0]"][:3] == ["running", "h1", 0]
    assert run.said(r"store\[0\] moves from h2 to h3")
    if fault == "cut":
        ssh.await_clean("h2")
        run.note("nothing left on h2, which is still cut")
        ssh.hosts.heal("h2")
        run.await_calls()
        assert "h2" not in {host for _, host, *_ in run.status().values()}
    run.finish()


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        pytest.param(
            {"restart": {"caller": {"when": "on_failure", "moves": False}}},
            r"caller\[1\] on h3 failed: h3 is lost: the link to it broke",
            id="policy",
        ),
        pytest.param(
            {"restart": "on_failure"},
            r"caller\[1\] on h3 failed: h3 is lost: .*; it cannot move: it may run on h3 only",
            id="placement",
        ),
        pytest.param(
            {
                "restart": "on_failure",
                "placement": None,
                "hosts": ["h1:cpu=1", "h2:cpu=1", "h3:cpu=1"],
                "resources": {"store": {"cpu": 1}, "caller": {"cpu": 1}},
            },
            r"caller\[1\] on h3 failed: h3 is lost: .*; it cannot move: caller\[1\] wants cpu=1",
            id="room",
        ),
    ],
)
def test_a_node_that_may_not_move_ends_the_program_with_its_host(
    ssh: SshDesk, options: dict[str, Any], explanation: str
) -> None:
    run = ssh.begin(how={"patient": True}, **options)
    assert run.host("caller[1]") == "h3"
    run.strike()
    ssh.hosts.crash("h3")
    assert run.end() == 1
    assert run.said(explanation)


def test_the_host_that_a_node_moves_to_may_crash_too(ssh: SshDesk) -> None:
    run = ssh.begin(placement=_ONE_MOVES, **_MOVING)
    first = run.host("caller[1]")
    assert first != "h1"
    run.strike()
    ssh.hosts.crash(first)
    poll_until(lambda: run.host("caller[1]") != first, 30)
    ssh.hosts.crash(run.host("caller[1]"))
    run.await_restart("caller[1]", "h1", restarts=2)
    run.await_calls()
    run.finish()


def test_a_node_does_not_move_to_a_host_that_is_lost_at_the_same_time(ssh: SshDesk) -> None:
    run = ssh.begin(placement=_ONE_MOVES, **_MOVING)
    first = run.host("caller[1]")
    (second,) = {"h2", "h3"} - {first}
    run.strike()
    ssh.hosts.cut(second)
    ssh.hosts.crash(first)  # at once, so that it is not known yet that the other is lost
    run.await_restart("caller[1]", "h1")
    run.await_calls()
    run.finish()


def test_a_host_may_crash_while_all_stop(ssh: SshDesk) -> None:
    run = ssh.begin()
    run.send(signal.SIGTERM)
    run.until("calls, 0 lost")  # the crash must not be known first
    ssh.hosts.crash("h2")
    assert run.end() == 128 + signal.SIGTERM
    assert "lost" not in run.output.replace("0 lost", "")


def test_a_long_cut_ends_the_program_and_the_host_cleans_up_by_itself(ssh: SshDesk) -> None:
    # Calls to a host that is cut take all of the notice. And ssh, which would give up later, would
    # be the first where we come late.
    run = ssh.begin(notice_s=4, ssh=["ssh", "-o", "ServerAliveInterval=60"])
    run.strike()
    ssh.hosts.cut("h2")
    assert run.end() == 1
    silence = f"no message came from it for {ssh.silence_s:g} s"
    assert run.said(rf"store\[0\] on h2 failed: h2 is lost: {silence}")
    ssh.await_clean("h2")


# A process is killed


@pytest.mark.parametrize(
    ("victim", "explanation"),
    [
        ("ssh", "h3 is lost: ssh was killed here by SIGKILL"),
        ("agent", "the agent of h3 died"),
        ("reaper", "h3 is lost: its end of the link was closed"),
        ("sshd", "h3 is lost: the link to it broke"),
    ],
)
def test_nodes_move_when_a_process_between_is_killed_which_is_named(
    ssh: SshDesk, victim: str, explanation: str
) -> None:
    run = ssh.begin(placement={**PLACEMENT, "caller[1]": ["h3", "h2"]}, **_MOVING)
    assert run.host("caller[1]") == "h3"
    process = ssh.victim(victim, "h3")
    run.strike()
    process.kill()
    run.await_restart("caller[1]", "h2")
    run.await_calls()
    ssh.await_clean("h3")
    run.finish()
    ((node, summary),) = run.result["restarts"]
    assert node == "caller[1]"
    assert re.search(explanation, summary), summary


# Faults that do no harm


def test_a_short_cut_a_full_disk_and_a_launcher_that_stands_still_do_no_harm(ssh: SshDesk) -> None:
    run = ssh.begin(silence_s=20)
    ssh.hosts.cut("h2")
    time.sleep(2)  # the fault itself
    ssh.hosts.heal("h2")
    run.await_calls()

    run.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # the fault itself
    run.process.send_signal(signal.SIGCONT)
    run.await_calls()

    ssh.hosts.fill_disk("h1")
    run.say("talk")
    run.await_calls()
    run.until(r"\[caller\[0\]\] a line of output")
    run.finish()
    assert len(re.findall(r"\d+ calls, 0 lost", run.output)) == 2
    assert run.result["restarts"] == []


def test_hosts_do_not_wait_for_a_launcher_that_is_stopped(ssh: SshDesk) -> None:
    run = ssh.begin()
    run.send(signal.SIGSTOP)
    for name in ssh.hosts.names:
        ssh.await_clean(name)
    run.note("nothing left on the hosts, the launcher is still stopped")
    run.send(signal.SIGCONT)
    assert run.end() == 1
    assert run.said(
        rf"failed: h\d is lost: it got no message from here for {ssh.silence_s:g} s "
        r"\(this process was stopped for"
    )


# During the start


#: How many interpreters run on the host, and seconds from then on.
STAGES = {
    "connecting": (0, 0.05),
    "telling facts": (1, 0.0),
    "shipping": (1, 0.15),
    "agent is up": (2, 0.0),
    "probing": (2, 0.1),
    "reserving": (2, 0.2),
    "workers start": (3, 0.0),
}
FAULTS = ("crash", "kill", "cut")
_CONNECT_S = 15


def check_fault_during_the_start(ssh: SshDesk, stage: str, fault: str) -> None:
    """Whatever happens in whatever stage is told, and leaves nothing."""
    interpreters, later_s = STAGES[stage]
    run = ssh.launch(connect_s=_CONNECT_S)
    poll_until(lambda: ssh.hosts.daemons("h2")[1:] or ssh.hosts.processes("h2"), 30)
    poll_until(lambda: ssh.interpreters("h2") >= interpreters or run.process.poll() is not None, 30)
    assert run.process.poll() is None, run.story
    time.sleep(later_s)  # about then; what is told below says what it met
    run.strike()
    if fault == "kill":
        run.process.kill()
    else:
        getattr(ssh.hosts, fault)("h2")
    assert run.end() == (-signal.SIGKILL if fault == "kill" else 1)
    assert fault == "kill" or run.said(r"(LaunchError: h2|NodeFailedError: store\[0\] on h2)")
    ssh.assert_nothing_is_left()


# Each fault meets some stages; `test_host_chaos` has all pairs.
@pytest.mark.parametrize(
    ("stage", "fault"), [(stage, FAULTS[index % len(FAULTS)]) for index, stage in enumerate(STAGES)]
)
def test_a_fault_during_the_start_leaves_nothing(ssh: SshDesk, stage: str, fault: str) -> None:
    check_fault_during_the_start(ssh, stage, fault)


def test_hosts_that_are_up_wait_for_one_that_is_slow(ssh: SshDesk) -> None:
    run = ssh.launch(silence_s=4)
    poll_until(lambda: ssh.hosts.files("h3"), 30)  # its code has come
    # If it is the agent's reaper by now, there are two.
    slow = min(filter(is_python, ssh.hosts.processes("h3")), key=psutil.Process.create_time)
    slow.suspend()
    poll_until(lambda: min(map(ssh.interpreters, ("h1", "h2"))) >= 2, 30)
    time.sleep(6)  # longer than they would wait for a launcher that is gone
    slow.resume()
    run.await_calls()
    run.finish()
