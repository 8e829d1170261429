"""Nodes that wait for each other are found, and shown to be where they are."""

import asyncio
import re
import threading
import time
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import ProgramLauncher
from launchpad_lite.worker._liveness import SignsOfLife
from tests.launchers.running import program_of


class Deadlocked:
    """Calls its peer, which calls back, and has one thread."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def ping(self) -> None:
        self._peer.pong()

    def pong(self) -> None:
        self._peer.ping()


class Deaf:
    """Runs on, whoever asks it to end."""

    def __init__(self) -> None:
        self._runs = threading.Event()

    def wait_until_it_runs(self) -> None:
        self._runs.wait()

    def run(self) -> None:
        self._runs.set()
        while True:
            time.sleep(0.01)


class Waits:
    """Keeps its callers until the stop."""

    def wait(self) -> None:
        lp.wait_for_stop()


class Awaits:
    """As that, in tasks."""

    async def wait(self) -> None:
        await asyncio.sleep(1000)


@pytest.fixture
def deadlock(launch_program: ProgramLauncher, request: pytest.FixtureRequest) -> Any:
    """Two nodes that wait for each other, or are about to."""
    program = lp.Program("deadlock")
    handles = {label: program.declare(label) for label in ("first", "second")}
    for label, peer in (("first", "second"), ("second", "first")):
        program.add_node(lp.CourierNode(Deadlocked, handles[peer], serial=True), label=label)
    running = launch_program(program, request.param, notice_s=0.2)
    running.client("first").futures.ping()
    return running


@pytest.mark.parametrize("deadlock", ["test_mt", "test_mp"], indirect=True)
def test_a_test_that_times_out_shows_where_all_nodes_are(deadlock: Any) -> None:
    told = ""
    while "deadlock: " not in told:
        with pytest.raises(TimeoutError) as late:
            deadlock.wait(0.05)
        told = str(late.value)
    assert re.search(
        r"first\[0\]:\n\n.*\n.*test_deadlocks.py\", line \d+, in ping\n.*\n.*waits for second", told
    )
    assert re.search(
        r"second\[0\]:\n\n.*\n.*test_deadlocks.py\", line \d+, in pong\n.*\n.*waits for first", told
    )


@pytest.mark.parametrize("deadlock", ["test_mt", "test_mp"], indirect=True)
def test_a_call_whose_time_is_over_says_for_whom_its_server_waits(deadlock: Any) -> None:
    client = courier.with_timeout(deadlock.client("first"), 0.5)

    def told() -> str:
        with pytest.raises(courier.CallTimeoutError) as late:
            client.ping()
        return str(late.value)

    waits = r"it waits for a thread of the server; ping has run for \S+ s and waits for second"
    poll_until(lambda: re.search(waits + r"\[0\]: pong \(test_deadlocks.py:\d+: self", told()))
    (ping,) = (x for x in deadlock.running.wait_graph()["threads"] if x["runs"] == "ping")
    assert ping["answers_s"] > 0
    assert 0 < ping["argument_bytes"] < 100


@pytest.mark.parametrize("kind", [Waits, Awaits])
def test_threads_and_tasks_that_are_at_the_same_place_share_one_stack(
    launch_program: Any, kind: type
) -> None:
    running = launch_program(program_of(waits=lp.CourierNode(kind)), "test_mt")
    client = running.client("waits")
    for _ in range(5):
        client.futures.wait()
    poll_until(lambda: " and 2 more:\n" in running.running.stacks()["waits[0]"])
    stack = running.running.stacks()["waits[0]"]
    assert stack.count(", in wait") == 1


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_who_is_ended_by_force_shows_where_it_was(
    launch_program: ProgramLauncher, launcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = launch_program(program_of("deaf", deaf=lp.CourierNode(Deaf)), launcher, notice_s=0.2)
    running.client("deaf").wait_until_it_runs()
    assert running.stop().killed == ("deaf[0]",)
    assert re.search(r"deaf\[0\].run \w+ \(test_deadlocks.py:\d+: time.sleep", caplog.text)
    told = r"deaf\[0\] was here:\n\n.*\n.*test_deadlocks.py\", line \d+, in run\n"
    assert re.search(told, caplog.text)


def test_a_server_whose_threads_are_all_taken_shows_no_life() -> None:
    """Taken by calls that do not end, while others wait; a heartbeat is a sign, too."""
    loads = [[(False, 0)], [(True, 0)], [(True, 0)], [(True, 0)], [(True, 1)], [(True, 1)]]
    reported: list[int] = []
    looks = 0
    over = threading.Event()

    def load() -> list[tuple[bool, int]]:
        nonlocal looks
        looks += 1
        if looks == 4:
            signs.heartbeat()
        if looks > len(loads):
            over.set()
        return loads[min(looks, len(loads)) - 1]

    signs = SignsOfLife(
        lp.Liveness(health_s=0.01), lambda: reported.append(looks), lambda: None, load
    )
    signs.start(None)
    assert over.wait(30)
    signs.stop()
    assert [each for each in reported if each <= len(loads)] == [1, 2, 4, 5]
