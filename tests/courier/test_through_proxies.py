"""Where something in between lets only gRPC through, all works as elsewhere."""

import concurrent.futures
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from tests.courier.by_hand import Visitor, answered_by_hand, relay
from tests.courier.conftest import Connect, Serve
from tests.courier.served import Node

_CONNECT = "/courier.v1.Courier/Connect"
#: However slow the machine is: after a few attempts in vain a call is given up.
_PATIENT = courier.Timing(probe_s=10.0, grpc_attempt_s=20.0)


@contextlib.contextmanager
def stream_proxy(address: str) -> Iterator[str]:
    """A gRPC server that knows nothing but to pass the bytes of one stream on."""

    def pass_on(pieces: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        connect: Any = channel.stream_stream(_CONNECT)
        behind = connect(pieces)
        context.add_callback(behind.cancel)
        with contextlib.suppress(grpc.RpcError):
            yield from behind

    handler = grpc.stream_stream_rpc_method_handler(pass_on)
    service, method = _CONNECT.strip("/").split("/")
    handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
    with (
        grpc.insecure_channel(address) as channel,
        concurrent.futures.ThreadPoolExecutor(16) as threads,
    ):
        server = grpc.server(threads, handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@contextlib.contextmanager
def picky_front(address: str) -> Iterator[str]:
    """Passes connections on whose first byte is gRPC's, and hangs up on all others."""

    def treat(visitor: Visitor) -> None:
        if visitor.socket.recv(1, socket.MSG_PEEK) == b"P":
            relay(visitor.socket, address)

    with answered_by_hand(treat) as there:
        yield there


def _arrays(end: int, size: int) -> Iterator[Any]:
    for number in range(end):
        yield np.full(size, number)


@pytest.fixture
def proxy() -> Iterator[contextlib.ExitStack]:
    """Dies, and takes its connections along, when it is closed."""
    with contextlib.ExitStack() as proxy:
        yield proxy


@pytest.fixture(params=[stream_proxy, picky_front])
def client(
    request: Any, proxy: contextlib.ExitStack, serve: Serve, connect: Connect, node: Node
) -> Any:
    server, _ = serve(node)
    server.bind("arrays", _arrays)
    address = proxy.enter_context(request.param(server.address))
    return connect(address, call_timeout=60, timing=_PATIENT)


def test_calls_futures_exceptions_arrays_and_generators_pass(client: Any) -> None:
    assert client.echo("here") == "here"
    futures = [client.futures.echo(number) for number in range(200)]
    assert [future.result(20) for future in futures] == list(range(200))
    with pytest.raises(KeyError, match="as asked"):
        client.fail()
    array = np.arange(3_000_000, dtype=np.float64)
    assert np.array_equal(client.echo(array), array)
    for end, size in ((500, 1), (6, 1_000_000)):
        assert [item[-1] for item in client.arrays(end, size)] == list(range(end))
    items = client.arrays(1_000_000, 10_000)
    assert [len(next(items)) for _ in range(20)] == [10_000] * 20
    items.close()
    assert client.echo(1) == 1


def test_a_handler_notices_a_cancelled_call_and_a_closed_client(client: Any, node: Node) -> None:
    future = client.futures.hang()
    node.await_calls()
    future.cancel()
    assert node.cancelled.wait(20)
    node.cancelled.clear()
    future = client.futures.hang()
    node.await_calls()
    courier.close(client)
    assert node.cancelled.wait(20)
    with pytest.raises(courier.CallCancelledError):
        future.result(20)


def test_a_proxy_that_dies_loses_the_calls_on_their_way(
    proxy: contextlib.ExitStack, client: Any, node: Node
) -> None:
    future, items = client.futures.hang(), client.arrays(1_000_000, 10_000)
    next(items)
    node.await_calls()
    proxy.close()
    assert isinstance(future.exception(20), courier.ServerLostError)
    with pytest.raises(courier.ServerLostError):
        list(items)
    assert node.cancelled.wait(20)
