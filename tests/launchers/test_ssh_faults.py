"""What a program on several hosts does when one of them, its link or a process fails.

Hosts are real ones of the bed. Of each fault are measured: the seconds until the launcher has ended
and until nothing of the program is left on any host; `pytest -s` shows them.
"""

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.beds.ssh_hosts import LAUNCHER, SshHosts
from tests.engines import needs_ssh_hosts

pytestmark = [needs_ssh_hosts, pytest.mark.slow]

#: The aim is 10 s; the rest is for a machine that is busy.
WITHIN_S = 25.0
#: What goes between may not get a turn for a while on a machine that is busy. And not 5: by then ssh,
#: which asks every full second, has given up itself.
SILENCE_S = 6.0

PROGRAM = """
import json, os, pathlib, socket, subprocess, sys, threading, time
import courier
import launchpad_lite as lp

OPTIONS = json.loads(sys.argv.pop())
SHARED = pathlib.Path(OPTIONS.pop("shared"))
CALLERS = OPTIONS.pop("callers", 3)
DEAF = OPTIONS.pop("deaf", False)
# Callers that are to be patient go on when a call fails, as learners do that can lose an actor.
GONE = (courier.ServerLostError, courier.ServerUnreachableError) if OPTIONS.pop("patient", 0) else ()


def start_family():
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["setsid", "sleep", "1000"])
    subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "trap : TERM; sleep 1000 & sleep 1000"])


def tell(name, value):
    aside = SHARED / f"{name}.{os.getpid()}.{threading.get_ident()}"
    aside.write_text(json.dumps(value))
    os.replace(aside, SHARED / name)


class Store:
    def __init__(self):
        start_family()
        self.total = 0

    def add(self):
        self.total += 1
        return socket.gethostname()


class Caller:
    def __init__(self, store, index):
        self.store, self.index = store, index

    def run(self):
        start_family()
        calls = lost = 0
        if DEAF:
            tell(f"caller{self.index}", [socket.gethostname(), self.store.add(), 1, time.time()])
            lp.wait_for_stop()
            tell("asked", True)
            threading.Event().wait()
        while not lp.wait_for_stop(0.02):
            if (SHARED / "finish").exists():
                break
            if (SHARED / "talk").exists():
                print("a line of output " * 4, flush=True)
            try:
                there = self.store.add()
            except GONE:
                lost += 1
                continue
            calls += 1
            tell(f"caller{self.index}", [socket.gethostname(), there, calls, time.time()])
        print(f"{calls} calls, {lost} lost", flush=True)


if __name__ == "__main__":
    program = lp.Program("faults")
    with program.group("store"):
        store = program.add_node(lp.CourierNode(Store))
    with program.group("caller"):
        for index in range(CALLERS):
            program.add_node(lp.CourierNode(Caller, store, index))
    running = lp.launch(program, "ssh", **OPTIONS)

    def watch():
        while running.result is None:
            tell("status", {n.name: [n.state, n.host, n.restarts] for n in running.status()})
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    result = running.wait()
    print(f"it ended: {result.reason}")
"""
#: One node on each host, and two on h1.
ONE_EACH = {"store": "h1", "caller[0]": "h1", "caller[1]": "h2", "caller[2]": "h3"}


