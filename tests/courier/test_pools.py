import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from courier._pool import HandlerPool
from tests.courier.waiting import wait_until

Make = Callable[..., HandlerPool]


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[HandlerPool] = []

    def make(size: int, queue_size: int = 1_000, **options: Any) -> HandlerPool:
        pools.append(HandlerPool("courier-test", size, queue_size, **options))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.stop(20) == []


def test_tasks_one_after_another_reuse_a_thread_and_leave_when_idle(make: Make) -> None:
    pool = make(4, idle_s=0.05)
    names = {pool.submit(lambda: threading.current_thread().name).result(20) for _ in range(3)}
    assert names <= {"courier-test-1", "courier-test-2", "courier-test-3"}
    wait_until(lambda: not any(t.name.startswith("courier-test") for t in threading.enumerate()))
    assert pool.submit(int, 5).result(20) == 5


def test_what_does_not_fit_is_not_taken(make: Make) -> None:
    release = threading.Event()
    pool = make(2, 1)
    blocked = [pool.submit(release.wait, 20) for _ in range(3)]
    assert pool.try_submit(int) is None
    anyway = pool.submit(int)
    release.set()
    assert anyway.result(20) == 0
    assert all(future.result(20) for future in blocked)
    taken = pool.try_submit(int)
    assert taken is not None
    assert taken.result(20) == 0


def test_a_guest_counts_as_one_of_the_pool_and_comes_behind_those_who_wait(make: Make) -> None:
    pool = make(1)
    release = threading.Event()
    assert pool.enter()
    assert not pool.enter()
    waiting = pool.submit(release.wait, 20)
    assert not waiting.running()
    pool.leave()
    wait_until(waiting.running)
    assert not pool.enter()
    release.set()
    assert waiting.result(20)
    wait_until(lambda: pool.is_idle)
    assert pool.enter()
    assert pool.stop(0.05) == ["courier-test-guest"]
    pool.leave()
    assert not pool.enter()


def test_stop_cancels_what_waits_and_names_what_runs(make: Make) -> None:
    release = threading.Event()
    pool = make(1)
    running = pool.submit(release.wait, 20)
    wait_until(running.running)
    waiting = pool.submit(int)
    assert pool.stop(0.05) == ["courier-test-1"]
    for future in (waiting, pool.submit(int), pool.submit(int)):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(20)
    release.set()
    assert running.result(20)
