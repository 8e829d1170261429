"""Whoever watches a server can ask it how it is, from outside and without its secret."""

import os
import signal
import threading

import pytest

import courier
from tests.courier.conftest import Reserve, Script, Serve
from tests.courier.fuzzing import descriptors
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_SERVER = """
with courier.Server(print, secret=secret) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


def test_a_server_is_healthy_while_it_says_so(serve: Serve, reserve: Reserve) -> None:
    there = {"port": reserve(), "share_port": True}
    address = f"127.0.0.1:{there['port']}"
    for _ in range(2):  # also one that comes back
        for _ in range(3):
            assert not courier.is_healthy(address, 20)
        server, _ = serve(print, **there)
        assert courier.is_healthy(address, 20)
        server.set_healthy(False)
        assert not courier.is_healthy(address, 20)
        server.set_healthy(True)
        assert courier.is_healthy(address, 20)
        server.stop()


def test_a_server_whose_handlers_are_all_busy_is_healthy(serve: Serve, node: Node) -> None:
    server, client = serve(node, thread_pool_size=2)
    futures = [client.futures.block() for _ in range(50)]
    node.await_calls(2)
    assert courier.is_healthy(server.address, 20)
    node.release.set()
    for future in futures:
        future.result(20)


def test_a_stopped_process_is_not_healthy_until_it_goes_on(script: Script) -> None:
    process = script(_SERVER)
    address = process.line()
    assert courier.is_healthy(address, 20)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not courier.is_healthy(address, 0.3)
    process.send_signal(signal.SIGCONT)
    assert courier.is_healthy(address, 20)


def test_checks_leave_nothing_behind(serve: Serve) -> None:
    server, _ = serve(print)

    def held() -> tuple[int, int]:
        return len(descriptors()), threading.active_count()

    def check() -> None:
        for _ in range(20):
            assert courier.is_healthy(server.address, 20)

    check()  # what is made once
    fds, threads = held()
    for _ in range(5):
        check()
    # A connection is closed a moment after its channel; 100 of them would show.
    wait_until(lambda: held()[0] <= fds + 10 and held()[1] <= threads + 10)


@pytest.mark.parametrize(
    ("address", "timeout_s"), [("nowhere", 1), ("127.0.0.1:1", 0), ("127.0.0.1:1", float("nan"))]
)
def test_a_senseless_question_is_refused(address: str, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"host:port|time"):
        courier.is_healthy(address, timeout_s)
