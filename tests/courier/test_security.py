"""Strangers: nothing that they send is unpickled, and the server lives on."""

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from courier.values.parcel import Parcel
from courier.wire.frames import Chunk, Kind, Seals, encode
from courier.wire.handshake import (
    HELLO_BYTES,
    LENGTH,
    MAGIC,
    NAME_BYTES,
    PREFIX_BYTES,
    ClientHandshake,
    Introduction,
    ServerHandshake,
)
from courier.wire.place import host_name
from tests.courier.by_hand import OPENING, HungUpError, Stranger, Visitor, connected_by_grpc
from tests.courier.conftest import Meet, Serve, go_by
from tests.courier.fuzzing import Target, Way
from tests.courier.grpc_client import GrpcClient, pb, refused

_METHODS = ("Hello", "Call", "Send", "Fetch")


@pytest.fixture
def server(serve: Serve, target: Target) -> Iterator[courier.Server]:
    """Still answers its own client after whatever a test did to it."""
    server, client = serve(target)
    yield server
    before = target.calls
    assert client.hit() == before + 1


@pytest.fixture
def wire(server: courier.Server, secret: courier.Secret) -> Iterator[GrpcClient]:
    with contextlib.closing(GrpcClient(server.address, secret)) as wire:
        assert wire.is_trusted
        yield wire


UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT

GOOD = pickle.dumps(((), {}))


@pytest.mark.parametrize("method", _METHODS)
def test_garbage_messages_are_refused(
    wire: GrpcClient, bomb: bytes, target: Target, method: str
) -> None:
    stream = wire.channel.stream_stream(f"/courier.v1.Courier/{method}")
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
    assert target.calls == 0


def test_an_empty_stream_is_refused(wire: GrpcClient) -> None:
    with refused(INVALID_ARGUMENT):
        wire.upload(iter(()), timeout=20)


@pytest.mark.parametrize("known", ["nothing", "another secret"])
def test_a_client_without_the_secret_gets_nothing_unpickled(
    server: courier.Server, bomb: bytes, target: Target, known: str
) -> None:
    secret = None if known == "nothing" else courier.Secret.generate()
    with contextlib.closing(GrpcClient(server.address, secret)) as stranger:
        assert not stranger.is_trusted
        request = stranger.sealed(1, bomb)
        with refused(UNAUTHENTICATED):
            stranger.unary(request.SerializeToString(), timeout=20)
        with refused(UNAUTHENTICATED):
            stranger.upload(iter([pb.Piece(opening=request).SerializeToString()]), timeout=20)
        with refused(UNAUTHENTICATED):
            list(stranger.download(request.SerializeToString(), timeout=20))
    assert target.calls == 0


def test_a_forged_seal_or_head_is_refused(wire: GrpcClient, bomb: bytes, target: Target) -> None:
    good = wire.sealed(1, GOOD)
    forged = [
        pb.Sealed(head=good.head, seal=bytes(32), pickle=GOOD),
        pb.Sealed(head=good.head, seal=b"", pickle=GOOD),
        pb.Sealed(head=good.head, seal=wire.seal("reply", good.head), pickle=GOOD),
        pb.Sealed(head=wire.sealed(2, bomb).head, seal=good.seal, pickle=bomb),
    ]
    for message in forged:
        with refused(UNAUTHENTICATED):
            wire.unary(message.SerializeToString(), timeout=20)
    # A stranger could not use up the number of an honest request.
    wire.unary(good.SerializeToString(), timeout=20)
    assert target.calls == 1


def test_a_pickle_that_was_exchanged_under_its_seal_is_refused(
    wire: GrpcClient, bomb: bytes, target: Target
) -> None:
    padded = GOOD + b"." * (len(bomb) - len(GOOD))
    request = wire.sealed(1, padded)
    request.pickle = bomb
    with refused(INVALID_ARGUMENT):
        wire.unary(request.SerializeToString(), timeout=20)
    request = wire.sealed(2, padded)
    request.pickle = b""
    pieces = [pb.Piece(opening=request), pb.Piece(data=bomb)]
    with refused(INVALID_ARGUMENT):
        wire.upload((piece.SerializeToString() for piece in pieces), timeout=20)
    assert target.calls == 0


