"""Bytes that nobody meant: no harm is done, and nothing is unpickled before the proof."""

import contextlib
import json
import os
import pickle
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import assume, given, settings, strategies as st

import courier
from courier._engine import frames as protocol
from courier._engine.frames import Frame, FrameReader, Kind, Layout, Region, Seals, encode
from courier._engine.handshake import (
    HELLO_BYTES,
    LENGTH,
    MAGIC,
    NAME_BYTES,
    NO_NAME,
    PROOF_BYTES,
    ClientHandshake,
    Introduction,
    Purpose,
    ServerHandshake,
    prefix,
    read_prefix,
)
from courier._parcel import Parcel
from courier._proto import courier_pb2 as pb
from tests.courier.by_hand import Visitor, answered_by_hand
from tests.courier.conftest import Serve
from tests.courier.fuzzing import (
    Way,
    call_frame,
    cut,
    feed,
    is_hung_up,
    joined,
    mutated,
    nothing_left,
    resident_bytes,
    send_anyway,
    slam,
)
from tests.courier.test_security import Wire

KEY = bytes(range(32))
GOOD = pickle.dumps(((), {}))
_HEADER = "<BBHIQQ"
HEADER_BYTES = 24

# (a) What was encoded comes out, however it is cut


class FakeMemory:
    """Shared memory that is none: regions by their number."""

    def __init__(self) -> None:
        self.regions: dict[int, bytes] = {}

    def map(self, regions: Sequence[Region]) -> list[memoryview]:
        if any(region.number not in self.regions for region in regions):
            raise courier.ProtocolError("an unknown region")
        return [memoryview(self.regions[region.number]) for region in regions]


Message = tuple[int, int, bytes, Parcel, Layout | None]
#: Small ones, and those around the sizes at which the reader changes its ways.
_SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from((1 << 15, (1 << 16) - 24, 1 << 16, (1 << 16) + 1, 100_000)),
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    size = draw(_SIZES)
    return random.Random(draw(st.integers(0, 1 << 16))).randbytes(size)


@st.composite
def messages(draw: st.DrawFn, memory: FakeMemory | None = None) -> Message:
    buffers = draw(st.lists(contents(), max_size=4))
    layout: Layout | None = None
    if memory is not None and buffers:
        whole = b"".join(buffers)
        number = draw(st.integers(0, 3))
        number = number and len(memory.regions) * 4 + number
        size = len(whole) + draw(st.integers(0, 9))
        memory.regions[number] = whole.ljust(size, b"\0")
        places: list[tuple[int, int] | None] = []
        at = 0
        for buffer in buffers:
            places.append((1, at) if draw(st.booleans()) else None)
            at += len(buffer)
        layout = Layout([Region(number, size, draw(st.booleans()))], places)
    return (
        draw(st.integers(0, 255)),
        draw(st.integers(0, (1 << 64) - 1)),
        draw(st.one_of(st.binary(max_size=40), st.sampled_from((bytes(65535),)))),
        Parcel(draw(contents()), [memoryview(buffer) for buffer in buffers]),
        layout,
    )


def write(message: Message, seals: Seals | None = None) -> bytes:
    kind, call, meta, parcel, layout = message
    return joined(encode(kind, call, parcel, meta=meta, layout=layout, seals=seals))


Content = tuple[int, int, bytes, bytes, list[bytes]]


def content(frame: Frame) -> Content:
    buffers = [bytes(memoryview(buffer)) for buffer in frame.parcel.buffers]
    return frame.kind, frame.call, frame.meta, bytes(frame.parcel.pickle), buffers


def meaning(message: Message) -> Content:
    kind, call, meta, parcel, _ = message
    return kind, call, meta, bytes(parcel.pickle), [bytes(buffer) for buffer in parcel.buffers]


_CUTS = st.lists(st.integers(1, 90_000), min_size=1, max_size=8)
some = settings(max_examples=40)