class Run:
    """A program that was launched from h0, and a clock that runs from the last fault on."""

    def __init__(self, hosts: SshHosts, folder: Path, options: dict[str, Any]) -> None:
        self.hosts = hosts
        self._output = folder / "output"
        script = folder / "faults.py"
        script.write_text(PROGRAM)
        self.callers = options.get("callers", 3)
        chosen = {
            "hosts": ["h1", "h2", "h3"],
            "placement": ONE_EACH,
            "silence_s": SILENCE_S,
            "shared": str(hosts.shared),
            "log_dir": str(folder / "logs"),
            **options,
        }
        with self._output.open("wb") as output:
            self.process = hosts.run(
                [sys.executable, str(script), json.dumps(chosen)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                start_new_session=True,
            )
        self.struck_at = time.monotonic()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def strike(self) -> None:
        """Starts the clock."""
        self.struck_at = time.monotonic()

    def told(self, name: str) -> Any:
        """What the program told last under a name; None: nothing yet."""
        try:
            return json.loads((self.hosts.shared / name).read_text())
        except FileNotFoundError:
            return None

    def calls(self) -> list[int]:
        """How many calls each caller has made."""
        told = [self.told(f"caller{index}") for index in range(self.callers)]
        return [each[2] if each else 0 for each in told]

    def await_calls(self, timeout_s: float = 30.0) -> None:
        """Waits until each caller has got answers, from now on."""
        now = time.time()

        def all_do() -> bool:
            assert self.process.poll() is None, self.output
            told = [self.told(f"caller{index}") for index in range(self.callers)]
            # Nodes may be at work before the launch has returned.
            return all(each and each[3] > now for each in told) and self.told("status") is not None

        try:
            poll_until(all_do, timeout_s)
        except TimeoutError:
            raise AssertionError(f"no calls, {self.told('status')}:\n{self.output}") from None

    def await_moved(self, node: str, host: str, restarts: int = 1) -> None:
        """Waits until a node is at work on a host after so many restarts."""

        def there() -> bool:
            assert self.process.poll() is None, self.output
            state, *where = self.told("status")[node]
            return state in ("running", "serving") and where == [host, restarts]

        try:
            poll_until(there, WITHIN_S)
        except TimeoutError:
            raise AssertionError(f"{self.told('status')}:\n{self.output}") from None
        self.note(f"{node} is at work on {host}")

    def hosts_used(self) -> set[str]:
        """The hosts of all nodes, as they were told last; that may be a while ago."""
        return {host for _, host, _ in self.told("status").values()}

    def said(self, pattern: str) -> bool:
        """Whether the user has seen that."""
        return re.search(pattern, self.output) is not None

    def note(self, what: str) -> None:
        """Shows how long something took, from the fault on."""
        print(f"\n{what} after {time.monotonic() - self.struck_at:.1f} s", end="")

    def finish(self) -> None:
        """Has the program end by itself."""
        self.strike()
        (self.hosts.shared / "finish").touch()

    def end(self, within_s: float = WITHIN_S) -> int:
        """Waits for the launcher's end and that of all else; returns the exit code."""
        try:
            code: int = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the launcher goes on after {within_s} s:\n{self.output}"
            ) from None
        ended_s = time.monotonic() - self.struck_at
        self.await_clean(within_s)
        print(f"\nlauncher ended after {ended_s:.1f} s with {code}", end="; ")
        print(f"nothing left after {time.monotonic() - self.struck_at:.1f} s")
        print(self.output)
        return code

    def await_clean(self, within_s: float = WITHIN_S, only: str | None = None) -> None:
        """Waits until nothing of the program is left, on any host or on one."""

        def left() -> list[str]:
            mine = "" if only is None else f"{only}: "
            return [each for each in self.hosts.leftovers() if each.startswith(mine)]

        left_s = max(0.0, within_s - (time.monotonic() - self.struck_at))
        poll_until(lambda: not left(), left_s, must=False)
        assert not left(), "\n".join([*left(), self.output])

    # Its processes

    def launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def victim(self, what: str, host: str) -> psutil.Process:
        """One process by its part: ssh, sshd, warden, agent or worker."""
        if what == "worker":
            return random.choice(self.workers(host))
        found: psutil.Process = getattr(self, what)(host)
        return found

    def sshd(self, host: str) -> psutil.Process:
        """The process on the host that serves the link."""
        session = self.warden(host).parent()
        assert session is not None
        return session

    def ssh(self, host: str) -> psutil.Process:
        """The ssh client that holds the link to a host."""
        (found,) = (
            each
            for each in self.hosts.processes(LAUNCHER)
            if each.name() == "ssh" and host in each.cmdline()
        )
        return found

    def warden(self, host: str) -> psutil.Process:
        ours = {each.pid for each in self.hosts.processes(host)}
        (found,) = (
            each
            for each in self.hosts.processes(host)
            if each.name().startswith("python") and each.ppid() not in ours
        )
        return found

    def agent(self, host: str) -> psutil.Process:
        (found,) = (each for each in self.warden(host).children() if _is_python(each))
        return found

    def interpreters(self, host: str) -> int:
        """How many there are: the arrival, then warden and agent, then workers."""
        return sum(map(_is_python, self.hosts.processes(host)))

    def workers(self, host: str) -> list[psutil.Process]:
        return [each for each in self.agent(host).children() if _is_python(each)]