def test_a_replayed_request_runs_once_in_whatever_order_requests_come(
    wire: GrpcClient, target: Target
) -> None:
    requests = [wire.sealed(number, GOOD) for number in (3, 1, 5, 2)]
    for request in requests:
        wire.unary(request.SerializeToString(), timeout=20)
    for request in (*requests, wire.sealed(0, GOOD)):
        with refused(UNAUTHENTICATED):
            wire.unary(request.SerializeToString(), timeout=20)
        # Nor by the other door.
        with refused(UNAUTHENTICATED):
            wire.upload(iter([pb.Piece(opening=request).SerializeToString()]), timeout=20)
    assert target.calls == 4


@pytest.mark.parametrize("method", ["items", "large"])
def test_an_announced_reply_is_fetched_once_and_only_by_its_session(
    wire: GrpcClient, server: courier.Server, secret: courier.Secret, method: str
) -> None:
    request = wire.sealed(1, GOOD, method=method).SerializeToString()
    reply = pb.Sealed.FromString(wire.unary(request, timeout=20))
    ticket = pb.ReplyHead.FromString(reply.head).ticket
    assert ticket
    with contextlib.closing(GrpcClient(server.address, secret)) as other, refused(INVALID_ARGUMENT):
        list(other.download(other.sealed(1, b"", ticket=ticket).SerializeToString()))
    fetch = wire.sealed(2, b"", ticket=ticket).SerializeToString()
    assert len(list(wire.download(fetch, timeout=20))) > 1
    with refused(UNAUTHENTICATED):
        list(wire.download(fetch, timeout=20))
    again = wire.sealed(3, b"", ticket=ticket).SerializeToString()
    with refused(INVALID_ARGUMENT):
        list(wire.download(again, timeout=20))


@pytest.mark.parametrize("known", ["nothing", "another secret", "zeros", "our own words"])
def test_a_server_that_cannot_prove_the_secret_is_not_believed(meet: Meet, known: str) -> None:
    heard: list[bytes] = []
    hello: list[bytes] = []

    def behave(visitor: Visitor) -> None:
        if known in ("nothing", "another secret"):
            with contextlib.suppress(HungUpError):
                visitor.greet(courier.Secret.generate() if known == "another secret" else None)
                heard.append(b"a proof")
            return
        visitor.receive(PREFIX_BYTES)
        hello.append(visitor.receive(HELLO_BYTES))
        body = bytes(64) if known == "zeros" else hello[-1][-32:] * 2
        body += Introduction("00" * 16).encode()
        visitor.socket.sendall(LENGTH.pack(len(body)) + body)
        heard.append(visitor.receive(1))

    with meet(behave) as client:
        with pytest.raises(courier.AuthenticationError, match="secret") as caught:
            client.anything("private")
        assert client.address in str(caught.value)
        error = client.futures.anything("private").exception(20)
        assert isinstance(error, courier.AuthenticationError)
    assert heard == []


_FORGERIES: dict[str, Callable[[Visitor, int, bytes], list[Chunk]]] = {
    "other key": lambda v, n, b: encode(Kind.VALUE, n, Parcel(b), seals=Seals(bytes(32))),
    "key of requests": lambda v, n, b: encode(
        Kind.VALUE, n, Parcel(b), seals=Seals(v.keys.requests)
    ),
    "no seal": lambda v, n, b: [*encode(Kind.VALUE, n, Parcel(b)), bytes(32)],
    "left out": lambda v, n, b: v.write(Kind.VALUE, 99) and v.write(Kind.VALUE, n, b),
    "cut": lambda v, n, b: [b"".join(v.write(Kind.VALUE, n, b))[:-1]],
    "changed pickle": lambda v, n, b: [
        b"".join(v.write(Kind.VALUE, n, bytes(len(b)))).replace(bytes(len(b)), b)
    ],
    "changed call": lambda v, n, b: [
        b"".join(v.write(Kind.VALUE, n + 1, b)).replace(_number(n + 1), _number(n), 1)
    ],
    "changed kind": lambda v, n, b: [
        bytes((Kind.VALUE,)) + b"".join(v.write(Kind.UNKNOWN_METHOD, n, b))[1:]
    ],
    "as a failure": lambda v, n, b: [*encode(Kind.FAILURE, n, Parcel(b)), bytes(32)],
    "garbage": lambda v, n, b: [b"\xff" * 500],
    "random": lambda v, n, b: [os.urandom(4096)],
    "nothing": lambda v, n, b: [],
}