@pytest.mark.slow
@given(st.lists(messages(), max_size=5), _CUTS, st.booleans())
@some
def test_frames_come_out_as_they_were_encoded_however_they_are_cut(
    sent: list[Message], cuts: list[int], sealed: bool
) -> None:
    seals, checks = (Seals(KEY), Seals(KEY)) if sealed else (None, None)
    stream = b"".join(write(message, seals) for message in sent)
    got = list(feed(FrameReader(None, checks), cut(stream, cuts)))
    assert [content(frame) for frame in got] == [meaning(message) for message in sent]


@given(st.data(), _CUTS)
@some
def test_buffers_in_shared_memory_come_out_however_their_frames_are_cut(
    data: st.DataObject, cuts: list[int]
) -> None:
    wanted: list[Content] = []
    got: list[Content] = []
    memory = FakeMemory()
    reader = FrameReader(memory.map)
    for _ in range(data.draw(st.integers(1, 3))):
        message = data.draw(messages(memory))
        wanted.append(meaning(message))
        got += [content(frame) for frame in feed(reader, cut(write(message), cuts))]
    assert got == wanted


def test_a_frame_of_very_many_buffers_comes_out() -> None:
    buffers = [memoryview(bytes([index % 251])) for index in range(20_000)]
    message: Message = (Kind.VALUE, 7, b"", Parcel(b"x", buffers), None)
    stream = write(message) + write((Kind.END, 8, b"", Parcel(b""), None))
    first, second = feed(FrameReader(), cut(stream, [1 << 16, 999]))
    assert content(first) == meaning(message)
    assert second.kind == Kind.END


# (b) What was not encoded


def outcome(
    stream: bytes, cuts: Sequence[int], seals: Seals | None = None
) -> tuple[list[Content], str]:
    got: list[Content] = []
    reader = FrameReader(FakeMemory().map, seals)
    try:
        got.extend(content(frame) for frame in feed(reader, cut(stream, cuts)))
        list(reader.filled(0))
    except (courier.ProtocolError, courier.AuthenticationError) as error:
        return got, type(error).__name__
    return got, ""


def small_heads(chance: random.Random) -> bytes:
    """Frames that announce little, so that something becomes complete."""
    return b"".join(
        protocol._HEADER.pack(
            chance.randrange(32),
            chance.choice((0, 0, 0, 1, 2)),
            chance.choice((0, 0, 3, 20)),
            chance.choice((0, 0, 1, 2)),
            chance.randrange(4),
            chance.randrange(64),
        )
        + chance.randbytes(chance.randrange(100))
        for _ in range(3)
    )


@pytest.mark.slow
@given(st.integers(0, 1 << 32), st.lists(messages(), max_size=3), _CUTS, st.booleans())
@settings(max_examples=80)
def test_junk_is_a_protocol_error_or_waits_for_more(
    seed: int, sent: list[Message], cuts: list[int], sealed: bool
) -> None:
    chance = random.Random(seed)
    seals = Seals(KEY) if sealed else None
    stream = b"".join(write(message, seals) for message in sent)
    stream = mutated(stream, chance) if sent else small_heads(chance)
    outcome(stream, cuts, Seals(KEY) if sealed else None)


@given(st.integers(0, 1 << 32), st.integers(1, 50))
@settings(max_examples=200)
def test_how_a_stream_is_cut_does_not_change_what_it_says(seed: int, size: int) -> None:
    stream = small_heads(random.Random(seed))
    assert outcome(stream, [size]) == outcome(stream, [len(stream)])


_MIB = 1 << 20


