"""Where something in between lets only gRPC through, all works as elsewhere."""

import concurrent.futures
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from tests.courier.conftest import Serve
from tests.courier.served import Node

_CONNECT = "/courier.v1.Courier/Connect"
#: However slow the machine is: after a few attempts in vain a call is given up.
_PATIENT = courier.Timing(probe_s=10.0, grpc_attempt_s=20.0)


class StreamProxy:
    """A gRPC server that knows nothing but to pass the bytes of one stream on."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._threads = concurrent.futures.ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads)
        handler = grpc.stream_stream_rpc_method_handler(self._pass_on)
        service, method = _CONNECT.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _pass_on(self, pieces: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        connect: Any = self._channel.stream_stream(_CONNECT)
        behind = connect(pieces)
        context.add_callback(behind.cancel)
        with contextlib.suppress(grpc.RpcError):
            yield from behind

    def close(self) -> None:
        """Dies, and takes its streams along."""
        self._server.stop(None).wait()
        self._channel.close()
        self._threads.shutdown()


class PickyFront:
    """Passes connections on whose first byte is gRPC's, and hangs up on all others."""

    def __init__(self, address: str) -> None:
        self._behind = address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                if sock.recv(1, socket.MSG_PEEK) != b"P":
                    sock.close()
                    continue
                behind = socket.create_connection((self._behind[0], int(self._behind[2])))
                for source, target in ((sock, behind), (behind, sock)):
                    self._sockets.put(source)
                    thread = threading.Thread(target=_copy, args=(source, target))
                    thread.start()
                    self._threads.append(thread)

    def close(self) -> None:
        """Dies, and takes its connections along."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(20)
        sockets = [self._sockets.get() for _ in range(self._sockets.qsize())]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(20)
        for sock in sockets:
            sock.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _arrays(end: int, size: int) -> Iterator[Any]:
    for number in range(end):
        yield np.full(size, number)


@pytest.fixture(params=[StreamProxy, PickyFront])
def proxy(request: Any, serve: Serve, node: Node) -> Iterator[Any]:
    server, _ = serve(node)
    server.bind("arrays", _arrays)
    proxy = request.param(server.address)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: Any, connect: Callable[..., Any]) -> Any:
    return connect(proxy.address, call_timeout=60, timing=_PATIENT)


def test_calls_futures_exceptions_and_arrays_pass(client: Any) -> None:
    assert client.echo("here") == "here"
    futures = [client.futures.echo(number) for number in range(200)]
    assert [future.result(20) for future in futures] == list(range(200))
    with pytest.raises(KeyError, match="as asked"):
        client.fail()
    array = np.arange(3_000_000, dtype=np.float64)
    assert np.array_equal(client.echo(array), array)


def test_generators_pass_and_wait_for_their_reader(client: Any) -> None:
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
    proxy: Any, client: Any, node: Node
) -> None:
    future, items = client.futures.hang(), client.arrays(1_000_000, 10_000)
    next(items)
    node.await_calls()
    proxy.close()
    assert isinstance(future.exception(20), courier.ServerLostError)
    with pytest.raises(courier.ServerLostError):
        list(items)
    assert node.cancelled.wait(20)


def test_another_secret_is_refused_there_too(proxy: Any, connect: Callable[..., Any]) -> None:
    client = connect(
        proxy.address, secret=courier.Secret.generate(), call_timeout=20, timing=_PATIENT
    )
    with pytest.raises(courier.AuthenticationError, match=proxy.address):
        client.echo(1)
