"""The supervisor on hosts that only write down what it tells them, or of which one part is broken."""

import gc
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

import launchpad_lite as lp
from courier import Secret
from launchers.host.usage import Usage
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.launching import AddressTable, LaunchOptions, RunningProgram
from launchpad_lite.launching.launch import SIGNALS, _LaunchSignals
from launchpad_lite.life.events import (
    Constructed,
    DumpStacks,
    Ended,
    Event,
    HostLost,
    Kill,
    NodeAction,
    RequestStop,
    ServersEnded,
    ServersLost,
    Start,
    Terminate,
)
from launchpad_lite.life.timing import DEFAULT, Timing
from launchpad_lite.testing import poll_until


class Store:
    """Only serves."""


def _calls(store: Store) -> None:
    raise AssertionError(store)


class FakeHosts:
    """The store is on h1, its caller on h2. They end when they are ended by force."""

    name = "hosts"

    def __init__(self, broken: str = "") -> None:
        """`broken`: which method raises, or that `kill` is what ends a node."""
        self.told: list[str] = []
        self.program: SupervisedProgram | None = None
        self.nodes: tuple[str, ...] = ()  # that have a process
        self.looks = 0  # at the processes
        self.asked: list[str] = []
        self._broken = broken

    def post(self, event: Event) -> None:
        assert self.program is not None
        self.program.post(event)

    def _do(self, method: str, told: str = "") -> None:
        if method == self._broken:
            raise RuntimeError(f"{method} is broken")
        if told:
            self.told.append(told)

    def host_of(self, node: str) -> str:
        return {"store[0]": "h1", "caller[0]": "h2"}[node]

    def perform(self, action: NodeAction) -> None:
        match action:
            case Start(node):
                self._do("start", f"start {node}")
                self.post(Constructed(node, action.attempt, runs=node == "caller[0]"))
            case RequestStop(node):
                self._do("request_stop", f"stop {node}")
            case Terminate(node):
                self._do("terminate")
                if self._broken != "kill":
                    self.post(Ended(node, 0))
            case Kill(node):
                self._do("kill")
                self.post(Ended(node, 0))
            case DumpStacks():
                self._do("dump_stacks")
            case ServersEnded():
                self._do("servers_ended")
            case ServersLost(keys):
                self._do("servers_lost", f"lost {len(keys)}")
                if "stop caller[0]" in self.told:
                    self.post(Ended("caller[0]", 0))
            case _:
                pass

    def close(self) -> None:
        self._do("close")

    def pids(self) -> Mapping[str, int]:
        self.looks += 1
        return dict.fromkeys(self.nodes, 1)

    def usage(self) -> Mapping[str, Usage]:
        return {}

    def stacks(self) -> Mapping[str, str]:
        self._do("stacks")
        return {}

    def ask(self, question: str, *_: object) -> Mapping[str, Any]:
        self.asked.append(question)
        return {}


def _launch(
    hosts: FakeHosts,
    notice_s: float = 20.0,
    log_dir: Path | None = None,
    timing: Timing = DEFAULT,
    **settings: object,
) -> SupervisedProgram:
    program = lp.Program("calls")
    store = program.add_node(lp.CourierNode(Store), label="store")
    program.add_node(lp.PyNode(_calls, store), label="caller")
    plan = lp.plan(program, "test_mt", **settings)
    endpoints = {address.key: "10.0.0.1:1" for address in plan.addresses}
    table = AddressTable(endpoints, Secret.generate())
    options = LaunchOptions(notice_s, log_dir)
    supervised = SupervisedProgram(plan, options, table, log_dir, timing=timing)
    hosts.program = supervised
    supervised.supervise(hosts)
    return supervised


def _launch_up(**settings: object) -> tuple[FakeHosts, SupervisedProgram]:
    hosts = FakeHosts()
    program = _launch(hosts, **settings)
    poll_until(lambda: len(hosts.told) == 2)
    del hosts.told[:]
    return hosts, program


def test_nodes_are_asked_whom_they_wait_for_only_once_they_have_a_process() -> None:
    hosts = FakeHosts()
    program = _launch(hosts, timing=DEFAULT._replace(deadlock_s=0.01))
    poll_until(lambda: hosts.looks > 3)
    assert not hosts.asked
    hosts.nodes = ("store[0]", "caller[0]")
    poll_until(lambda: "look" in hosts.asked)
    program.kill()
    assert program.join(60)