@pytest.mark.parametrize(
    ("buffers", "places", "pickle_bytes"),
    [
        (0, [], 4 << 30),
        (1, [4 << 30], 0),
        (64, [1 << 30] * 64, 5),
        ((1 << 24), [], 0),
        (1_000, [_MIB - 1] * 1_000, 0),
    ],
    ids=["a pickle", "a buffer", "large buffers", "very many buffers", "many small buffers"],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_only_announced_takes_no_memory(
    buffers: int, places: list[int], pickle_bytes: int, sealed: bool
) -> None:
    head = protocol._HEADER.pack(Kind.CALL, 0, 0, buffers, 1, pickle_bytes)
    head += b"".join(size.to_bytes(8, "little") + bytes(8) for size in places)
    reader = FrameReader(None, Seals(KEY) if sealed else None)
    before = resident_bytes()
    with contextlib.suppress(courier.errors.ProtocolError):
        list(feed(reader, [head]))
    assert resident_bytes() < before + (32 << 20)


@given(st.lists(messages(), min_size=1, max_size=3), st.randoms(use_true_random=False), _CUTS)
@settings(max_examples=80)
@pytest.mark.slow
def test_a_seal_covers_every_byte_of_head_and_pickle(
    sent: list[Message], chance: random.Random, cuts: list[int]
) -> None:
    seals = Seals(KEY)
    written = [bytearray(write(message, seals)) for message in sent]
    victim = chance.randrange(len(sent))
    _, _, _, parcel, _ = sent[victim]
    covered = len(written[victim]) - sum(len(buffer) for buffer in parcel.buffers)
    written[victim][chance.randrange(covered)] ^= 1 << chance.randrange(8)
    got, _ = outcome(b"".join(written), cuts, Seals(KEY))
    assert got == [meaning(message) for message in sent[:victim]]


@given(
    st.lists(messages(), min_size=2, max_size=4, unique_by=lambda m: m[1]),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),  # 12 can be divided by 2, 3 and 4
    _CUTS,
)
@some
@pytest.mark.slow
def test_sealed_frames_cannot_be_left_out_repeated_or_swapped(
    sent: list[Message], order: list[int], cuts: list[int]
) -> None:
    seals = Seals(KEY)
    written = [write(message, seals) for message in sent]
    order = [index % len(sent) for index in order]
    assume(order != list(range(len(order))))
    got, why = outcome(b"".join(written[index] for index in order), cuts, Seals(KEY))
    intact = next(at for at, index in enumerate(order) if at != index)
    assert got == [meaning(message) for message in sent[:intact]]
    assert why == "AuthenticationError"


def test_a_reader_that_has_failed_takes_what_comes_and_tells_why() -> None:
    seals = Seals(KEY)
    first, second = (
        joined(encode(Kind.CALL, call, Parcel(b"x"), meta=bytes(65535), seals=seals))
        for call in (1, 2)
    )
    small = joined(encode(Kind.CALL, 3, Parcel(b"x"), seals=seals))
    for stream in (first + first + second, small + small + first):
        got, why = outcome(stream, [1 << 16], Seals(KEY))
        assert len(got) <= 1
        assert why == "AuthenticationError"


# (c) The handshake

_INTRODUCTION = Introduction("ab" * NAME_BYTES, "host", "\0courier/x", ("m",))


@pytest.fixture(scope="module")
def key() -> courier.Secret:
    return courier.Secret.generate()


@given(
    st.one_of(st.binary(max_size=300), st.binary(max_size=40).map(lambda tail: MAGIC + tail)),
    st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES),
    st.binary(max_size=64),
)
@some
def test_junk_is_no_prefix_no_welcome_and_no_proof(data: bytes, hello: bytes, proof: bytes) -> None:
    if data not in {prefix(purpose) for purpose in Purpose}:
        with pytest.raises(courier.errors.ProtocolError):
            read_prefix(data)
    with pytest.raises((courier.ProtocolError, courier.AuthenticationError)):
        ClientHandshake(courier.Secret(KEY)).prove(data)
    handshake = ServerHandshake(courier.Secret(KEY), _INTRODUCTION)
    with pytest.raises(courier.errors.AuthenticationError):
        handshake.check(b"")  # before the hello
    handshake.welcome(hello)
    with pytest.raises(courier.errors.AuthenticationError):
        handshake.check(proof)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_FIELDS = st.dictionaries(
    st.sampled_from(("name", "host", "local", "idempotent", "refusal", "more")), _JSON
)


