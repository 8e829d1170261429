"""Who waits for whom: deduced from what threads do, and told by running programs."""

import asyncio
import concurrent.futures
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.supervision.deadlock_watch import DeadlockWatch
from launchpad_lite import engines
from launchpad_lite.life.events import AT_MOST, IN_LIBRARY, Looked, ThreadActivity
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.life.waits import STALLED, ServingNode, explain
from launchpad_lite.testing import poll_until

_PATIENCE_S = 20.0
# Nodes as threads are ended by force, which may hit a finaliser, where Python ignores it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
launchers = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])


class Caller:
    """A node that calls the next one, in ways that may never end."""

    def __init__(self, following: Any, runs: str = "") -> None:
        self._following = following
        self._runs = runs

    def run(self) -> None:
        if self._runs:
            getattr(self._following, self._runs)()
        lp.wait_for_stop()

    def pass_on(self) -> None:
        self._following.pass_on()

    def pass_on_by_future(self) -> None:
        self._following.futures.pass_on_by_future().result()

    async def pass_on_async(self) -> None:
        await self._following.aio.pass_on_async()

    def compute(self) -> None:
        while not lp.stop_event().is_set():
            sum(range(1000))

    def rest(self) -> None:
        lp.stop_event().wait(1000)

    async def rest_async(self) -> None:
        await asyncio.sleep(1000)

    def items(self) -> Iterator[int]:
        yield from self._following.items()

    def read(self) -> None:
        next(self._following.items())

    def wait_for_all(self) -> None:
        concurrent.futures.wait([self._following.futures.wait_for_all()])

    def have_compute(self) -> None:
        self._following.compute()

    def have_rest(self) -> None:
        self._following.rest()

    def have_rest_async(self) -> None:
        self._following.rest_async()


def _program(runs: Sequence[str], **options: Any) -> lp.Program:
    """Returns a program of nodes in a ring: each calls the next, at first what `runs` says."""
    program = lp.Program("ring")
    nodes = [lp.CourierNode(Caller, None, each, **options) for each in runs]
    for index, (node, each) in enumerate(zip(nodes, runs, strict=True)):
        node.configure(nodes[(index + 1) % len(nodes)].create_handle(), each)
        with program.group("abcdef"[index]):
            program.add_node(node)
    return program