def _number(call: int) -> bytes:
    return call.to_bytes(8, "little")


def test_of_a_shared_value_only_raw_memory_travels_beside_the_seal() -> None:
    array = np.arange(1 << 16)
    buffers: list[pickle.PickleBuffer] = []
    shared = courier.Shared({"text": "long" * (1 << 16), "array": array})
    pickle.dumps(shared, 5, buffer_callback=buffers.append)
    assert [bytes(buffer.raw()) for buffer in buffers] == [array.tobytes()]


@pytest.mark.parametrize("forgery", list(_FORGERIES))
def test_a_reply_that_the_server_did_not_seal_is_not_unpickled(
    meet: Meet, secret: courier.Secret, value_bomb: bytes, forgery: str
) -> None:
    """Somebody between client and server: the handshake is real, the reply is not."""

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        number = visitor.read().call
        visitor.send(_FORGERIES[forgery](visitor, number, value_bomb))

    with meet(behave) as client:
        with pytest.raises(_BROKEN_TRUST) as caught:
            client.anything()
        assert client.address in str(caught.value)
        assert isinstance(client.futures.anything().exception(20), _BROKEN_TRUST)


#: The call was sent to a server that had proved itself, so that it may have run.
_BROKEN_TRUST = (courier.AuthenticationError, courier.ProtocolError, courier.ServerLostError)


def test_a_reply_is_taken_once(meet: Meet, secret: courier.Secret) -> None:
    """Somebody repeats what the server sealed for the call before."""
    first = threading.Event()

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        reply = visitor.write(Kind.VALUE, visitor.read().call, pickle.dumps("real"))
        visitor.send(reply)
        visitor.read()
        again = b"".join(reply)
        visitor.send([again.replace(_number(1), _number(2), 1)] if first.is_set() else [again])
        first.set()

    with meet(behave) as client:
        for _ in range(2):
            assert client.anything() == "real"
            with pytest.raises(_BROKEN_TRUST):
                client.anything()


def test_a_forgery_right_behind_an_honest_reply_is_noticed_at_once(
    meet: Meet, secret: courier.Secret, value_bomb: bytes
) -> None:
    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        first, second = visitor.read().call, visitor.read().call
        honest = visitor.write(Kind.VALUE, first, pickle.dumps("real"))
        visitor.send([*honest, *encode(Kind.VALUE, second, Parcel(value_bomb)), bytes(32)])
        visitor.is_hung_up_on()

    with meet(behave) as client:
        futures = [client.futures.anything() for _ in range(2)]
        # The second may have gone first: one waits for the connection, the other finds it.
        errors = [future.exception(20) for future in futures]
        assert futures[errors.index(None)].result(20) == "real"
        assert sum(isinstance(error, _BROKEN_TRUST) for error in errors) == 1


def test_a_bomb_under_the_seal_of_an_honest_server_works(
    meet: Meet, secret: courier.Secret, value_bomb: bytes, tmp_path: Path
) -> None:
    """What the tests around this one rely on."""

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        visitor.send(visitor.write(Kind.VALUE, visitor.read().call, value_bomb))

    with meet(behave) as client:
        client.anything()
    (tmp_path / "mark").unlink()  # it was meant to work


