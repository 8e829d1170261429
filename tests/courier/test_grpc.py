"""Any gRPC client is served, at the same port and with the same promises."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import courier
from tests.courier.conftest import Script, Serve
from tests.courier.grpc_client import GrpcClient, Refused, health, refused
from tests.courier.served import Node
from tests.courier.waiting import wait_until

Code = grpc.StatusCode


Reach = Callable[..., GrpcClient]


@pytest.fixture
def reach(secret: courier.Secret) -> Iterator[Reach]:
    with contextlib.ExitStack() as stack:

        def connect(server: courier.Server, known: courier.Secret | None = secret) -> GrpcClient:
            client = GrpcClient(server.address, known)
            stack.callback(client.close)
            return client

        yield connect


@pytest.fixture
def client(serve: Serve, reach: Reach, node: Node) -> GrpcClient:
    server, _ = serve(node)
    server.bind("arrays", _arrays)
    server.bind("lock", threading.Lock)
    client = reach(server)
    assert client.is_trusted
    return client


def test_a_peer_that_comes_by_ipv4_is_shown_so_by_a_server_for_both(
    serve: Serve, reach: Reach
) -> None:
    server, _ = serve(lambda: courier.current_call().peer, host="::", advertised_host="127.0.0.1")
    assert str(reach(server).call("__call__")).startswith("127.0.0.1:")


def _arrays(end: int, size: int) -> Iterator[Any]:
    for number in range(end):
        yield np.full(size, number)


@pytest.mark.parametrize("count", [10, 100_000, 700_000, 3_000_000])
def test_arguments_and_results_of_any_size_travel(client: GrpcClient, count: int) -> None:
    sent = np.arange(count, dtype=np.float64)
    received = client.call("echo", sent)
    assert np.array_equal(received, sent)
    assert received.flags.writeable
    many = [sent[start::7] for start in range(7)]
    assert all(map(np.array_equal, client.call("echo", many), many))


@pytest.mark.parametrize(("end", "size"), [(0, 1), (5, 1), (300, 1), (4, 1_000_000)])
def test_a_generator_is_fetched_item_by_item(client: GrpcClient, end: int, size: int) -> None:
    items = client.call("arrays", end, size)
    assert [(len(item), item[-1]) for item in items] == [(size, number) for number in range(end)]


def test_a_generator_that_fails_says_so_behind_its_items(client: GrpcClient) -> None:
    items = client.call("fail_later")
    assert next(items) == 1
    with pytest.raises(KeyError, match="in mid-stream"):
        next(items)


def test_a_generator_whose_reader_leaves_is_closed(client: GrpcClient, node: Node) -> None:
    items = client.call("count", 1_000_000)
    assert next(items) == 0
    client.close()
    assert node.generator_ended.wait(20)


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [
        ("nothing", "UNKNOWN_METHOD", "echo"),
        ("lock", "UNPICKLABLE", "lock"),
        ("_private", "UNKNOWN_METHOD", "_private"),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(
    client: GrpcClient, method: str, kind: str, text: str
) -> None:
    with pytest.raises(Refused, match=text) as caught:
        client.call(method)
    assert caught.value.kind == kind


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small", "in pieces"])
def test_a_full_server_says_that_it_is_busy(
    serve: Serve, reach: Reach, node: Node, size: int
) -> None:
    server, ours = serve(node, thread_pool_size=1, queue_size=1)
    client = reach(server)
    array = np.zeros(size)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(client.call, "block", array)]
        wait_until(lambda: node.calls or futures[0].done())
        assert node.calls, futures[0].exception()
        futures.append(ours.futures.block(array))
        wait_until(lambda: server.handlers.has_waiting)
        with refused(Code.RESOURCE_EXHAUSTED):
            client.call("block", array)
        assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
        node.release.set()
        assert [future.result(20) for future in futures] == ["released", "released"]


@pytest.mark.slow
def test_a_deadline_is_seen_by_the_handler(client: GrpcClient, node: Node) -> None:
    for _ in range(10):
        with refused(Code.DEADLINE_EXCEEDED):
            client.call("hang", timeout=3)
        # A busy machine may use up all of the time before the handler runs.
        if node.calls:
            break
    assert node.cancelled.wait(20)


def test_a_client_that_leaves_is_noticed_by_the_handler(client: GrpcClient, node: Node) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(client.call, "hang")
        assert node.entered.acquire(timeout=20)
        client.close()
        assert node.cancelled.wait(20)
        assert future.exception(20) is not None


def test_who_has_an_answer_is_not_waited_for(serve: Serve, reach: Reach, node: Node) -> None:
    server, _ = serve(node)
    client = reach(server)
    assert client.call("echo", 1) == 1
    assert len(client.call("apply", np.zeros, 1_000_000)) == 1_000_000
    assert len(list(client.call("count", 3))) == 3
    next(client.call("count", 1_000_000))
    client.close()
    began_at = time.monotonic()
    assert server.stop(60) == []
    assert time.monotonic() - began_at < 30


def test_stop_lets_running_calls_end(serve: Serve, reach: Reach, node: Node) -> None:
    server, _ = serve(node)
    client = reach(server)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        future = threads.submit(client.call, "block")
        assert node.entered.acquire(timeout=20)
        stopping = threads.submit(server.stop, 20)
        wait_until(lambda: not server.has_started)
        node.release.set()
        assert future.result(20) == "released"
        assert stopping.result(30) == []


@pytest.mark.slow
def test_stop_keeps_its_deadline_though_calls_run(serve: Serve, reach: Reach, node: Node) -> None:
    server, _ = serve(node, timing=courier.Timing(epilogue_s=5.0))
    client = reach(server)
    items = client.call("count", 1_000_000)
    next(items)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        patient, stuck = (threads.submit(client.call, "hang"), threads.submit(client.call, "block"))
        for _ in range(2):
            assert node.entered.acquire(timeout=20)
        begun_at = time.monotonic()
        assert [name[:15] for name in server.stop(0.3)] == ["courier-handler"]
        assert time.monotonic() - begun_at < 20
        for future in (patient, stuck):
            assert isinstance(future.exception(20), grpc.RpcError)
        node.release.set()
    assert node.generator_ended.wait(20)
    with pytest.raises(grpc.RpcError):
        list(items)


def test_the_health_service_says_what_the_server_says(serve: Serve, node: Node) -> None:
    states = health_pb2.HealthCheckResponse
    server, _ = serve(node)
    server.set_healthy(False)
    assert health(server.address) == states.NOT_SERVING
    server.set_healthy(True)
    assert health(server.address) == states.SERVING
    server.stop(0)
    with refused(Code.UNAVAILABLE):
        health(server.address)


_LAZY = """
server = courier.Server(lambda: "grpc" in sys.modules, secret=secret, in_process="wire")
server.start()
client = courier.Client(server.address, secret=secret)
client(), client.futures().result()
print(client(), server.address, flush=True)
sys.stdin.readline()
print(client(), flush=True)
courier.close(client)
server.stop()
"""


def test_grpc_is_loaded_when_the_first_grpc_client_comes(
    script: Script, secret: courier.Secret
) -> None:
    process = script(_LAZY)
    loaded, address = process.line().split()
    assert loaded == "False"
    client = GrpcClient(address, secret)
    assert client.call("__call__") is True
    client.close()
    assert process.output("\n") == "True"
