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


def make_program(in_process: str | None = None) -> lp.Program:
    options = {"in_process": in_process} if in_process else {}
    program = lp.Program("cached")
    learner = handle_of(program)
    cacher = program.add_node(
        # What is good for ever makes the number of calls certain.
        lp.CacherNode(learner, math.inf, math.inf, courier_kwargs=options),
        label="cacher",
    )
    with program.group("reader"):
        for _ in range(_READERS):
            program.add_node(lp.CourierNode(Reader, cacher, learner))
    return program


@pytest.mark.parametrize(
    ("launcher", "in_process"),
    [("test_mt", None), ("test_mt", "share"), ("test_mt", "wire"), ("test_mp", None)],
)
def test_readers_get_what_one_call_brought(
    launch_program: Any, launcher: str, in_process: str | None
) -> None:
    result = launch_program(make_program(in_process), launcher).wait()
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


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_answers_are_refreshed_and_cachers_can_be_chained(
    launch_program: Any, launcher: str
) -> None:
    program = lp.Program("chain")
    later = program.declare("counter")
    inner = program.add_node(lp.CacherNode(later, 0, 5), label="inner")
    outer = program.add_node(lp.CacherNode(inner, 1, 10), label="outer")
    program.add_node(lp.CourierNode(Impatient, outer), label="reader")
    program.add_node(lp.CourierNode(Counter), label="counter")
    assert launch_program(program, launcher).wait().outcome is not lp.Outcome.FAILED


def test_the_plan_shows_whom_it_answers_for() -> None:
    program = make_program()
    plan = lp.plan(program, "test_mp")
    learner, cacher, *readers = plan.executables
    assert cacher.description == "CacherNode(for CourierNode(Learner))"
    assert cacher.calls == (learner.name,) == ("learner[0]",)
    assert {reader.calls for reader in readers} == {("cacher[0]", "learner[0]")}
    assert "CacherNode(for CourierNode(Learner))" in str(plan)


def test_the_target_may_be_declared_only() -> None:
    program = lp.Program("declared")
    cacher = program.add_node(lp.CacherNode(program.declare("learner"), 1, 2), label="cacher")
    handle_of(program)
    program.add_node(lp.CourierNode(Reader, cacher, cacher), label="reader")
    first = lp.plan(program, "test_mt").executables[0]
    assert first.description == "CacherNode(for learner[0])"
    assert first.calls == ("learner[0]",)


def test_a_target_that_was_never_added_is_a_mistake() -> None:
    program = lp.Program("forgotten")
    program.add_node(lp.CacherNode(lp.CourierNode(Learner).create_handle(), 1, 2), label="cacher")
    with pytest.raises(lp.ProgramError, match="never added"):
        lp.plan(program, "test_mt")


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


def test_a_declared_node_that_serves_nothing_is_a_mistake_of_the_plan() -> None:
    program = lp.Program("silent")
    program.add_node(lp.CacherNode(program.declare("printer"), 1, 2), label="cacher")
    program.add_node(lp.PyNode(print), label="printer")
    with pytest.raises(lp.ProgramError, match="serves nothing"):
        lp.plan(program, "test_mt")


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((-1, 1), {}, "below 0"),
        ((0, -1), {}, "below 0"),
        ((math.nan, 1), {}, "below 0"),
        ((1, math.nan), {}, "below 0"),
        ((2, 1), {}, r"stale_after_ms=1 is below refresh_interval_ms=2"),
        ((1, 2), {"max_bytes": -1}, "less than nothing"),
        ((1, 2), {"max_entries": -1}, "less than nothing"),
        ((1, 2), {"courier_kwargs": {"thread_pool_size": 0}}, "at least 1"),
    ],
)
def test_numbers_that_contradict_are_refused(
    arguments: tuple[float, float], options: dict[str, Any], match: str
) -> None:
    handle = lp.CourierNode(Learner).create_handle()
    with pytest.raises(ValueError, match=match):
        lp.CacherNode(handle, *arguments, **options)


@pytest.mark.parametrize("arguments", [(), (1,), ("1", "2"), (None, 1)])
def test_arguments_of_the_wrong_kind_are_refused(arguments: Any) -> None:
    with pytest.raises(TypeError):
        lp.CacherNode(lp.CourierNode(Learner).create_handle(), *arguments)


@pytest.mark.parametrize("options", ["courier_kwargs", "courier_client_kwargs"])
def test_unknown_options_are_refused(options: str) -> None:
    given: dict[str, Any] = {options: {"nothing": 1}}
    with pytest.raises(TypeError, match="unknown option 'nothing'"):
        lp.CacherNode(lp.CourierNode(Learner).create_handle(), 1, 2, **given)


def test_times_may_be_equal_or_nothing() -> None:
    handle = lp.CourierNode(Learner).create_handle()
    for times in ((0, 0), (5, 5), (0, math.inf)):
        lp.CacherNode(handle, *times)


def test_it_cannot_be_configured_to_something_else() -> None:
    node = lp.CacherNode(lp.CourierNode(Learner).create_handle(), 1, 2)
    with pytest.raises(TypeError, match="declare"):
        node.configure(lp.CourierNode(Learner).create_handle())