def _await(running: Any, *wanted: str) -> str:
    """Waits until `why` says all this; returns what it says."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while not all(each in (text := running.why()) for each in wanted):
        assert time.monotonic() < give_up_at, text
    return text


@launchers
@pytest.mark.parametrize("method", ["pass_on", "pass_on_async", "pass_on_by_future"])
def test_a_ring_of_serial_nodes_is_a_deadlock(
    launch_program: Any, launcher: str, method: str
) -> None:
    running = launch_program(_program([method, "", ""], serial=True), launcher).running
    text = _await(running, "deadlock: ")
    deadlock, *steps = text.split("\n")
    assert sorted(deadlock.removeprefix("deadlock: ").split(" → ")[1:]) == [
        f"{each}[0].{method}" for each in "abc"
    ]
    assert f"  b[0].{method} waits for c[0]: {method} (test_waits.py:" in "\n".join(steps)
    assert text.count("deadlock") == 1
    assert f"which waits for a thread: all run {method} (test_waits.py:" in text
    running.kill()


@launchers
def test_questions_of_one_moment_do_not_mix(launch_program: Any, launcher: str) -> None:
    running = launch_program(_program(["", "rest"]), launcher).running
    poll_until(lambda: len(running.ask("look")) >= 2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        unknown = threads.submit(running.ask, "color", nodes=["b[0]"])
        looks = [threads.submit(running.ask, "look") for _ in range(4)]
        assert unknown.result() == {"b[0]": {"error": "KeyError: 'color'"}}
        assert all("threads" in found.result()["a[0]"] for found in looks)
    running.kill()


@pytest.mark.parametrize(("first", "method"), [("read", "items"), ("wait_for_all",) * 2])
def test_streams_and_waits_for_all_of_some_calls_can_be_in_a_deadlock(
    launch_program: Any, first: str, method: str
) -> None:
    running = launch_program(_program([first, ""]), "test_mt").running
    links = ["a[0].{0} waits for b[0]: {0} (", "b[0].{0} waits for a[0]: {0} ("]
    _await(running, "deadlock: ", *(each.format(method) for each in links))
    running.kill()


class Many:
    """Waits for others in ways that its stack does not tell."""

    def __init__(self) -> None:
        self.act = lp.batched_handler(batch_size=3, timeout_s=None)(list)


class Lagging(engines.ParameterServer):
    """One of its workers makes no step."""

    def initial(self) -> dict[str, int]:
        return {"a": 0}

    def push(self, worker: str, values: Mapping[str, int]) -> Mapping[str, int]:
        if lp.current_node().replica == 1:
            lp.stop_event().wait(1000)
        return values


def test_what_calls_wait_for_that_are_answered_later_is_named(launch_program: Any) -> None:
    program = lp.Program("later")
    with program.group("b"):
        many = program.add_node(lp.CourierNode(Many))
    with program.group("c"):
        idle = [program.add_node(lp.CourierNode(NeverThere))]
    with program.group("a"):
        program.add_node(lp.CourierNode(Caller, many, "act"))
        program.add_node(lp.CourierNode(Caller, lp.Pool(idle), "rest"))
    Lagging().add_to(program, workers=2, progress_s=None)
    running = launch_program(program, "test_mt").running
    _await(
        running,
        "a[0].run waits for b[0].act, which waits (its batch has 1 of 3 calls)",
        "a[1].run waits for c[0].__init__, which waits for an event, for some time at most (test_waits.py:",
        "ps_worker[0].run wait for ps_worker[1].push, which waits for an event, for some time at most (test_waits.py:",
    )
    running.kill()


@launchers
@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("compute", "computes (test_waits.py:"),
        ("rest", "waits for an event, for some time at most (test_waits.py:"),
        ("rest_async", "sleeps (test_waits.py:"),
    ],
)
def test_a_node_for_which_others_wait_is_named_with_its_line(
    launch_program: Any, launcher: str, method: str, what: str
) -> None:
    running = launch_program(_program([f"have_{method}", "", ""]), launcher).running
    _await(running, f"a[0].run, b[0].have_{method} wait for c[0].{method}, which {what}")
    running.kill()


class NeverThere:
    """Is constructed for ever."""

    def __init__(self) -> None:
        lp.stop_event().wait(1000)


def test_a_node_that_is_still_constructed_is_named_with_its_line(launch_program: Any) -> None:
    program = lp.Program("late")
    with program.group("b"):
        late = program.add_node(lp.CourierNode(NeverThere))
    with program.group("a"):
        program.add_node(lp.CourierNode(Caller, late, "rest"))
    running = launch_program(program, "test_mt").running
    _await(
        running,
        "a[0].run waits for b[0].__init__, which waits for an event, for some time at most (test_waits.py:",
    )
    running.kill()


def test_a_process_that_was_stopped_is_named(launch_program: Any) -> None:
    running = launch_program(_program(["have_rest", "", ""]), "test_mp").running
    _await(running, "c[0].rest, which waits")
    pid = next(each.pid for each in running.status() if each.name == "c[0]")
    os.kill(pid, signal.SIGSTOP)
    try:
        _await(
            running, "wait for c[0], which does not answer: it was stopped by a signal, and goes on"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    running.kill()


def _node(*threads: ThreadActivity, pid: int = 1, is_full: bool = False) -> ServingNode:
    return ServingNode("running", [], pid, Looked("", "", threads, is_full))


def _nodes(**nodes: ServingNode) -> dict[str, ServingNode]:
    return {name: dataclasses.replace(node, servers=[name]) for name, node in nodes.items()}


def test_threads_that_hold_the_locks_of_others_in_a_circle_are_a_deadlock() -> None:
    one = ThreadActivity(
        "left", "a.py:1", doing="waits for a lock that y holds", thread=1, behind=2
    )
    two = ThreadActivity(
        "right", "a.py:2", doing="waits for a lock that x holds", thread=2, behind=1
    )
    text = explain(_nodes(a=_node(one, two)))
    assert text.startswith(
        "deadlock: a.left → a.right → a.left\n  a.left waits for a lock that y holds ("
    )


def test_that_no_node_computes_is_said_unless_one_may_go_on() -> None:
    asks = ThreadActivity("run", "a.py:1", server="b", method="get")
    stuck = ThreadActivity("get", "b.py:1", peer="x", doing="waits for an item of a queue")
    assert explain(_nodes(a=_node(asks), b=_node(stuck))).endswith(f"\n{STALLED}")
    for other in ("computes", "sleeps", "waits for a file or a connection", f"waits{AT_MOST}"):
        moving = dataclasses.replace(stuck, doing=other)
        assert STALLED not in explain(_nodes(a=_node(asks), b=_node(moving)))
    for doing in ("reads a socket", f"waits for an event{AT_MOST}"):  # and may fill the queue
        fills = ThreadActivity("run", "b.py:2", doing=doing)
        assert STALLED not in explain(_nodes(a=_node(asks), b=_node(stuck, fills)))
    receives = dataclasses.replace(asks, doing="reads a socket")
    assert STALLED in explain(_nodes(a=_node(receives), b=_node(stuck)))
    limited = dataclasses.replace(asks, is_limited=True)
    assert STALLED not in explain(_nodes(a=_node(limited), b=_node(stuck)))
    for state, is_told in (("ended", True), ("restarting", False)):
        gone = ServingNode(state, [], 2, None)
        told = explain(_nodes(a=_node(asks), b=_node(stuck), c=gone))
        assert told.endswith(f"\n{STALLED}") == is_told


def test_a_silent_node_is_named_although_its_name_ends_that_of_another() -> None:
    asks = ThreadActivity("run", "", server="b", method="pong")
    silent = ServingNode("running", [], 3, None)
    text = explain(_nodes(ab=_node(asks), b=_node(), a=silent))
    assert "\na does not answer" in text


def test_a_call_that_is_on_its_way_is_no_deadlock() -> None:
    one = ThreadActivity("run", "", server="b", method="pong")
    other = ThreadActivity("ping", "", peer="10.0.0.1:4711", server="a", method="pong")
    text = explain(_nodes(a=_node(one), b=_node(other)))
    assert "deadlock" not in text
    assert "a.run waits for b: pong, not begun yet or answered later" in text


def test_two_calls_of_which_one_runs_make_no_deadlock_before_the_other_waits_for_a_thread() -> None:
    own = ThreadActivity("run", "", server="b", method="pong")
    one = ThreadActivity("ping", "", peer="x", server="b", method="pong")
    other = ThreadActivity("pong", "", peer="x", server="a", method="ping")
    assert "deadlock" not in explain(_nodes(a=_node(own, one), b=_node(other)))
    assert "deadlock" in explain(_nodes(a=_node(own, one), b=_node(other, is_full=True)))


def test_a_wait_that_ends_after_some_time_makes_no_deadlock() -> None:
    one = ThreadActivity("ping", "a.py:1", peer="x", server="b", method="pong", is_limited=True)
    other = ThreadActivity("pong", "b.py:1", peer="x", server="a", method="ping")
    text = explain(_nodes(a=_node(one), b=_node(other)))
    assert text == "a.ping waits for b: pong, for some time at most (a.py:1)"


def test_threads_of_the_library_are_named_after_those_of_the_user() -> None:
    beats = [ThreadActivity("run", IN_LIBRARY, server="x", method="beat")] * 2
    asks = ThreadActivity("run", "a.py:1", server="y", method="ask")
    first, second = explain(_nodes(a=_node(*beats), b=_node(asks))).split("\n")
    assert first.startswith("b.run waits for y")
    assert second.startswith("a.run waits for x")


def test_another_caller_of_the_method_makes_no_deadlock() -> None:
    one = ThreadActivity("ping", "", peer="process 7 of this machine", server="b", method="pong")
    other = ThreadActivity("pong", "", peer="process 7 of this machine", server="a", method="ping")
    assert "deadlock" not in explain(_nodes(a=_node(one, pid=1), b=_node(other, pid=2)))
    assert "deadlock" in explain(_nodes(a=_node(one, pid=7), b=_node(other, pid=7)))


def test_one_of_several_threads_that_goes_on_makes_no_deadlock() -> None:
    stuck = ThreadActivity("pong", "", peer="x", server="a", method="ping")
    works = ThreadActivity("train", "train.py:3: step()", peer="x", doing="computes")
    caller = ThreadActivity("ping", "", peer="x", server="b", method="pong2")
    text = explain(_nodes(a=_node(caller), b=_node(stuck, works, is_full=True)))
    assert "deadlock" not in text
    assert "wait for b.train, which computes (train.py:3: step())" in text


def test_a_program_in_which_no_node_waits_for_another_says_what_each_does() -> None:
    works = ThreadActivity("run", "train.py:3: step()", doing="computes")
    assert explain(_nodes(a=_node(works))) == (
        "no node waits in a call of another\na.run computes (train.py:3: step())"
    )


@launchers
def test_a_deadlock_is_told_once_without_being_asked_for(
    launch_program: Any, launcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    timing = DEFAULT._replace(deadlock_s=0.1, look_s=0.1)
    running = launch_program(
        _program(["pass_on", ""], serial=True), launcher, timing=timing
    ).running
    poll_until(lambda: "ring: deadlock: " in caplog.text)
    assert "a[0].pass_on waits for b[0]: pass_on" in caplog.text
    running.kill()
    running.join()
    assert caplog.text.count("deadlock: ") == 1


def test_that_all_wait_and_none_computes_is_told_after_a_while() -> None:
    told: queue.Queue[str] = queue.Queue()
    timing = DEFAULT._replace(deadlock_s=0.01, stalled_s=0.04, look_s=0.01)
    text = f"a.run waits for b.get, which waits (b.py:1)\n{STALLED}"
    watch = DeadlockWatch(lambda: text, lambda: (["a", "b"], True), told.put, timing)
    watch.start()
    assert told.get(timeout=10) == f"{STALLED}: a.run waits for b.get, which waits (b.py:1)"
    watch.end()


def test_checks_for_deadlocks_that_take_much_of_the_processor_are_rare() -> None:
    began: queue.Queue[float] = queue.Queue()

    def why() -> str:
        began.put(time.monotonic())
        ends_at = time.thread_time() + 0.02
        while time.thread_time() < ends_at:
            pass
        return ""

    timing = DEFAULT._replace(deadlock_s=0.01)
    watch = DeadlockWatch(why, lambda: (["a"], True), print, timing)
    watch.start()
    first, second = began.get(), began.get()
    watch.end()
    assert second - first > 0.4