def _is_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith("python")
    return False


Launch = Callable[..., Run]


@pytest.fixture
def launch(hosts: SshHosts, tmp_path: Path) -> Iterator[Launch]:
    """Launches the program and waits until all its nodes are at work."""
    runs = []

    def start(*, wait: bool = True, **options: Any) -> Run:
        run = Run(hosts, tmp_path, options)
        runs.append(run)
        if wait:
            run.await_calls()
        run.strike()
        return run

    yield start
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            run.process.kill()
        run.process.wait()


# A host goes


def test_crash_of_a_host_ends_the_program_and_is_named_once(
    launch: Launch, hosts: SshHosts
) -> None:
    run = launch()
    run.strike()
    hosts.crash("h1")  # where the store is: calls of the others fail as well
    assert run.end() == 1
    assert run.said(r"NodeFailedError: 2 nodes on h1 failed: h1 is lost: the link to it broke")
    assert run.output.count("NodeFailedError: ") == 1
    assert "ServerLostError" not in run.output


def test_nodes_of_a_host_that_crashed_move_and_clients_follow(
    launch: Launch, hosts: SshHosts
) -> None:
    placement = {**ONE_EACH, "store": ["h1", "h3"], "caller[0]": ["h1", "h2"]}
    run = launch(restart="on_failure", patient=True, placement=placement)
    run.strike()
    hosts.crash("h1")
    run.await_moved("store[0]", "h3")
    run.await_moved("caller[0]", "h2")
    run.await_calls()
    run.note("calls go on")
    assert all(run.told(f"caller{index}")[1] == "h3" for index in range(3))
    assert run.told("status")["caller[1]"] == ["running", "h2", 0]
    run.finish()
    assert run.end() == 0
    assert run.said(r"store\[0\] moves from h1 to h3")


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        pytest.param(
            {"restart": {"caller": {"when": "on_failure", "moves": False}}},
            r"caller\[1\] on h2 failed: h2 is lost: the link to it broke",
            id="policy",
        ),
        pytest.param(
            {"restart": "on_failure"},
            r"caller\[1\] on h2 failed: h2 is lost: .*; it cannot move: it may run on h2 only",
            id="placement",
        ),
        pytest.param(
            {
                "restart": "on_failure",
                "placement": {},
                "hosts": ["h1:cpu=1", "h2:cpu=1", "h3:cpu=1"],
                "resources": {"store": {"cpu": 1}, "caller": {"cpu": 1}},
                "callers": 2,
            },
            r"caller\[0\] on h2 failed: h2 is lost: .*; it cannot move: caller\[0\] wants cpu=1",
            id="room",
        ),
    ],
)
def test_a_node_that_may_not_move_ends_the_program_with_its_host(
    launch: Launch, hosts: SshHosts, options: dict[str, Any], explanation: str
) -> None:
    run = launch(patient=True, **options)
    run.strike()
    hosts.crash("h2")
    assert run.end() == 1
    assert run.said(explanation)


@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_calls_through_tunnels_follow_as_well(launch: Launch, hosts: SshHosts, fault: str) -> None:
    placement = {**ONE_EACH, "store": ["h1", "h3"], "caller[0]": ["h1", "h2"]}
    run = launch(restart="on_failure", patient=True, placement=placement, tunnel="always")
    run.strike()
    getattr(hosts, fault)("h1")
    run.await_moved("store[0]", "h3")
    run.await_calls()
    run.note("calls go on")
    run.finish()
    assert run.end() == 0


