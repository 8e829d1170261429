"""Bytes that nobody meant: no harm is done, and nothing is unpickled before the proof."""

import contextlib
import os
import pickle
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import courier
from courier.values.parcel import Parcel
from courier.wire.frames import FrameReader, Kind, Layout, Region, encode
from courier.wire.handshake import HELLO_BYTES, LENGTH, MAGIC, PROOF_BYTES, ClientHandshake
from tests.courier.by_hand import OPENING, Visitor
from tests.courier.conftest import Meet, Serve
from tests.courier.fuzzing import (
    Target,
    Way,
    call_frame,
    feed,
    is_hung_up,
    joined,
    mutated,
    nothing_left,
    send_anyway,
    slam,
    small_heads,
)
from tests.courier.grpc_client import GrpcClient, pb

GOOD = pickle.dumps(((), {}))
#: Of what is drawn. The fast ones reach each line that any of them reaches.
_SEEDS = pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4, 5))]
)

# A server that is given junk


@pytest.fixture
def server(serve: Serve, target: Target, connect: Callable[..., Any]) -> Iterator[courier.Server]:
    """Answers old and new clients, during and after the test, as if nothing had happened."""
    server, client = serve(target, in_process="wire", client={"call_timeout": 20})
    assert client.alive() == "yes"
    # What an answer costs once only is not what strangers cost.
    Way(server, "tcp")
    GrpcClient(server.address, server.secret).close()
    with nothing_left():
        yield server
        assert client.alive() == "yes"
        with contextlib.closing(GrpcClient(server.address, server.secret)) as again:
            assert again.is_trusted
    assert connect(server.address, call_timeout=20).alive() == "yes"


@pytest.fixture(params=["tcp", "unix"])
def way(server: courier.Server, request: pytest.FixtureRequest) -> Way:
    return Way(server, request.param)


@_SEEDS
def test_junk_before_the_proof_does_no_harm(
    way: Way, target: Target, bomb: bytes, seed: int
) -> None:
    chance = random.Random(seed)
    own = OPENING
    for _ in range(12):
        hello = ClientHandshake(None).hello()
        bombs = call_frame(1, bomb)
        for junk in (
            chance.randbytes(chance.randrange(300)),
            own + bombs,
            own + hello[: chance.randrange(HELLO_BYTES)],
            own + hello + chance.randbytes(PROOF_BYTES) + bombs,
            own + hello + bombs * 3,
            mutated(own + hello + bytes(PROOF_BYTES) + bombs, chance),
            bytes((*own[:-1], chance.randrange(256))) + hello + bombs,
            bomb,
        ):
            with way.connect() as sock:
                send_anyway(sock, junk)
                if chance.random() < 0.2:
                    slam(sock)
    assert target.calls == 0


@_SEEDS
def test_junk_behind_the_proof_does_no_harm(way: Way, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        sock, seals = way.connect_proven()
        with sock:
            good = b"".join(call_frame(n, GOOD, seals=seals) for n in range(1, 4))
            send_anyway(
                sock,
                chance.choice(
                    (
                        chance.randbytes(chance.randrange(400)),
                        mutated(good[:30], chance) + good,
                        good + small_heads(chance),
                        good[: chance.randrange(len(good))],
                    )
                ),
            )
            if chance.random() < 0.3:
                slam(sock)


@pytest.mark.parametrize("arguments", [5, ((), {}, 1), (5, 5), ((), {1: 2})], ids=repr)
@pytest.mark.parametrize("is_fast", [False, True])
def test_arguments_of_a_wrong_shape_are_refused_as_such(
    server: courier.Server, connect: Callable[..., Any], arguments: Any, is_fast: bool
) -> None:
    # Fast methods run where they are read, which must not end the thread that reads.
    client = connect(server.address, call_timeout=20)
    for _ in range(50 * is_fast):
        client.hit()
    courier.close(client)
    way = Way(server, "unix")
    sock, _ = way.connect_proven()
    sock.settimeout(20)
    with sock:
        sock.sendall(call_frame(1, pickle.dumps(arguments)) + call_frame(2, GOOD))
        reader = FrameReader()
        got: set[int] = set()
        while len(got) < 2:
            got |= {frame.call for frame in feed(reader, [sock.recv(1 << 16)])}


def test_descriptors_of_a_stranger_are_not_kept(server: courier.Server) -> None:
    way = Way(server, "unix")
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read_end)
        for _ in range(10):
            with way.connect() as sock:
                sock.sendall(OPENING)
                with contextlib.suppress(OSError):
                    for _ in range(HELLO_BYTES - 1):
                        socket.send_fds(sock, [b"x"], [write_end] * 8)
        os.close(write_end)
        poll = select.poll()
        poll.register(read_end, select.POLLHUP)
        assert poll.poll(20_000), "the server keeps what a stranger passed to it"


def test_descriptors_that_belong_to_no_frame_go_with_their_connection(
    server: courier.Server,
) -> None:
    for _ in range(5):
        sock, seals = Way(server, "unix").connect_proven()
        frame = call_frame(1, GOOD, seals=seals)
        with sock, Path("/dev/null").open() as null:
            socket.send_fds(sock, [frame], [null.fileno()] * 20)
            sock.recv(1)


