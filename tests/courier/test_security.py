"""Strangers: nothing that they send is unpickled, and the server lives on."""

import concurrent.futures
import contextlib
import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import courier
from courier._proto import courier_pb2 as pb
from courier._secret import SessionKey
from tests.courier.conftest import Serve

_METHODS = ("Hello", "Call", "Send", "Fetch")


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Exists once a bomb was unpickled."""
    return tmp_path / "mark"


@pytest.fixture
def bomb(mark: Path) -> bytes:
    data = pickle.dumps(Bomb(mark))
    pickle.loads(data)
    assert mark.exists(), "a bomb that does not work proves nothing"
    mark.unlink()
    return pickle.dumps(((Bomb(mark),), {}))


class Target:
    def __init__(self) -> None:
        self.calls = 0

    def hit(self, *_: Any) -> int:
        self.calls += 1
        return self.calls

    def items(self) -> Iterator[int]:
        yield from range(3)

    def large(self) -> bytes:
        return bytes(5 << 20)


class Wire:
    """Speaks the protocol by hand, right or wrong."""

    def __init__(self, channel: grpc.Channel, secret: courier.Secret | None) -> None:
        prefix = "/courier.v1.Courier/"
        self.hello = channel.unary_unary(f"{prefix}Hello")
        self.call = channel.unary_unary(f"{prefix}Call")
        self.send = channel.stream_unary(f"{prefix}Send")
        self.fetch = channel.unary_stream(f"{prefix}Fetch")
        nonce = os.urandom(32)
        reply = pb.HelloReply.FromString(
            self.hello(pb.HelloRequest(nonce=nonce).SerializeToString(), timeout=20)
        )
        self.key = SessionKey(secret, nonce, reply.nonce)
        self.session = reply.session
        self.is_trusted = self.key.is_proof(reply.proof)

    def request(self, number: int, data: bytes, **head: Any) -> pb.Sealed:
        fields = {
            "session": self.session,
            "sequence": number,
            "method": "hit",
            "arguments": pb.Parcel(
                pickle_bytes=len(data), pickle_sha256=hashlib.sha256(data).digest()
            ),
        }
        written = pb.RequestHead(**{**fields, **head}).SerializeToString()
        return pb.Sealed(head=written, seal=self.key.seal_request(written), pickle=data)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def server(serve: Serve, target: Target) -> Iterator[courier.Server]:
    """Still answers its own client after whatever a test did to it."""
    server, client = serve(target)
    yield server
    before = target.calls
    assert client.hit() == before + 1


@pytest.fixture
def channel(server: courier.Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def wire(channel: grpc.Channel, secret: courier.Secret) -> Wire:
    wire = Wire(channel, secret)
    assert wire.is_trusted
    return wire


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() in codes


UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT

GOOD = pickle.dumps(((), {}))


def test_the_hand_written_client_is_served(wire: Wire, target: Target) -> None:
    reply = pb.Sealed.FromString(wire.call(wire.request(1, GOOD).SerializeToString(), timeout=20))
    assert wire.key.is_reply(reply.head, reply.seal)
    assert target.calls == 1


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)],
    ids=["nothing", "zeros", "http", "random"],
)
def test_raw_garbage_on_the_socket_does_no_harm(server: courier.Server, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(garbage)


@pytest.mark.parametrize("method", _METHODS)
def test_garbage_messages_are_refused(
    channel: grpc.Channel, bomb: bytes, mark: Path, target: Target, method: str
) -> None:
    stream = channel.stream_stream(f"/courier.v1.Courier/{method}")
    unsealed = pb.Sealed(pickle=bomb)
    for message in (
        b"",
        b"\xff" * 50,
        os.urandom(500),
        bomb,
        unsealed.SerializeToString(),
        pb.Piece(opening=unsealed).SerializeToString(),
        pb.Piece(data=bomb).SerializeToString(),
        pb.HelloRequest(nonce=b"short").SerializeToString(),
        pb.HelloRequest(nonce=bytes(1_000)).SerializeToString(),
    ):
        with refused(UNAUTHENTICATED, INVALID_ARGUMENT):
            list(stream(iter([message]), timeout=20))
    assert not mark.exists()
    assert target.calls == 0


def test_an_empty_stream_is_refused(channel: grpc.Channel) -> None:
    with refused(INVALID_ARGUMENT):
        channel.stream_unary("/courier.v1.Courier/Send")(iter(()), timeout=20)


@pytest.mark.parametrize("known", ["nothing", "another secret"])
def test_a_client_without_the_secret_gets_nothing_unpickled(
    channel: grpc.Channel, bomb: bytes, mark: Path, target: Target, known: str
) -> None:
    stranger = Wire(channel, None if known == "nothing" else courier.Secret.generate())
    assert not stranger.is_trusted
    request = stranger.request(1, bomb)
    with refused(UNAUTHENTICATED):
        stranger.call(request.SerializeToString(), timeout=20)
    with refused(UNAUTHENTICATED):
        stranger.send(iter([pb.Piece(opening=request).SerializeToString()]), timeout=20)
    with refused(UNAUTHENTICATED):
        list(stranger.fetch(request.SerializeToString(), timeout=20))
    assert not mark.exists()
    assert target.calls == 0


def test_a_forged_seal_or_head_is_refused(
    wire: Wire, bomb: bytes, mark: Path, target: Target
) -> None:
    good = wire.request(1, GOOD)
    forged = [
        pb.Sealed(head=good.head, seal=bytes(32), pickle=GOOD),
        pb.Sealed(head=good.head, seal=b"", pickle=GOOD),
        pb.Sealed(head=good.head, seal=wire.key.seal_reply(good.head), pickle=GOOD),
        pb.Sealed(head=wire.request(2, bomb).head, seal=good.seal, pickle=bomb),
    ]
    for message in forged:
        with refused(UNAUTHENTICATED):
            wire.call(message.SerializeToString(), timeout=20)
    assert not mark.exists()
    # A stranger could not use up the number of an honest request.
    wire.call(good.SerializeToString(), timeout=20)
    assert target.calls == 1


def test_a_pickle_that_was_exchanged_under_its_seal_is_refused(
    wire: Wire, bomb: bytes, mark: Path, target: Target
) -> None:
    padded = GOOD + b"." * (len(bomb) - len(GOOD))
    request = wire.request(1, padded)
    request.pickle = bomb
    with refused(INVALID_ARGUMENT):
        wire.call(request.SerializeToString(), timeout=20)
    request = wire.request(2, padded)
    request.pickle = b""
    pieces = [pb.Piece(opening=request), pb.Piece(data=bomb)]
    with refused(INVALID_ARGUMENT):
        wire.send((piece.SerializeToString() for piece in pieces), timeout=20)
    assert not mark.exists()
    assert target.calls == 0


def test_a_damaged_pickle_runs_nothing(wire: Wire, target: Target) -> None:
    reply = wire.call(wire.request(1, b"\x80\x05damaged").SerializeToString(), timeout=20)
    head = pb.ReplyHead.FromString(pb.Sealed.FromString(reply).head)
    assert head.kind == pb.ReplyHead.BAD_ARGUMENTS
    assert target.calls == 0


def test_a_replayed_request_runs_once(wire: Wire, channel: grpc.Channel, target: Target) -> None:
    request = wire.request(1, GOOD).SerializeToString()
    wire.call(request, timeout=20)
    for _ in range(3):
        with refused(UNAUTHENTICATED):
            wire.call(request, timeout=20)
    # Nor by the other door.
    opening = pb.Piece(opening=pb.Sealed.FromString(request)).SerializeToString()
    with refused(UNAUTHENTICATED):
        wire.send(iter([opening]), timeout=20)
    assert target.calls == 1


def test_reordered_requests_run_once_each(wire: Wire, target: Target) -> None:
    requests = [wire.request(number, GOOD).SerializeToString() for number in (3, 1, 5, 2)]
    for request in requests:
        wire.call(request, timeout=20)
    for request in requests:
        with refused(UNAUTHENTICATED):
            wire.call(request, timeout=20)
    with refused(UNAUTHENTICATED):
        wire.call(wire.request(0, GOOD).SerializeToString(), timeout=20)
    assert target.calls == 4


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [GOOD[:3]],
        [GOOD, b"more"],
        [GOOD + b"more"],
        [b"more" + GOOD],
        [GOOD[:3], b"x", GOOD[3:]],
        [GOOD[::-1]],
    ],
    ids=["none", "truncated", "extra piece", "longer", "shifted", "inserted", "reversed"],
)
def test_pieces_that_are_not_what_was_announced_run_nothing(
    wire: Wire, target: Target, pieces: list[bytes]
) -> None:
    opening = wire.request(1, GOOD)
    opening.pickle = b""
    messages = [pb.Piece(opening=opening), *(pb.Piece(data=data) for data in pieces)]
    with refused(INVALID_ARGUMENT):
        wire.send((message.SerializeToString() for message in messages), timeout=20)
    assert target.calls == 0


def _reply(wire: Wire, message: bytes) -> pb.ReplyHead:
    return pb.ReplyHead.FromString(pb.Sealed.FromString(message).head)


@pytest.mark.parametrize("method", ["items", "large"])
def test_an_announced_reply_is_fetched_once_and_only_by_its_session(
    wire: Wire, channel: grpc.Channel, secret: courier.Secret, method: str
) -> None:
    request = wire.request(1, GOOD, method=method).SerializeToString()
    head = _reply(wire, wire.call(request, timeout=20))
    assert head.ticket
    other = Wire(channel, secret)
    with refused(INVALID_ARGUMENT):
        list(other.fetch(other.request(1, b"", ticket=head.ticket).SerializeToString()))
    fetch = wire.request(2, b"", ticket=head.ticket).SerializeToString()
    assert len(list(wire.fetch(fetch, timeout=20))) > 1
    with refused(UNAUTHENTICATED):
        list(wire.fetch(fetch, timeout=20))
    again = wire.request(3, b"", ticket=head.ticket).SerializeToString()
    with refused(INVALID_ARGUMENT):
        list(wire.fetch(again, timeout=20))


def _rogue(answers: dict[str, Callable[[bytes], bytes]]) -> grpc.GenericRpcHandler:
    def handler(answer: Callable[[bytes], bytes]) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: answer(request))

    return grpc.method_handlers_generic_handler(
        "courier.v1.Courier", {name: handler(answer) for name, answer in answers.items()}
    )


@contextlib.contextmanager
def rogue_server(answers: dict[str, Callable[[bytes], bytes]]) -> Iterator[str]:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, handlers=[_rogue(answers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def _value(key: SessionKey, data: bytes, sequence: int = 1) -> bytes:
    parcel = pb.Parcel(pickle_bytes=len(data), pickle_sha256=hashlib.sha256(data).digest())
    head = pb.ReplyHead(
        sequence=sequence, kind=pb.ReplyHead.VALUE, parcel=parcel
    ).SerializeToString()
    sealed = pb.Sealed(head=head, seal=key.seal_reply(head), pickle=data)
    return sealed.SerializeToString()


def test_a_server_that_cannot_prove_the_secret_is_not_believed(
    connect: Callable[..., Any], bomb: bytes, mark: Path
) -> None:
    key = SessionKey(None, bytes(32), bytes(32))
    calls: list[bytes] = []

    def call(request: bytes) -> bytes:
        calls.append(request)
        return _value(key, bomb)

    hello = pb.HelloReply(nonce=bytes(32), session=bytes(16), proof=bytes(32))
    with rogue_server({"Hello": lambda _: hello.SerializeToString(), "Call": call}) as address:
        client = connect(address, call_timeout=20)
        with pytest.raises(courier.AuthenticationError, match="secret"):
            client.anything("private")
        courier.close(client)
    assert calls == []
    assert not mark.exists()


@pytest.mark.parametrize(
    "forgery", ["other key", "no seal", "wrong call", "changed pickle", "garbage", "empty"]
)
def test_a_reply_that_the_server_did_not_seal_is_not_unpickled(
    connect: Callable[..., Any], secret: courier.Secret, bomb: bytes, mark: Path, forgery: str
) -> None:
    """Somebody between client and server: the hello is real, the reply is not."""
    keys: list[SessionKey] = []

    def hello(request: bytes) -> bytes:
        nonce = os.urandom(32)
        keys.append(SessionKey(secret, pb.HelloRequest.FromString(request).nonce, nonce))
        reply = pb.HelloReply(nonce=nonce, session=bytes(16), proof=keys[-1].prove())
        return reply.SerializeToString()

    def call(_: bytes) -> bytes:
        if forgery == "garbage":
            return b"\xff" * 30
        if forgery == "empty":
            return b""
        if forgery == "other key":
            return _value(SessionKey(None, bytes(32), bytes(32)), bomb)
        if forgery == "wrong call":
            return _value(keys[-1], bomb, sequence=99)
        sealed = pb.Sealed.FromString(_value(keys[-1], bomb))
        if forgery == "no seal":
            sealed.seal = b""
        else:
            sealed = pb.Sealed.FromString(_value(keys[-1], bytes(len(bomb))))
            sealed.pickle = bomb
        return sealed.SerializeToString()

    with rogue_server({"Hello": hello, "Call": call}) as address:
        client = connect(address, call_timeout=20)
        with pytest.raises((courier.AuthenticationError, courier.ProtocolError)):
            client.anything()
        error = client.futures.anything().exception(20)
        assert isinstance(error, courier.AuthenticationError | courier.ProtocolError)
        courier.close(client)
    assert not mark.exists()


def test_a_client_gives_up_on_a_server_that_never_knows_its_session(
    connect: Callable[..., Any], secret: courier.Secret
) -> None:
    asked: list[bytes] = []

    def hello(request: bytes) -> bytes:
        nonce = os.urandom(32)
        key = SessionKey(secret, pb.HelloRequest.FromString(request).nonce, nonce)
        return pb.HelloReply(nonce=nonce, session=b"x", proof=key.prove()).SerializeToString()

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        asked.append(request)
        context.abort(UNAUTHENTICATED, "unknown session")
        return b""

    class Forgetful(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            if handler_call_details.method.endswith("Hello"):
                return grpc.unary_unary_rpc_method_handler(lambda request, _: hello(request))
            return grpc.unary_unary_rpc_method_handler(refuse)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, handlers=[Forgetful()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = connect(f"127.0.0.1:{port}", call_timeout=20)
        with pytest.raises(courier.AuthenticationError):
            client.anything()
        courier.close(client)
        server.stop(None).wait()
    assert 1 < len(asked) < 10
    assert len(set(asked)) == len(asked)