def test_two_hosts_may_crash_at_once(launch: Launch, hosts: SshHosts) -> None:
    run = launch(restart="on_failure", patient=True, placement={"store": "h3"})
    run.strike()
    hosts.crash("h1")
    hosts.crash("h2")
    run.await_calls()
    run.note("calls go on")
    poll_until(lambda: run.hosts_used() == {"h3"})
    run.finish()
    assert run.end() == 0


def test_the_host_that_a_node_moves_to_may_crash_too(launch: Launch, hosts: SshHosts) -> None:
    run = launch(
        restart="on_failure",
        patient=True,
        placement={"store": "h1", "caller[0]": "h1", "caller[2]": "h1", "caller[1]": hosts.names},
    )
    _, first, _ = run.told("status")["caller[1]"]
    run.strike()
    hosts.crash(first)
    poll_until(lambda: run.told("status")["caller[1]"][1] != first)
    _, second, _ = run.told("status")["caller[1]"]
    hosts.crash(second)
    run.await_moved("caller[1]", "h1", restarts=2)
    run.await_calls()
    run.finish()
    assert run.end() == 0


def test_a_node_does_not_move_to_a_host_that_is_silent(launch: Launch, hosts: SshHosts) -> None:
    run = launch(
        restart="on_failure",
        patient=True,
        placement={"store": "h1", "caller[0]": "h1", "caller[2]": "h1", "caller[1]": hosts.names},
    )
    _, first, _ = run.told("status")["caller[1]"]
    (second,) = {"h2", "h3"} - {first}
    run.strike()
    hosts.cut(second)
    hosts.crash(first)  # at once, so that it is not known yet that the other is lost
    run.await_moved("caller[1]", "h1")
    run.await_calls()
    run.finish()
    assert run.end() == 0


def test_a_host_may_crash_while_all_stop(launch: Launch, hosts: SshHosts) -> None:
    run = launch()
    run.strike()
    run.process.terminate()
    poll_until(lambda: "calls, 0 lost" in run.output)  # the crash must not be known first
    hosts.crash("h2")
    assert run.end() == 128 + signal.SIGTERM
    assert "lost" not in run.output.replace("0 lost", "")


# A link is cut


def test_a_short_cut_loses_no_call(launch: Launch, hosts: SshHosts) -> None:
    run = launch(silence_s=20)
    run.strike()
    hosts.cut("h1")
    time.sleep(2)  # the fault itself
    hosts.heal("h1")
    run.await_calls()
    run.note("calls go on")
    before = sum(run.calls())
    run.finish()
    assert run.end() == 0
    assert sum(map(int, re.findall(r"(\d+) calls, 0 lost", run.output))) >= before


def test_a_long_cut_ends_the_program_and_the_host_cleans_up_by_itself(
    launch: Launch, hosts: SshHosts
) -> None:
    # Calls to a host that is cut take all of the notice. And ssh, which would give up later, would
    # be the first where we come late.
    run = launch(notice_s=4, ssh=["ssh", "-o", "ServerAliveInterval=60"])
    run.strike()
    hosts.cut("h1")
    assert run.end() == 1
    assert run.said(rf"on h1 failed: h1 is lost: nothing was heard of it for {SILENCE_S:g} s")
    hosts.heal("h1")
    run.await_clean()


def test_nodes_move_from_a_host_that_is_cut_and_nothing_comes_back(
    launch: Launch, hosts: SshHosts
) -> None:
    placement = {**ONE_EACH, "store": ["h1", "h2"], "caller[0]": ["h1", "h3"]}
    run = launch(restart="on_failure", patient=True, placement=placement)
    run.strike()
    hosts.cut("h1")
    run.await_moved("store[0]", "h2")
    run.await_calls()
    run.note("calls go on")
    run.await_clean(only="h1")
    run.note("nothing left on h1, which is still cut")
    hosts.heal("h1")
    run.await_calls()
    poll_until(lambda: "h1" not in run.hosts_used())
    run.finish()
    assert run.end() == 0


