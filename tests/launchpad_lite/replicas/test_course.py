"""Where a training goes on after a restart."""

import pytest

from launchpad_lite import replicas
from launchpad_lite.replicas._state import Course, LoopPlace


def test_calls_of_code_that_begins_are_numbered_and_begin_from_their_start() -> None:
    course = Course()
    assert [course.enter("run") for _ in range(2)] == [LoopPlace("run", 1), LoopPlace("run", 2)]
    assert course.places == [LoopPlace("run", 2)]


def test_of_the_calls_before_a_restart_the_last_one_goes_on() -> None:
    course = Course([LoopPlace("run", 2, made=7)])
    assert course.enter("run").is_over
    assert course.enter("run") == LoopPlace("run", 2, made=7)
    assert course.enter("run") == LoopPlace("run", 3)


def test_a_call_that_was_left_does_not_go_on() -> None:
    assert Course([LoopPlace("run", 1, made=7, is_over=True)]).enter("run").is_over


def test_calls_are_numbered_in_each_epoch() -> None:
    course = Course()
    loop = course.enter("epochs")
    for epoch in range(2):
        with course.in_loop():
            assert [course.enter("run").number for _ in range(2)] == [1, 2]
            assert course.name == f"call 1, epoch {epoch}, call 2"
            course.end_epoch(loop)
    assert course.enter("run").number == 2
    assert course.places == [LoopPlace("run", 2)]


def test_only_the_epoch_that_was_interrupted_goes_on() -> None:
    course = Course([LoopPlace("epochs", 1, made=3), LoopPlace("run", 2, made=7)])
    loop = course.enter("epochs")
    assert loop.made == 3
    with course.in_loop():
        assert course.enter("run").is_over
        assert course.enter("run").made == 7
        course.end_epoch(loop)
    with course.in_loop():
        assert course.enter("run") == LoopPlace("run", 1)
    assert course.places == [LoopPlace("epochs", 1, made=4), LoopPlace("run", 1)]


def test_a_checkpoint_of_other_code_is_refused() -> None:
    with pytest.raises(replicas.ReplicaError, match=r"call 1 is repl.epochs, but was repl.run"):
        Course([LoopPlace("run", 1)]).enter("epochs")