@given(
    st.one_of(
        st.binary(max_size=200),
        (_JSON | _FIELDS).map(lambda value: json.dumps(value).encode()),
        st.sampled_from((b"[" * 100_000, b'{"name":' * 50_000, b"1" * 5_000, b"\xff\xfe{")),
    )
)
@settings(max_examples=200)
@pytest.mark.slow
def test_junk_is_no_introduction(data: bytes) -> None:
    try:
        made = Introduction.decode(data)
    except courier.errors.ProtocolError:
        return
    texts = (made.name, made.host, made.local, made.refusal, *made.idempotent)
    assert all(isinstance(text, str) for text in texts)


@given(st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_a_changed_welcome_is_refused(chance: random.Random) -> None:
    client, server = (
        ClientHandshake(courier.Secret(KEY)),
        ServerHandshake(courier.Secret(KEY), _INTRODUCTION),
    )
    welcome = server.welcome(client.hello())[LENGTH.size :]
    changed = mutated(welcome, chance)
    if changed == welcome:
        return
    with pytest.raises((courier.ProtocolError, courier.AuthenticationError)):
        client.prove(changed)


@given(st.integers(0, PROOF_BYTES * 8 - 1))
@some
def test_a_changed_proof_is_refused(bit: int) -> None:
    client, server = (
        ClientHandshake(courier.Secret(KEY)),
        ServerHandshake(courier.Secret(KEY), _INTRODUCTION),
    )
    proof, _, _ = client.prove(server.welcome(client.hello())[LENGTH.size :])
    changed = bytearray(proof)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(courier.errors.AuthenticationError):
        server.check(bytes(changed))
    server.check(proof)


def test_what_was_said_in_one_handshake_is_worth_nothing_in_another(key: courier.Secret) -> None:
    first, server = ClientHandshake(key), ServerHandshake(key, _INTRODUCTION)
    welcome = server.welcome(first.hello())[LENGTH.size :]
    proof, _, keys = first.prove(welcome)
    assert server.check(proof) == keys
    with pytest.raises(courier.errors.AuthenticationError):
        ClientHandshake(key).prove(welcome)
    anew = ServerHandshake(key, _INTRODUCTION)
    anew.welcome(first.hello())
    with pytest.raises(courier.errors.AuthenticationError):
        anew.check(proof)


def test_a_server_cannot_be_made_to_answer_for_another(key: courier.Secret) -> None:
    meant = ClientHandshake(key, bytes(range(NAME_BYTES)))
    welcome = ServerHandshake(key, _INTRODUCTION).welcome(meant.hello())
    _, introduction, _ = meant.prove(welcome[LENGTH.size :])
    assert introduction.refusal
    # Who leaves the name out on the way is found out.
    anyone = NO_NAME + meant.hello()[NAME_BYTES:]
    welcome = ServerHandshake(key, _INTRODUCTION).welcome(anyone)
    with pytest.raises(courier.errors.AuthenticationError):
        meant.prove(welcome[LENGTH.size :])


# (d) A server that is given junk


class Target:
    def __init__(self) -> None:
        self.calls = 0
        self.given: list[tuple[Any, ...]] = []

    def hit(self, *args: Any) -> int:
        self.given.append(args)
        self.calls += 1
        return self.calls

    def alive(self) -> str:
        return "yes"

    def items(self) -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(1000)

    def hold(self) -> bool:
        return courier.current_call().wait_cancelled(20)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def server(serve: Serve, target: Target, connect: Callable[..., Any]) -> Iterator[courier.Server]:
    """Answers old and new clients, during and after the test, as if nothing had happened."""
    server, client = serve(target, in_process="wire", client={"call_timeout": 20})
    assert client.alive() == "yes"
    # What an answer costs once only is not what strangers cost.
    Way(server, "tcp")
    with grpc.insecure_channel(server.address) as channel:
        Wire(channel, server.secret)
    with nothing_left():
        yield server
        assert client.alive() == "yes"
    assert connect(server.address, call_timeout=20).alive() == "yes"


@pytest.fixture(params=["tcp", "unix"])
def way(server: courier.Server, request: pytest.FixtureRequest) -> Way:
    return Way(server, request.param)


@pytest.mark.parametrize("seed", range(4))
def test_junk_before_the_proof_does_no_harm(
    way: Way, target: Target, bomb: bytes, seed: int
) -> None:
    chance = random.Random(seed)
    own = prefix(Purpose.CALLS)
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


@pytest.mark.parametrize("seed", range(4))
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


def test_frames_of_every_kind_and_number_do_no_harm(way: Way) -> None:
    chance = random.Random(1)
    for _ in range(6):
        sock, seals = way.connect_proven()
        with sock:
            for _ in range(40):
                kind = chance.choice((1, 2, 3, 3, 4, 4))
                meta = chance.choice((b"hit", b"items", b"items", b"", bytes(8) + b"hit", b"\xff"))
                data = chance.choice((GOOD, b"", bytes(8), b"\xff" * 8))
                parcel = Parcel(data)
                number = chance.randrange(3)
                send_anyway(sock, joined(encode(kind, number, parcel, meta=meta, seals=seals)))


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
                sock.sendall(prefix(Purpose.CALLS))
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


@pytest.mark.parametrize("first", [MAGIC[:1], prefix(Purpose.CALLS), b"P"], ids=repr)
def test_peers_that_say_little_and_wait_keep_nobody_out(
    server: courier.Server, first: bytes
) -> None:
    count = 60 if first == b"P" else 300
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            sock.sendall(first)
        client = courier.Client(server.address, secret=server.secret, call_timeout=20)
        stack.callback(courier.close, client)
        began = time.monotonic()
        for _ in range(20):
            assert client.alive() == "yes"
        assert time.monotonic() - began < 10
        if first != b"P":
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


@pytest.fixture
def grpc_server(serve: Serve, target: Target) -> Iterator[courier.Server]:
    server, client = serve(target, in_process="wire", client={"call_timeout": 20})
    assert client.alive() == "yes"
    with grpc.insecure_channel(server.address) as channel:
        Wire(channel, server.secret)
        with nothing_left():
            yield server
            assert client.alive() == "yes"
            assert Wire(channel, server.secret).is_trusted


@pytest.mark.parametrize("seed", range(3))
def test_junk_in_http2_does_no_harm(grpc_server: courier.Server, bomb: bytes, seed: int) -> None:
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
            with socket.create_connection(("127.0.0.1", grpc_server.port), 10) as sock:
                send_anyway(sock, junk)
                if chance.random() < 0.3:
                    slam(sock)


@pytest.mark.parametrize("method", ["Hello", "Call", "Send", "Fetch", "Connect"])
def test_mutated_messages_are_refused(
    grpc_server: courier.Server, bomb: bytes, target: Target, method: str
) -> None:
    chance = random.Random(method)
    with grpc.insecure_channel(grpc_server.address) as channel:
        wire = Wire(channel, grpc_server.secret)
        stream = channel.stream_stream(f"/courier.v1.Courier/{method}")
        for number in range(40):
            good = wire.request(1 + number, GOOD)
            good.pickle = bomb
            written = good.SerializeToString()
            if method == "Send":
                written = pb.Piece(opening=good).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                list(stream(iter([mutated(written, chance)] * chance.choice((1, 2))), timeout=20))
    assert target.calls == 0


def test_frames_in_a_grpc_stream_need_a_proof_too(
    grpc_server: courier.Server, bomb: bytes, target: Target
) -> None:
    with grpc.insecure_channel(grpc_server.address) as channel:
        connect = channel.stream_stream("/courier.v1.Courier/Connect")
        hello = prefix(Purpose.CALLS) + ClientHandshake(None).hello()
        for pieces in (
            [hello, bytes(PROOF_BYTES), call_frame(1, bomb)],
            [hello + bytes(PROOF_BYTES) + call_frame(1, bomb)],
            [call_frame(1, bomb)],
            [_PREFACE + _SETTINGS],
            [bomb, bomb],
        ):
            with contextlib.suppress(grpc.RpcError):
                list(connect(iter(pieces), timeout=20))
    assert target.calls == 0


# (e) A client whose server is none

Script = Callable[[Visitor], None]


@pytest.fixture
def rogue() -> Iterator[Callable[[Script], str]]:
    """Listens, and does with each connection what it is told; returns the address."""
    with contextlib.ExitStack() as stack:
        yield lambda script: stack.enter_context(answered_by_hand(script))


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


_BEFORE_THE_PROOF: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "nothing": lambda chance, bomb: b"",
    "a random welcome": lambda chance, bomb: LENGTH.pack(200) + chance.randbytes(200),
    "a short welcome": lambda chance, bomb: LENGTH.pack(3) + b"abc",
    "no welcome": lambda chance, bomb: LENGTH.pack(0),
    "half a welcome": lambda chance, bomb: LENGTH.pack(1 << 20) + bytes(1000),
    "a long welcome": lambda chance, bomb: b"\xff" * 4 + chance.randbytes(500),
    "http": lambda chance, bomb: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "settings of http2": lambda chance, bomb: _SETTINGS + chance.randbytes(50),
    "a bomb": lambda chance, bomb: bomb,
    "a bomb as a welcome": lambda chance, bomb: LENGTH.pack(64 + len(bomb)) + bytes(64) + bomb,
    "a frame": lambda chance, bomb: joined(encode(Kind.FAILURE, 1, Parcel(bomb))),
}