def test_who_calls_a_lost_host_is_asked_to_end_before_its_calls_fail() -> None:
    hosts, program = _launch_up()
    hosts.post(HostLost("h1", ("store[0]",), "h1 is lost"))
    assert program.join(60)
    assert hosts.told == ["stop caller[0]", "lost 1"]
    assert program.result is not None
    assert [each.node for each in program.result.failures] == ["store[0]"]


def test_calls_to_a_lost_host_fail_before_its_nodes_are_started_elsewhere() -> None:
    policy = lp.RestartPolicy("on_failure", moves=True, backoff_s=0.0)
    hosts, program = _launch_up(restart={"store": policy})
    hosts.post(HostLost("h1", ("store[0]",), "h1 is lost"))
    poll_until(lambda: len(hosts.told) == 2)
    assert hosts.told == ["lost 1", "start store[0]"]
    program.kill()
    assert program.join(60)


@pytest.mark.parametrize("moves", [True, False])
def test_that_a_host_is_lost_is_told_when_it_is_known(
    caplog: pytest.LogCaptureFixture, moves: bool
) -> None:
    policy = lp.RestartPolicy("on_failure", moves=moves, backoff_s=1000.0)
    hosts, program = _launch_up(restart={"store": policy}, notice_s=1000.0)
    hosts.post(HostLost("h1", ("store[0]",), "h1 is lost: no message came from it for 20 s"))
    poll_until(lambda: "lost 1" in hosts.told)
    assert caplog.messages[0] == "h1 is lost: no message came from it for 20 s"
    hosts.post(HostLost("h2", (), "h2 is lost, too"))
    program.kill()
    assert program.join(60)
    assert ("h2 is lost, too" in caplog.messages) == moves  # no matter while all end as it is


def _stopped(folder: Path, broken: str) -> lp.ProgramResult:
    """Stops a program on broken hosts, and returns how it ended."""
    program = _launch(FakeHosts(broken), 0.0, folder)
    if broken == "event":
        program.post(Constructed("nobody[0]", 0, runs=True))
    program.request_stop("the test")
    assert program.join(60)
    assert program.result is not None
    return program.result


@pytest.mark.parametrize("broken", ["start", "request_stop", "terminate", "kill", "event"])
def test_a_mistake_of_the_supervisor_is_a_failure_and_no_wait_without_end(
    tmp_path: Path, broken: str
) -> None:
    result = _stopped(tmp_path, broken)
    assert result.outcome is lp.Outcome.FAILED
    assert result.failures[0].node == "supervisor"
    assert "supervisor" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("broken", ["close", "stacks"])
def test_a_mistake_after_the_end_of_all_nodes_does_not_change_how_it_went(
    tmp_path: Path, broken: str
) -> None:
    assert _stopped(tmp_path, broken).outcome is lp.Outcome.STOPPED


def test_an_interrupt_before_anybody_watches_for_it_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[lp.RunningProgram] = []

    def interrupt(running: lp.RunningProgram) -> None:
        launched.append(running)
        raise KeyboardInterrupt

    monkeypatch.setattr(SIGNALS, "watch", interrupt)
    program = lp.Program("interrupted")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with pytest.raises(KeyboardInterrupt):
        lp.launch(program, "local_mt", notice_s=60)
    assert launched[0].join(60)


class _Unhashable:
    """Stands for a running program of another launcher, as a dataclass is."""

    __hash__ = None  # type: ignore[assignment]
    result = None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def handle_signal(self, signum: int) -> None:
        self.signals.append(signum)


def test_programs_that_cannot_be_hashed_are_stopped_by_signals_in_the_order_of_their_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)
    signals, programs = _LaunchSignals(), [_Unhashable() for _ in range(3)]
    for each in programs:
        signals.watch(cast("RunningProgram", each))
    del programs[1]
    gc.collect()
    assert signals.stop(signal.SIGTERM)
    assert [each.signals for each in programs] == [[signal.SIGTERM]] * 2
    programs.clear()
    del each
    gc.collect()
    assert not signals.stop(signal.SIGTERM)