class TestTheServersDoor:
    """Strangers who speak the protocol, up to a point."""

    @pytest.fixture(params=["tcp", "unix", "grpc"])
    def knock(
        self, request: Any, server: courier.Server, secret: courier.Secret
    ) -> Iterator[Callable[..., Stranger]]:
        with contextlib.ExitStack() as stack:

            def come(known: courier.Secret | None = secret) -> Stranger:
                way = Way(server, request.param)
                stream = connected_by_grpc(server.address) if way.name == "grpc" else None
                stranger = Stranger(server.address, known, unix=way.unix, sock=stream)
                return stack.enter_context(stranger)

            yield come

    @pytest.mark.parametrize(
        "proof", ["none", "zeros", "of another connection", "without a secret", "by another secret"]
    )
    def test_frames_without_a_proof_are_not_read(
        self, knock: Callable[..., Stranger], bomb: bytes, target: Target, proof: str
    ) -> None:
        known = {"without a secret": [None], "by another secret": [courier.Secret.generate()]}
        stranger = knock(*known.get(proof, []))
        assert stranger.is_trusted == (proof not in known)
        proofs = {"none": b"", "zeros": bytes(32), "of another connection": knock().proof}
        first = proofs.get(proof, stranger.proof)
        stranger.send([first, *stranger.call(1, bomb + bytes(64))])
        assert stranger.is_hung_up_on()
        assert target.calls == 0

    def test_who_does_not_hold_the_secret_is_not_told_who_we_are(
        self, knock: Callable[..., Stranger], server: courier.Server
    ) -> None:
        before = knock(courier.Secret.generate()).welcome
        server.bind("look_up", courier.idempotent(lambda: 1))
        told = knock().introduction
        assert told.idempotent == ("look_up",)
        assert "look_up" in told.methods
        first, second = (knock(courier.Secret.generate()).welcome for _ in range(2))
        for words in ("name", told.name, told.local, *told.host.split("/"), *told.methods):
            assert words.encode() not in first
        # Neither does the length tell anything, nor that it is the same server.
        assert len(first) == len(before)
        assert first[-len(Introduction(told.name).encode()) :] not in second

    @pytest.mark.parametrize(
        "data", [b"\xff" * 500, b"\x01" + bytes(10) + b"\xff" * 20 + bytes(500)], ids=["ff", "long"]
    )
    def test_garbage_behind_the_proof_ends_the_connection(
        self, knock: Callable[..., Stranger], data: bytes
    ) -> None:
        stranger = knock()
        stranger.send([stranger.proof, data])
        assert stranger.is_hung_up_on()

    @pytest.mark.parametrize("kind", [0, 6, 15, 16, 17, 25, 255])
    def test_a_frame_of_a_kind_that_no_client_sends_ends_the_connection(
        self, knock: Callable[..., Stranger], bomb: bytes, kind: int
    ) -> None:
        stranger = knock()
        stranger.send([stranger.proof, *stranger.write(kind, 1, bomb)])
        assert stranger.is_hung_up_on()

    def test_a_damaged_pickle_runs_nothing(
        self, knock: Callable[..., Stranger], target: Target
    ) -> None:
        stranger = knock()
        stranger.send([stranger.proof, *stranger.call(1, b"\x80\x05damaged")])
        assert stranger.read().kind == Kind.BAD_ARGUMENTS
        assert target.calls == 0

    @pytest.mark.parametrize(
        "data",
        [MAGIC + b"\x01\x00", MAGIC + b"\xff\x00", OPENING[:-1] + b"\xff"],
        ids=["old", "new", "purpose"],
    )
    def test_another_version_or_purpose_is_hung_up_on(
        self, server: courier.Server, data: bytes
    ) -> None:
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(data)
            assert connection.recv(1) == b""

    def test_a_hello_that_comes_byte_by_byte_is_understood(
        self, server: courier.Server, secret: courier.Secret
    ) -> None:
        handshake = ClientHandshake(secret)
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in OPENING + handshake.hello():
                connection.sendall(bytes((byte,)))
            (length,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
            handshake.prove(connection.recv(length, socket.MSG_WAITALL))

    def test_the_unix_socket_takes_no_other_protocol(self, server: courier.Server) -> None:
        with Way(server, "unix").connect() as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


class TestRequestsOnTheWay:
    """Somebody between an honest client and the server, on plain TCP."""

    @pytest.fixture
    def caller(self, server: courier.Server, secret: courier.Secret) -> Iterator[Stranger]:
        with Stranger(server.address, secret) as caller:
            caller.send([caller.proof])
            yield caller

    def test_a_request_that_is_repeated_runs_once(self, caller: Stranger, target: Target) -> None:
        request = caller.call(1, GOOD)
        caller.send(request)
        assert caller.read().kind == Kind.VALUE
        caller.send(request)
        assert caller.is_hung_up_on()
        assert target.calls == 1

    @pytest.mark.parametrize("change", ["pickle", "method", "seal", "other direction", "order"])
    def test_a_request_that_was_changed_is_not_unpickled(
        self, caller: Stranger, bomb: bytes, target: Target, change: str
    ) -> None:
        padded = bytes(len(bomb))
        good = b"".join(caller.call(1, padded if change == "pickle" else bomb))
        if change == "pickle":
            good = good.replace(padded, bomb)
        elif change == "method":
            good = good.replace(b"hit", b"hat", 1)
        elif change == "seal":
            good = good[:-1] + bytes((good[-1] ^ 1,))
        elif change == "order":
            good = b"".join([*caller.call(2, bomb), good])
        else:
            caller.seals = Seals(caller.keys.replies)
            good = b"".join(caller.call(1, bomb))
        caller.send([good])
        assert caller.is_hung_up_on()
        assert target.calls == 0


class TestWithoutASecret:
    """Any user of the machine could prove that there is none; only the kernel tells users apart."""

    @pytest.mark.parametrize("way", ["tcp", "grpc"])
    def test_a_server_takes_calls_by_its_unix_socket_only(
        self, serve: Serve, target: Target, bomb: bytes, way: str
    ) -> None:
        server, client = serve(target, secret=None)
        server.bind("look_up", courier.idempotent(lambda: 1))
        stream = connected_by_grpc(server.address) if way == "grpc" else None
        with Stranger(server.address, None, sock=stream) as stranger:
            assert stranger.is_trusted
            assert not stranger.introduction.idempotent
            stranger.send([stranger.proof, *stranger.call(1, bomb)])
            assert stranger.is_hung_up_on()
        assert target.calls == 0
        assert client.hit() == 1

    def test_no_session_of_plain_grpc_is_opened(
        self, serve: Serve, target: Target, secret: courier.Secret
    ) -> None:
        server, _ = serve(target, secret=None)
        with refused(UNAUTHENTICATED, text="secret=courier.Secret"):
            GrpcClient(server.address, None)

    def test_a_client_unpickles_nothing_that_came_another_way(
        self, meet: Meet, value_bomb: bytes
    ) -> None:
        def behave(visitor: Visitor) -> None:
            visitor.greet(None)
            visitor.send(visitor.write(Kind.VALUE, visitor.read().call, value_bomb))

        with meet(behave, secret=None) as client:
            with pytest.raises(courier.AuthenticationError, match=_REMEDY) as caught:
                client.anything()
            assert client.address in str(caught.value)

    def test_a_client_that_only_gets_through_by_grpc_says_what_is_missing(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, client = serve(lambda: 1, secret=None, **go_by("grpc", monkeypatch))
        with pytest.raises(courier.AuthenticationError, match=_REMEDY):
            client()

    def test_a_server_that_leaves_during_the_handshake_counts_as_away(self, meet: Meet) -> None:
        def behave(visitor: Visitor) -> None:
            visitor.receive(PREFIX_BYTES)
            gone = Introduction("00" * NAME_BYTES, host_name(), "\0courier/gone")
            welcome = ServerHandshake(None, gone).welcome(visitor.receive(HELLO_BYTES))
            visitor.socket.sendall(welcome)
            visitor.is_hung_up_on()

        with (
            meet(behave, secret=None, wait_for_ready=False) as client,
            pytest.raises(courier.ServerUnreachableError, match=client.address),
        ):
            client.anything()


_REMEDY = r"pass the same secret=courier\.Secret"