@pytest.mark.parametrize("stage", _BEFORE_THE_PROOF)
def test_a_client_outlives_what_is_no_server(
    rogue: Callable[[Script], str],
    connect: Callable[..., Any],
    bomb: bytes,
    stage: str,
) -> None:
    chance = random.Random(stage)

    def answer(visitor: Visitor) -> None:
        visitor.receive(1)
        visitor.send([_BEFORE_THE_PROOF[stage](chance, bomb)])
        if chance.random() < 0.5:
            slam(visitor.socket)

    client = connect(rogue(answer), call_timeout=0.4, wait_for_ready=False)
    call_all_ways(client)


def test_a_timeout_holds_against_a_server_that_says_a_byte_at_a_time(
    rogue: Callable[[Script], str], connect: Callable[..., Any]
) -> None:
    def answer(visitor: Visitor) -> None:
        visitor.socket.sendall(LENGTH.pack(1 << 20))
        for _ in range(600):
            visitor.socket.sendall(b"\0")
            time.sleep(0.1)

    # The timeout is far below what an attempt may take, also where the machine is slow.
    timing = courier.Timing(attempt_s=60.0)
    client = connect(rogue(answer), call_timeout=0.5, timing=timing)
    over = threading.Event()
    began = time.monotonic()
    client.futures.hit().add_done_callback(lambda _: over.set())
    with pytest.raises(courier.CallTimeoutError):
        client.hit()
    assert over.wait(20)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("seed", range(6))
def test_a_client_outlives_junk_of_a_proven_server(
    rogue: Callable[[Script], str],
    connect: Callable[..., Any],
    secret: courier.Secret,
    seed: int,
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

    address = rogue(answer)
    for _ in range(6):
        client = connect(address, call_timeout=2)
        call_all_ways(client)
        courier.close(client)