# A process is killed


def test_kill_of_the_launcher_ends_all(launch: Launch) -> None:
    run = launch()
    run.strike()
    run.process.kill()
    assert run.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("victim", "explanation"),
    [
        ("ssh", r"caller\[1\] on h2 failed: h2 is lost: ssh was killed here by SIGKILL"),
        ("agent", r"caller\[1\] on h2 failed: the agent of h2 died"),
        ("warden", r"caller\[1\] on h2 failed: h2 is lost: its end of the link was closed"),
        ("sshd", r"caller\[1\] on h2 failed: h2 is lost: the link to it broke"),
        ("worker", r"caller\[1\] on h2 failed: its process was killed by SIGKILL"),
    ],
)
def test_kill_of_a_process_ends_the_program(launch: Launch, victim: str, explanation: str) -> None:
    run = launch()
    process = run.victim(victim, "h2")
    run.strike()
    process.kill()
    assert run.end() == 1
    assert run.said(explanation)


def test_a_worker_that_was_killed_starts_again_where_it_was(launch: Launch) -> None:
    run = launch(restart="on_failure", patient=True)
    run.strike()
    for worker in run.workers("h1"):
        worker.kill()
    run.await_moved("store[0]", "h1")
    run.await_calls()
    run.note("calls go on")
    run.finish()
    assert run.end() == 0


@pytest.mark.parametrize("victim", ["ssh", "agent", "warden", "sshd"])
def test_nodes_move_when_a_process_between_is_killed(launch: Launch, victim: str) -> None:
    placement = {**ONE_EACH, "caller[1]": ["h2", "h3"]}
    run = launch(restart="on_failure", patient=True, placement=placement)
    process = run.victim(victim, "h2")
    run.strike()
    process.kill()
    run.await_moved("caller[1]", "h3")
    run.await_calls()
    run.note("calls go on")
    run.await_clean(only="h2")
    run.note("nothing left on h2")
    run.finish()
    assert run.end() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_all_hosts(launch: Launch, signum: signal.Signals) -> None:
    run = launch()
    run.strike()
    run.process.send_signal(signum)
    code = run.end()
    assert code == 128 + signum or code == -signum
    assert len(re.findall(r"\d+ calls, 0 lost", run.output)) == 3


def test_ctrl_c_twice_does_not_wait_for_nodes(launch: Launch) -> None:
    run = launch(deaf=True, notice_s=60)
    run.strike()
    run.process.send_signal(signal.SIGINT)
    poll_until((run.hosts.shared / "asked").exists)
    run.process.send_signal(signal.SIGINT)
    assert run.end() in (128 + signal.SIGINT, -signal.SIGINT)


# Else


def test_a_host_that_is_down_is_told_at_once(launch: Launch, hosts: SshHosts) -> None:
    hosts.crash("h2")
    run = launch(wait=False)
    assert run.end() == 1
    assert run.said(r"LaunchError: h2: ssh ended with exit code 255: .*Connection refused")


def test_a_host_that_does_not_answer_is_told_in_time(launch: Launch, hosts: SshHosts) -> None:
    hosts.cut("h2")
    run = launch(wait=False, connect_s=10)
    assert run.end() == 1
    assert run.said(r"LaunchError: h2: ")


def test_a_full_disk_ends_no_program(launch: Launch, hosts: SshHosts) -> None:
    run = launch()
    run.strike()
    hosts.fill_disk("h2")
    (hosts.shared / "talk").touch()
    run.await_calls()
    poll_until(lambda: "[caller[1]] a line of output" in run.output)
    run.finish()
    assert run.end() == 0


def test_a_launcher_that_is_stopped_for_a_while_does_no_harm(launch: Launch) -> None:
    run = launch(silence_s=20)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # the fault itself
    run.process.send_signal(signal.SIGCONT)
    run.await_calls()
    run.finish()
    assert run.end() == 0


