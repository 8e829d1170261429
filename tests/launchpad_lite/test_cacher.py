"""A node that answers for another one: how it is made, shown, and run."""

import math
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp

_READERS = 3
_SIZE = 1 << 17


class Learner:
    def __init__(self) -> None:
        self.asked = 0
        self.finished = 0

    def weights(self, scale: float = 1.0) -> Any:
        self.asked += 1
        return np.full(_SIZE, scale)

    def fails(self) -> None:
        raise KeyError("as told")

    def items(self, count: int) -> Any:
        yield from range(count)

    def times_asked(self) -> int:
        return self.asked

    def finish(self) -> int:
        self.finished += 1
        return self.finished


class Reader:
    """Checks what it gets, and that the learner is asked once per question; the last one stops."""

    def __init__(self, cached: Any, learner: Any) -> None:
        self._cached = cached
        self._learner = learner

    def run(self) -> None:
        for _ in range(20):
            for scale in (1.0, 2.0):
                array = self._cached.weights(scale)
                assert (array == scale).all()
                array[:] = -1
        assert list(self._cached.items(3)) == [0, 1, 2]
        with pytest.raises(KeyError, match="as told"):
            self._cached.fails()
        if self._learner.finish() == _READERS:
            assert self._learner.times_asked() == 2
            lp.stop()


def handle_of(program: lp.Program, label: str = "learner") -> Any:
    return program.add_node(lp.CourierNode(Learner), label=label)


def make_program() -> lp.Program:
    program = lp.Program("cached")
    learner = handle_of(program)
    cacher = program.add_node(
        # What is good for ever makes the number of calls certain.
        lp.CacherNode(learner, math.inf, math.inf),
        label="cacher",
    )
    with program.group("reader"):
        for _ in range(_READERS):
            program.add_node(lp.CourierNode(Reader, cacher, learner))
    return program


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_readers_get_what_one_call_brought(launch_program: Any, launcher: str) -> None:
    result = launch_program(make_program(), launcher).wait()
    assert result.outcome is not lp.Outcome.FAILED


class Impatient:
    """Asks until it has seen the target change, so that an old answer was replaced."""

    def __init__(self, cached: Any) -> None:
        self._cached = cached

    def run(self) -> None:
        first = self._cached.count()
        while self._cached.count() == first and not lp.wait_for_stop(0.001):
            pass
        lp.stop()


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def count(self) -> int:
        self.value += 1
        return self.value


def test_answers_are_refreshed_and_cachers_can_be_chained(launch_program: Any) -> None:
    program = lp.Program("chain")
    later = program.declare("counter")
    inner = program.add_node(lp.CacherNode(later, 0, 5), label="inner")
    outer = program.add_node(lp.CacherNode(inner, 1, 10), label="outer")
    program.add_node(lp.CourierNode(Impatient, outer), label="reader")
    program.add_node(lp.CourierNode(Counter), label="counter")
    first, second, *_ = plan = lp.plan(program, "test_mt").executables
    assert (first.description, first.calls) == ("CacherNode(for counter[0])", ("counter[0]",))
    assert second.description == "CacherNode(for CacherNode(for counter[0]))"
    assert [each.calls for each in plan[1:3]] == [("inner[0]",), ("outer[0]",)]
    assert launch_program(program, "test_mt").wait().outcome is not lp.Outcome.FAILED


SILENT = [
    lp.PyNode(print).create_handle(),
    lp.PyClassNode(Learner).create_handle(),
    lp.ExternalNode("127.0.0.1:1").create_handle(),
    lp.Pool([lp.CourierNode(Learner).create_handle()]),
    lp.CourierNode(Learner),
    Learner,
    "learner",
    None,
]


@pytest.mark.parametrize("thing", SILENT, ids=lambda thing: type(thing).__name__)
def test_only_handles_of_nodes_that_can_be_called_are_taken(thing: Any) -> None:
    with pytest.raises(TypeError, match="CacherNode takes handles of nodes that can be called"):
        lp.CacherNode(thing, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((2, 1), {}, ValueError, r"stale_s=0.001 is below refresh_s=0.002"),
        ((), {"refresh_s": 1}, TypeError, "takes refresh_s= and stale_s=, in seconds"),
        ((1, 2), {"refresh_s": 1}, TypeError, "refresh_interval_ms is the original's name"),
        ((1, 2), {"max_bytes": -1}, ValueError, "less than nothing"),
        ((1, 2), {"courier_kwargs": {"thread_pool_size": 0}}, ValueError, "at least 1"),
        ((1, 2), {"courier_client_kwargs": {"nothing": 1}}, TypeError, "option 'nothing'"),
        ((), {}, TypeError, "."),
        ((None, 1), {}, TypeError, "."),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        lp.CacherNode(lp.CourierNode(Learner).create_handle(), *arguments, **options)


def test_times_may_be_equal_or_nothing_and_the_target_stays() -> None:
    handle = lp.CourierNode(Learner).create_handle()
    for times in ((0, 0), (5, 5), (0, math.inf)):
        node = lp.CacherNode(handle, *times)
        with pytest.raises(TypeError, match="declare"):
            node.configure(handle)