def test_what_cannot_be_shared_memory_is_refused(server: courier.Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    with (tmp_path / "file").open("r+b") as file, contextlib.ExitStack() as stack:
        stack.callback(os.close, unsealed)
        for descriptors in ([file.fileno()], [unsealed], []):
            for size in (8192, 1 << 40, 0):
                for number in (0, 1):
                    region = Region(number, size, is_new=True)
                    layout = Layout([region], [(1, 0)])
                    parcel = Parcel(GOOD, [memoryview(b"")])
                    sock, _ = Way(server, "unix").connect_proven()
                    with sock:
                        data = joined(encode(1, 1, parcel, meta=b"hit", layout=layout))
                        socket.send_fds(sock, [data], descriptors)
                        assert is_hung_up(sock)


@pytest.mark.parametrize("first", [MAGIC[:1], OPENING], ids=repr)
def test_peers_that_say_little_and_wait_keep_nobody_out(
    server: courier.Server, first: bytes
) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            sock.sendall(first)
        client = courier.Client(server.address, secret=server.secret, call_timeout=20)
        stack.callback(courier.close, client)
        began = time.monotonic()
        for _ in range(20):
            assert client.alive() == "yes"
        assert time.monotonic() - began < 10
        assert threading.active_count() < threads + 30


@pytest.mark.parametrize("ends", ["closes", "resets"])
def test_peers_that_die_in_the_middle_of_a_frame_leave_nothing(way: Way, ends: str) -> None:
    for size in (10, 30, 1 << 16, 3 << 20):
        for _ in range(4):
            sock, seals = way.connect_proven()
            frame = call_frame(1, bytes(4 << 20), seals=seals)
            send_anyway(sock, frame[:size])
            if ends == "closes":
                sock.close()
            else:
                slam(sock)


def test_a_peer_that_takes_no_answers_holds_up_nobody(way: Way) -> None:
    sock, seals = way.connect_proven()
    sock.settimeout(1)
    with sock:
        frames = b"".join(call_frame(n, GOOD, b"items", seals) for n in range(1, 200))
        send_anyway(sock, frames)
        with contextlib.ExitStack() as stack:
            client = courier.Client(way.server.address, secret=way.server.secret, call_timeout=20)
            stack.callback(courier.close, client)
            for _ in range(20):
                assert client.alive() == "yes"


# The front door of gRPC

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes(3) + b"\x04" + bytes(5)


@pytest.mark.parametrize("seed", range(3))
def test_junk_in_http2_does_no_harm(server: courier.Server, bomb: bytes, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        length = chance.randrange(64)
        frame = length.to_bytes(3, "big") + bytes((chance.randrange(12), chance.randrange(256)))
        frame += chance.randrange(9).to_bytes(4, "big") + chance.randbytes(length)
        for junk in (
            _PREFACE + chance.randbytes(200),
            _PREFACE + _SETTINGS + frame * 5,
            _PREFACE + _SETTINGS + bomb,
            mutated(_PREFACE + _SETTINGS, chance),
            b"P" + chance.randbytes(50),
            b"\x16\x03\x01" + chance.randbytes(80),
        ):
            with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
                send_anyway(sock, junk)
                if chance.random() < 0.3:
                    slam(sock)


@pytest.mark.parametrize("method", ["Hello", "Call", "Send", "Fetch", "Connect"])
def test_mutated_messages_are_refused(
    server: courier.Server, bomb: bytes, target: Target, method: str
) -> None:
    chance = random.Random(method)
    with contextlib.closing(GrpcClient(server.address, server.secret)) as wire:
        stream = wire.channel.stream_stream(f"/courier.v1.Courier/{method}")
        for number in range(40):
            good = wire.sealed(1 + number, GOOD)
            good.pickle = bomb
            written = good.SerializeToString()
            if method == "Send":
                written = pb.Piece(opening=good).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                list(stream(iter([mutated(written, chance)] * chance.choice((1, 2))), timeout=20))
    assert target.calls == 0


# A client whose server is none


def call_all_ways(client: Any) -> None:
    """Calls; nothing but our own errors may come of it, and it does not take for ever."""
    with contextlib.suppress(courier.CourierError):
        client.hit()
    future = client.futures.again()
    with contextlib.suppress(courier.CourierError):
        future.result(20)
    with contextlib.suppress(courier.CourierError):
        for _, item in zip(range(20), client.items(), strict=False):
            assert item is not None


def test_a_timeout_holds_against_a_server_that_says_a_byte_at_a_time(meet: Meet) -> None:
    def answer(visitor: Visitor) -> None:
        visitor.socket.sendall(LENGTH.pack(1 << 20))
        for _ in range(600):
            visitor.socket.sendall(b"\0")
            time.sleep(0.1)

    # The timeout is far below what an attempt may take, also where the machine is slow.
    timing = courier.Timing(attempt_s=60.0)
    with meet(answer, call_timeout=0.5, timing=timing) as client:
        over = threading.Event()
        began = time.monotonic()
        client.futures.hit().add_done_callback(lambda _: over.set())
        with pytest.raises(courier.CallTimeoutError):
            client.hit()
        assert over.wait(20)
        assert time.monotonic() - began < 20


@_SEEDS
def test_a_client_outlives_junk_of_a_proven_server(
    meet: Meet, secret: courier.Secret, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = [*(int(kind) for kind in Kind), 0, 99]
    value = pickle.dumps("fine")

    def answer(visitor: Visitor) -> None:
        visitor.greet(secret, idempotent=("again",))
        visitor.receive(1)
        for _ in range(30):
            number = chance.choice((0, 1, 1, 2, 3, 4, 1 << 63))
            data = chance.choice((value, value, b"", chance.randbytes(20), pickle.dumps((1, 2))))
            buffers = [memoryview(bytes(10))] * chance.choice((0, 0, 1, 3))
            frame = encode(chance.choice(kinds), number, Parcel(data, buffers), seals=visitor.seals)
            written = joined(frame)
            visitor.send([mutated(written, chance) if chance.random() < 0.05 else written])

    for _ in range(6):
        with meet(answer, call_timeout=2) as client:
            call_all_ways(client)
