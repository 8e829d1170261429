"""What gRPC gets of strangers: little, and not for long."""

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given, strategies as st

import courier
from courier._proto import courier_pb2 as pb
from courier.grpc.server import FrontDoor
from courier.server import relay
from courier.server.relay import GrpcRelay, Scale
from courier.wire.handshake import HTTP2_PREFACE
from courier.wire.place import ABSTRACT
from tests.courier.by_hand import connected
from tests.courier.conftest import Serve
from tests.courier.fuzzing import is_hung_up, send_anyway
from tests.courier.grpc_client import GrpcClient, health, refused
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6


def _frame(kind: int, stream: int = 0, body: bytes = b"", flags: int = 0) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body
    )


_OPENING = HTTP2_PREFACE + _frame(_SETTINGS)


def _request(number: int, method: str = "Call") -> bytes:
    """Returns the frame that begins a request, as a peer without compression writes it."""

    def text(value: str) -> bytes:
        return bytes((len(value),)) + value.encode()

    # RFC 7541: indexed fields; literals with an indexed name; one literal with a name of its own.
    block = b"\x83\x86\x04" + text(f"/courier.v1.Courier/{method}") + b"\x01" + text("x")
    block += b"\x0f\x10" + text("application/grpc") + b"\x00" + text("te") + text("trailers")
    return _frame(_HEADERS, 2 * number + 1, block, flags=4)


