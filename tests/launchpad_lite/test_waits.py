"""Who waits for whom: deduced from what threads do, and told by running programs."""

import concurrent.futures
import dataclasses
import queue
import time
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.supervision.deadlock_watch import DeadlockWatch
from launchpad_lite.life.events import AT_MOST, IN_LIBRARY, Looked, ThreadActivity
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.life.waits import STALLED, ServingNode, explain
from launchpad_lite.testing import poll_until

# Nodes as threads are ended by force, which may hit a finaliser, where Python ignores it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
launchers = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])


class Caller:
    """A node that calls another, which calls it."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def run(self) -> None:
        self._other.ask()

    def ask(self) -> None:
        self._other.ask()


def _ring() -> lp.Program:
    """Returns a program of two nodes that serve one call at a time."""
    program = lp.Program("ring")
    for label, other in ("ab", "ba"):
        node = lp.CourierNode(Caller, program.declare(other), serial=True)
        program.add_node(node, label=label)
    return program


@launchers
def test_questions_of_one_moment_do_not_mix(launch_program: Any, launcher: str) -> None:
    running = launch_program(_ring(), launcher).running
    poll_until(lambda: len(running.ask("look")) >= 2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        unknown = threads.submit(running.ask, "color", nodes=["b[0]"])
        looks = [threads.submit(running.ask, "look") for _ in range(4)]
        assert unknown.result() == {"b[0]": {"error": "KeyError: 'color'"}}
        assert all("threads" in found.result()["a[0]"] for found in looks)
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
    running = launch_program(_ring(), launcher, timing=timing).running
    poll_until(lambda: "ring: deadlock: " in caplog.text)
    assert "a[0].ask waits for b[0]: ask" in caplog.text
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