def test_hosts_do_not_wait_for_a_launcher_that_is_stopped(launch: Launch, hosts: SshHosts) -> None:
    run = launch()
    run.strike()
    run.process.send_signal(signal.SIGSTOP)
    for name in hosts.names:
        run.await_clean(only=name)
    run.note("nothing left on the hosts, the launcher is still stopped")
    run.strike()
    run.process.send_signal(signal.SIGCONT)
    assert run.end() == 1
    assert run.said(
        rf"failed: h\d is lost: it heard nothing from here for {SILENCE_S:g} s "
        r"\(this process was stopped for"
    )


# During the start


@pytest.mark.parametrize(
    "fault",
    # A cut is noticed late, so these take their time.
    ["crash", "kill", "cut"],
)
@pytest.mark.parametrize(
    ("interpreters", "later_s"),
    [
        pytest.param(0, 0.05, id="connecting"),
        pytest.param(1, 0.0, id="telling facts"),
        pytest.param(1, 0.15, id="shipping"),
        pytest.param(2, 0.0, id="agent is up"),
        pytest.param(2, 0.1, id="probing"),
        pytest.param(2, 0.2, id="reserving"),
        pytest.param(3, 0.0, id="workers start"),
    ],
)
def test_a_fault_during_the_start_leaves_nothing(
    launch: Launch, hosts: SshHosts, fault: str, interpreters: int, later_s: float
) -> None:
    connect_s = 20
    run = launch(wait=False, connect_s=connect_s)
    poll_until(lambda: hosts.daemons("h2")[1:] or hosts.processes("h2"), 30)
    poll_until(lambda: run.interpreters("h2") >= interpreters, 30)
    time.sleep(later_s)  # about then; what is told below says what it met
    run.strike()
    if fault == "kill":
        run.process.kill()
    else:
        getattr(hosts, fault)("h2")
    assert run.end(connect_s + WITHIN_S) == (-signal.SIGKILL if fault == "kill" else 1)
    assert fault == "kill" or run.said(r"(LaunchError: h2|NodeFailedError: caller\[1\] on h2)")


def test_hosts_that_are_up_wait_for_one_that_is_slow(launch: Launch, hosts: SshHosts) -> None:
    run = launch(wait=False, silence_s=4)
    poll_until(lambda: hosts.files("h3"), 30)  # its code has come
    # If it is the agent's warden by now, there are two.
    slow = min(filter(_is_python, hosts.processes("h3")), key=psutil.Process.create_time)
    slow.suspend()
    poll_until(lambda: min(map(run.interpreters, ("h1", "h2"))) >= 2, 30)
    time.sleep(6)  # longer than they would wait for a launcher that is gone
    slow.resume()
    run.await_calls()
    run.finish()
    assert run.end() == 0


# Chaos


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_random_faults_leave_nothing(launch: Launch, hosts: SshHosts, seed: int) -> None:
    chance = random.Random(seed)
    policy = {"when": "on_failure", "max_restarts": 1000, "max_backoff_s": 1}
    run = launch(restart={"store": policy, "caller": policy}, patient=True, placement={}, callers=6)
    give_up_at = time.monotonic() + 60
    whole = list(hosts.names)
    while time.monotonic() < give_up_at:
        victim = chance.choice(whole)
        faults = ["worker"] * 30
        if len(whole) > 1:  # the last one must not be lost
            faults += ["ssh", "agent", "warden", "sshd", "crash", "cut"]
        fault = chance.choice(faults)
        print(f"{fault} {victim}")
        if fault in ("crash", "cut"):
            getattr(hosts, fault)(victim)
        else:
            with contextlib.suppress(psutil.Error, ValueError):
                run.victim(fault, victim).kill()
        if fault != "worker":
            whole.remove(victim)
        run.await_calls(40)
    run.finish()
    assert run.end() == 0