@given(
    st.lists(st.tuples(st.sampled_from([_DATA, _HEADERS, _SETTINGS, _PING]), st.binary())),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_a_scale_counts_bytes_and_frames_however_they_come(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    written, weight = HTTP2_PREFACE, 0
    for kind, body in frames:
        written += _frame(kind, 1, body)
        weight += relay._DATA_WEIGHT if kind == _DATA else relay._FRAME_WEIGHT
    scale, rest, weighed = Scale(is_tls=False), written, 0
    for size in itertools.cycle(cuts):
        weighed += scale.weigh(rest[:size])
        rest = rest[size:]
        if not rest:
            break
    assert weighed == len(written) + weight


@pytest.fixture
def server(serve: Serve) -> courier.Server:
    server, _ = serve(Node())
    server.bind("peer", lambda: courier.current_call().peer)
    return server


@pytest.fixture
def strangers() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_strangers_who_stay_lock_nobody_out_and_hold_no_thread(
    server: courier.Server, secret: courier.Secret, strangers: contextlib.ExitStack
) -> None:
    with contextlib.closing(GrpcClient(server.address, secret)) as before:
        assert before.call("echo", 1) == 1
        threads, files = threading.active_count(), psutil.Process().num_fds()
        crowd = [strangers.enter_context(connected(server.address)) for _ in range(300)]
        inside = server._grpc._relay._strangers
        for number, stranger in enumerate(crowd, 1):
            stranger.sendall(_OPENING)
            if number <= relay._MAX_STRANGERS:  # of a flood, some would be turned away
                wait_until(lambda number=number: len(inside) >= number)
        assert is_hung_up(crowd[0])
        assert health(server.address, waits=True) == health_pb2.HealthCheckResponse.SERVING
        with contextlib.closing(GrpcClient(server.address, secret)) as after:
            assert after.call("echo", 2) == 2
        assert before.call("echo", 3) == 3
        assert threading.active_count() <= threads + 2
        # Of each: ours here, the port's, both ends of the way to gRPC.
        assert psutil.Process().num_fds() < files + len(crowd) + 3 * relay._MAX_STRANGERS + 30


def test_patience_ends_for_strangers_only(
    server: courier.Server,
    secret: courier.Secret,
    strangers: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", 0.3)
    with contextlib.closing(GrpcClient(server.address, secret)) as proven:
        peer = proven.call("peer")
        assert is_hung_up(_stranger(server, strangers, _OPENING))
        assert proven.call("peer") == peer  # the same connection


def _stranger(
    server: courier.Server, strangers: contextlib.ExitStack, data: bytes
) -> socket.socket:
    sock = strangers.enter_context(connected(server.address))
    sock.sendall(data)
    return sock


@pytest.mark.parametrize("method", ["Hello", "Call", "Send", "Fetch", "Connect"])
def test_little_is_taken_of_what_a_stranger_sends(
    server: courier.Server, strangers: contextlib.ExitStack, method: str
) -> None:
    assert health(server.address)  # gRPC is there
    used = psutil.Process().memory_info().rss
    for _ in range(4):
        stranger = _stranger(server, strangers, _OPENING + _request(0, method))
        stranger.settimeout(0.1)
        message = b"\0" + (1 << 30).to_bytes(4, "big") + bytes(1 << 14)
        with contextlib.suppress(OSError):  # nothing more is taken, or it is hung up on
            for _ in range(1 << 12):
                stranger.sendall(_frame(_DATA, 1, message[: 1 << 14]))
    assert psutil.Process().memory_info().rss - used < 32 << 20


def test_requests_of_which_nothing_comes_hold_no_handler(
    serve: Serve, node: Node, secret: courier.Secret, strangers: contextlib.ExitStack
) -> None:
    server, ours = serve(node, thread_pool_size=1)
    for method in ("Hello", "Call", "Send", "Fetch", "Connect"):
        _stranger(server, strangers, _OPENING + b"".join(_request(n, method) for n in range(100)))
    future = ours.futures.block()
    node.await_calls()
    node.release.set()
    assert future.result(_PATIENCE_S) == "released"
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        assert client.call("block") == "released"


def test_of_a_stranger_who_sends_too_much_no_more_is_read(
    server: courier.Server, strangers: contextlib.ExitStack
) -> None:
    assert health(server.address)
    inside = server._grpc._relay
    wait_until(lambda: not inside._weight)
    stranger = _stranger(server, strangers, _OPENING)
    # Requests; gRPC itself hangs up on who sends many pings.
    enough = relay._MAX_WEIGHT // relay._FRAME_WEIGHT
    for number in range(enough):
        send_anyway(stranger, _request(number))
    wait_until(lambda: inside._weight > relay._MAX_WEIGHT)
    weight = inside._weight
    send_anyway(stranger, _request(enough))
    time.sleep(0.1)
    assert inside._weight == weight


def test_a_client_may_begin_with_much_before_grpc_has_looked_at_its_proof(
    server: courier.Server, secret: courier.Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FrontDoor._send

    async def send(*args: Any) -> bytes:
        await asyncio.sleep(0.2)
        return await real(*args)

    monkeypatch.setattr(FrontDoor, "_send", send)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        assert client.call("echo", bytes(16 << 20)) == bytes(16 << 20)


def test_of_all_strangers_who_sent_the_most_is_hung_up(
    server: courier.Server, strangers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_MAX_WEIGHT_OF_ALL", 10 * relay._FRAME_WEIGHT)
    assert health(server.address)
    wait_until(lambda: not server._grpc._relay._weight)
    few = _stranger(server, strangers, _OPENING)
    many = _stranger(server, strangers, _OPENING + 7 * _frame(_PING, 0, bytes(8)))
    wait_until(lambda: server._grpc._relay._weight > 9 * relay._FRAME_WEIGHT)
    few.sendall(2 * _frame(_PING, 0, bytes(8)))
    assert is_hung_up(many)
    wait_until(lambda: server._grpc._relay._weight < 9 * relay._FRAME_WEIGHT)
    few.sendall(_frame(_PING, 0, bytes(8)))
    assert few.recv(1)


def test_many_may_begin_at_once_on_one_connection(
    server: courier.Server, secret: courier.Secret
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        hello = channel.unary_unary("/courier.v1.Courier/Hello")
        request = pb.HelloRequest(nonce=bytes(32)).SerializeToString()
        for future in [hello.future(request, timeout=_PATIENCE_S) for _ in range(100)]:
            assert pb.HelloReply.FromString(future.result()).session


def test_a_message_that_is_too_large_is_refused(
    server: courier.Server, secret: courier.Secret
) -> None:
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        assert client.call("echo", bytes(1 << 20)) == bytes(1 << 20)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            client.unary(pb.Sealed(pickle=bytes(3 << 20)).SerializeToString(), timeout=20)
        assert client.call("echo", 1) == 1


def test_no_more_come_in_than_grpc_sees_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_MAX_STRANGERS", 2)
    grpc_ends: list[socket.socket] = []
    clients: list[socket.socket] = []

    def reach() -> tuple[socket.socket, str]:
        inner, there = socket.socketpair()
        grpc_ends.append(there)
        return inner, str(len(grpc_ends))

    async def come(relaying: GrpcRelay) -> socket.socket:
        client, outer = socket.socketpair()
        clients.append(client)
        client.setblocking(False)
        relaying.take(outer, HTTP2_PREFACE, "a client")
        await asyncio.sleep(0.05)
        return client

    def is_out(client: socket.socket) -> bool:
        try:
            return client.recv(1) == b""
        except BlockingIOError:
            return False

    async def play() -> None:
        relaying = GrpcRelay(is_tls=False)
        relaying.open(reach)
        first, second, third, fourth = [await come(relaying) for _ in range(4)]
        assert is_out(first)
        assert is_out(second)
        assert not is_out(third)
        assert not is_out(fourth)
        assert is_out(await come(relaying))  # the first two have not left yet
        assert not is_out(third)
        grpc_ends[0].close()
        await asyncio.sleep(0.05)
        assert not is_out(await come(relaying))
        assert is_out(third)
        for each in grpc_ends:
            each.close()
        await relaying.stop()

    asyncio.run(asyncio.wait_for(play(), _PATIENCE_S))
    for client in clients:
        client.close()


@pytest.mark.skipif(not ABSTRACT, reason="gRPC listens at a port of loopback here")
def test_only_the_port_leads_to_grpc(server: courier.Server) -> None:
    assert health(server.address)
    lines = Path("/proc/net/unix").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if line.endswith("/grpc")}
    assert paths
    for path in paths:
        with (
            socket.socket(socket.AF_UNIX) as sock,
            pytest.raises((FileNotFoundError, NotADirectoryError)),
        ):
            sock.connect(path)
