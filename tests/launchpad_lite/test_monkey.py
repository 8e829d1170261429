"""Faults hit the workers of the program, leave nobody paused, and hit nobody else."""

import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from launchpad_lite.launching import NodeStatus
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.monkey import Fault, Monkey


class Counter:
    """Counts until it is told that it is enough."""

    def __init__(self) -> None:
        self._value = 0
        self._enough = False

    def increment(self) -> bool:
        self._value += 1
        return not self._enough

    def finish(self) -> int:
        self._enough = True
        return self._value


class Caller:
    """Calls the counter as long as it wants to be called."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def run(self) -> None:
        while self._counter.increment():
            pass


class FakeProgram:
    """Says of processes what the test wants; the first node's group is `a`."""

    def __init__(self, *pids: int) -> None:
        self.nodes = [
            NodeStatus(f"a[{number}]", "running", "localhost", pid, {}, restarts=3)
            for number, pid in enumerate(pids)
        ]
        self.plan = SimpleNamespace(executables=[SimpleNamespace(label="a")])
        self.asked = 0

    def status(self) -> list[NodeStatus]:
        self.asked += 1
        return self.nodes


@pytest.fixture
def start_child() -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        children.append(subprocess.Popen(["sleep", "600"]))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def program(launch_program: Any) -> Any:
    """Two callers and their counter, up and at work, as processes."""
    graph = lp.Program("hit")
    counter = graph.add_node(lp.CourierNode(Counter), label="counter")
    for _ in range(2):
        graph.add_node(lp.PyClassNode(Caller, counter), label="caller")
    launched = launch_program(graph, "test_mp")
    poll_until(lambda: all(each.state != "starting" for each in launched.running.status()))
    return launched


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def monkey_of(program: Any, *faults: Fault, **options: Any) -> Monkey:
    return Monkey(program, **{"seed": 7, "faults": faults, "mean_interval_s": 0.02, **options})


@pytest.mark.parametrize("fault", [Fault.PAUSE, Fault.DELAY])
def test_a_program_completes_through_pauses(program: Any, fault: Fault) -> None:
    pids = {each.name: each.pid for each in program.running.status()}
    with monkey_of(program, fault, max_pause_s=0.1) as monkey:
        hit = poll_until(lambda: {each.node for each in monkey.injected} == set(pids), 30)
    assert hit
    assert all((each.fault, each.pid) == (fault, pids[each.node]) for each in monkey.injected)
    assert not any(stopped(pid) for pid in pids.values())
    program.client("counter").futures.finish()  # the program may end before the answer
    assert program.wait().outcome is lp.Outcome.COMPLETED


def test_a_paused_worker_does_nothing_until_the_block_ends(program: Any) -> None:
    with monkey_of(program, Fault.PAUSE, labels=["counter"], max_pause_s=3600) as monkey:
        (paused,) = poll_until(lambda: monkey.injected)
        poll_until(lambda: stopped(paused.pid))
    assert paused.node == "counter[0]"  # as was asked for
    assert not stopped(paused.pid)
    assert program.client("counter").increment()
    program.client("counter").futures.finish()  # the program may end before the answer
    program.wait()


def test_the_same_seed_hits_the_same_nodes(start_child: Any) -> None:
    def nodes_hit(seed: int) -> list[str]:
        children = [start_child().pid for _ in range(8)]
        # Who is paused cannot be hit, and for how long depends on the machine.
        with monkey_of(FakeProgram(*children), Fault.KILL, seed=seed) as monkey:
            poll_until(lambda: len(monkey.injected) == 8)
        return [each.node for each in monkey.injected]

    assert nodes_hit(1) == nodes_hit(1) != nodes_hit(2)


def test_a_worker_that_came_up_is_left_alone_for_a_while(start_child: Any) -> None:
    fake = FakeProgram(start_child().pid)
    with monkey_of(fake, Fault.KILL, minimum_uptime_s=0.4) as monkey:
        poll_until(lambda: monkey.injected)
    assert monkey.injected[0].at_s >= 0.4
    assert monkey.injected[0].attempt == 3


def test_a_worker_that_ends_when_it_is_to_be_hit_is_spared(
    start_child: Any, monkeypatch: Any
) -> None:
    child = start_child()
    fake = FakeProgram(child.pid)

    def choose_too_late(self: Monkey) -> Any:
        victims = choose(self)
        if victims:
            fake.nodes = []
        return victims

    choose = Monkey._victims
    monkeypatch.setattr(Monkey, "_victims", choose_too_late)
    with monkey_of(fake, Fault.KILL) as monkey:
        poll_until(lambda: not fake.nodes and fake.asked > 10)
    assert monkey.injected == []
    assert child.poll() is None


def test_whom_a_kill_cannot_or_must_not_hit_is_left_alone(start_child: Any) -> None:
    child, zombie, reaped = start_child(), start_child(), start_child()
    zombie.kill()
    reaped.kill()
    reaped.wait()
    poll_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
    # The shell ends at once, and its child is nobody's.
    shell = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    orphan = psutil.Process(int(subprocess.run(shell, capture_output=True).stdout))
    try:
        fake = FakeProgram(zombie.pid, reaped.pid, orphan.pid)
        fake.nodes += [
            NodeStatus("a[0]", state, "localhost", child.pid, {})
            for state in ("starting", "restarting", "ended")
        ]
        with monkey_of(fake, Fault.KILL, mean_interval_s=0.001) as monkey:
            poll_until(lambda: fake.asked > 50)
        assert monkey.injected == []
        assert orphan.is_running()
        assert child.poll() is None
    finally:
        orphan.kill()


def test_an_error_of_the_monkey_is_raised_where_its_block_ends_after_one_of_the_block(
    start_child: Any,
) -> None:
    def wait_for_error(error: Exception | None) -> None:
        fake = FakeProgram(start_child().pid)
        with monkey_of(fake, Fault.PAUSE):
            fake.nodes = [NodeStatus("a[0]", "running", "gpu7", fake.nodes[0].pid, {})]
            asked = fake.asked
            poll_until(lambda: fake.asked > asked)
            if error is not None:
                raise error

    with pytest.raises(TypeError, match="gpu7"):
        wait_for_error(None)
    with pytest.raises(KeyError):
        wait_for_error(KeyError())


def test_threads_and_other_machines_are_refused(launch_program: Any) -> None:
    graph = lp.Program("threads")
    graph.add_node(lp.CourierNode(Counter), label="counter")
    launched = launch_program(graph, "test_mt")
    with pytest.raises(TypeError, match=r"counter\[0\] is a thread.*test_mp"):
        monkey_of(launched, Fault.KILL)
    fake = FakeProgram(4711)
    fake.nodes = [NodeStatus("a[0]", "running", "gpu7", 4711, {})]
    with pytest.raises(TypeError, match=r"gpu7.*this machine only"):
        monkey_of(fake, Fault.KILL)


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"faults": ()}, "at least one fault"),
        ({"labels": ["b"]}, "no group 'b'; there are: a"),
        ({"mean_interval_s": 0}, "above 0"),
        ({"max_pause_s": 0}, "above 0"),
        ({"minimum_uptime_s": -1}, "not below"),
    ],
)
def test_mistakes_are_found_before_anything_is_hit(options: Any, mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        monkey_of(FakeProgram(), Fault.KILL, **options)
