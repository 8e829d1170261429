"""Frames and handshakes as bytes: what comes out of them, and what of junk."""

import contextlib
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings, strategies as st

import courier
from courier.values.parcel import MOST_BUFFERS, Parcel
from courier.wire import frames as protocol
from courier.wire.frames import Frame, FrameReader, Kind, Layout, Region, Seals, encode
from courier.wire.handshake import (
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
from tests.courier.fuzzing import cut, feed, joined, mutated, resident_bytes, small_heads

KEY = bytes(range(32))

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
    st.integers(0, 40), st.sampled_from((1 << 15, (1 << 16) - 24, 1 << 16, (1 << 16) + 1, 100_000))
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


def test_a_frame_of_as_many_buffers_as_there_are_comes_out() -> None:
    buffers = [memoryview(bytes([index % 251])) for index in range(MOST_BUFFERS)]
    message: Message = (Kind.CALL, 7, bytes(1 << 15), Parcel(b"x", buffers), None)
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


@pytest.mark.slow
@given(st.integers(0, 1 << 32), st.lists(messages(), max_size=3), _CUTS, st.booleans())
@settings(max_examples=80)
def test_junk_is_a_protocol_error_or_waits_for_more_however_it_is_cut(
    seed: int, sent: list[Message], cuts: list[int], sealed: bool
) -> None:
    chance = random.Random(seed)
    seals = Seals(KEY) if sealed else None
    stream = b"".join(write(message, seals) for message in sent)
    stream = mutated(stream, chance) if sent else small_heads(chance)
    in_pieces, at_once = (
        outcome(stream, sizes, Seals(KEY) if sealed else None)
        for sizes in (cuts, [len(stream) or 1])
    )
    assert in_pieces == at_once


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


@given(st.randoms(use_true_random=False), st.integers(0, PROOF_BYTES * 8 - 1))
@settings(max_examples=200)
def test_a_changed_welcome_or_proof_is_refused(chance: random.Random, bit: int) -> None:
    client = ClientHandshake(courier.Secret(KEY))
    server = ServerHandshake(courier.Secret(KEY), _INTRODUCTION)
    welcome = server.welcome(client.hello())[LENGTH.size :]
    changed = mutated(welcome, chance)
    if changed != welcome:
        with pytest.raises((courier.ProtocolError, courier.AuthenticationError)):
            client.prove(changed)
    proof, _, _ = client.prove(welcome)
    wrong = bytearray(proof)
    wrong[bit // 8] ^= 1 << bit % 8
    with pytest.raises(courier.AuthenticationError):
        server.check(bytes(wrong))
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
