"""Functions that run one after the other, while those who wait hold no thread."""

import contextvars
import threading

import pytest

from launchpad_lite.engines._servers import Turns


def test_a_function_that_finds_nobody_runs_in_the_thread_of_its_caller() -> None:
    turns = Turns()
    assert turns.run(threading.get_ident).result(0) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 / 0).result(0)
    assert turns.run(int, "7").result(0) == 7


def test_others_wait_without_a_thread_and_run_in_their_order_one_at_a_time() -> None:
    turns, begun, goes_on = Turns(), threading.Event(), threading.Event()
    name = contextvars.ContextVar("name", default="nobody")
    told: list[object] = []

    def hold() -> None:
        begun.set()
        goes_on.wait()

    holder = threading.Thread(target=turns.run, args=(hold,))
    holder.start()
    begun.wait()
    waiting = []
    for number in range(50):
        name.set(f"caller {number}")
        waiting.append(turns.run(lambda: told.append(name.get())))
    failing = turns.run(lambda: 1 / 0)
    assert not told
    assert not any(each.done() for each in waiting)
    goes_on.set()
    assert isinstance(failing.exception(10), ZeroDivisionError)
    assert told == [f"caller {number}" for number in range(50)]
    holder.join()


def test_many_threads_run_theirs_one_at_a_time() -> None:
    turns, busy = Turns(), threading.Lock()

    def alone() -> bool:
        if not busy.acquire(blocking=False):
            return False
        busy.release()
        return True

    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.extend(turns.run(alone).result(10) for _ in range(200))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 1600
