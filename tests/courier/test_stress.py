"""Clients whose threads, and servers, come and go at the same time."""

import concurrent.futures
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.by_hand import OPENING
from tests.courier.conftest import Serve, our_threads
from tests.courier.waiting import wait_until

_PATIENT = courier.Timing(epilogue_s=20.0)


class Object:
    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)

    def echo(self, *args: Any) -> Any:
        return args

    def slow(self, value: int) -> int:
        self.entered.release()
        courier.current_call().wait_cancelled(0.02)
        return value

    def patient(self) -> None:
        self.entered.release()
        courier.current_call().wait_cancelled(30)

    def count(self, start: int, end: int) -> Iterator[int]:
        yield from range(start, end)

    def endless(self) -> Iterator[int]:
        yield 0
        self.patient()


def _aside(function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    threads = concurrent.futures.ThreadPoolExecutor(1)
    future = threads.submit(function)
    threads.shutdown(wait=False)
    return future


@pytest.mark.parametrize("what", ["future", "generator"])
def test_what_one_thread_gives_up_wakes_the_one_that_waits_for_it(serve: Serve, what: str) -> None:
    obj = Object()
    _, client = serve(obj)
    if what == "future":
        future = client.futures.patient()
        wait, give_up = (lambda: future.exception(60)), future.cancel
    else:
        items = client.endless()
        assert next(items) == 0
        wait, give_up = (lambda: next(items, "end")), items.close
    assert obj.entered.acquire(timeout=20)
    waiting = _aside(wait)
    time.sleep(0.1)  # mostly it waits by now; if not, it must end as well
    give_up()
    with contextlib.suppress(courier.CallCancelledError):
        waiting.result(25)


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(our_threads())  # noqa: PTH208 - counted, not read


def test_a_client_that_nobody_closes_leaves_nothing_behind(
    serve: Serve, secret: courier.Secret
) -> None:
    server, _ = serve(Object(), thread_pool_size=2)

    def use() -> None:
        client: Any = courier.Client(server.address, secret=secret)
        assert client.echo(1) == (1,)
        assert client.futures.echo(2).result(20) == (2,)
        assert client.echo(np.zeros(100_000))[0].sum() == 0
        assert next(client.count(0, 1_000_000)) == 0

    use()
    gc.collect()
    before = _held()
    for _ in range(20):
        use()

    def is_given_back() -> bool:
        gc.collect()  # again: a thread of ours may only now let go of the last clients
        files, threads = _held()
        return files <= before[0] + 6 and threads <= before[1] + 2

    wait_until(is_given_back)


def test_servers_end_all_their_threads_at_whatever_moment_they_are_stopped(
    serve: Serve,
) -> None:
    before = our_threads()
    for _ in range(3):
        served = [serve(Object(), timing=_PATIENT) for _ in range(12)]
        for _, client in served:
            for number in range(9):  # known to be fast, so that a watch looks after it
                client.echo(number)
        for server, _ in served:
            time.sleep(0.003)  # their watches fall asleep one after the other
            assert server.stop(0) == []
    for _, client in served:
        courier.close(client)
    wait_until(lambda: not any(t.name == "courier-watch" for t in our_threads() - before))


def test_a_server_hangs_up_on_whoever_came_just_as_it_stopped(secret: courier.Secret) -> None:
    for number in range(200):
        server = courier.Server(Object(), secret=secret)
        server.start()
        # Comes at another moment of the stop each time.
        stopping = threading.Thread(target=_stop_after, args=(server, number % 20 * 2e-5))
        stopping.start()
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", server.port)) as guest,
        ):
            guest.settimeout(20)
            guest.sendall(OPENING)  # the kernel forgets whoever says nothing
            assert guest.recv(1) == b""
        stopping.join()


def _stop_after(server: courier.Server, pause_s: float) -> None:
    time.sleep(pause_s)
    server.stop(0)
