"""A client that knows nothing but gRPC and `courier.proto`, as one in any language could be."""

import contextlib
import hashlib
import hmac
import itertools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import courier
from courier._proto import courier_pb2 as pb

__all__ = ["GrpcClient", "Refused", "health", "pb", "refused"]

_PIECE_BYTES = 1 << 20
_INLINE_BYTES = 1 << 18
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Refused(Exception):  # noqa: N818 - a word of the protocol
    """The reply is none of a value; says what it is."""

    def __init__(self, head: pb.ReplyHead) -> None:
        super().__init__(head.text)
        self.kind = pb.ReplyHead.Kind.Name(head.kind)


class GrpcClient:
    """Calls methods. What it checks, it asserts."""

    def __init__(self, address: str, secret: courier.Secret | None) -> None:
        self.channel = grpc.insecure_channel(address, options=_OPTIONS)
        prefix = "/courier.v1.Courier/"
        self.hello = self.channel.unary_unary(f"{prefix}Hello")
        self.unary = self.channel.unary_unary(f"{prefix}Call")
        self.upload = self.channel.stream_unary(f"{prefix}Send")
        self.download = self.channel.unary_stream(f"{prefix}Fetch")
        self._numbers = itertools.count(1)
        nonce = os.urandom(32)
        reply = pb.HelloReply.FromString(
            self.hello(pb.HelloRequest(nonce=nonce).SerializeToString(), timeout=20)
        )
        key = secret.reveal() if secret is not None else b""
        self._key = _hmac(key, b"courier.v1 session" + nonce + reply.nonce)
        self._session = reply.session
        #: Whether the server proved the secret.
        self.is_trusted = reply.proof == _hmac(self._key, b"courier.v1 server")

    def call(self, method: str, *args: Any, timeout: float = 30) -> Any:
        """Returns what the method returns, or raises what it raises."""
        request, parcel = self.request(method, args)
        if sum(map(len, parcel)) <= _INLINE_BYTES:
            request.pickle, request.buffers[:] = parcel[0], parcel[1:]
            message = self.unary(request.SerializeToString(), timeout=timeout)
        else:
            message = self.upload(_pieces(request, parcel), timeout=timeout)
        head, data = self._open(pb.Sealed.FromString(message), request)
        if head.kind == pb.ReplyHead.LARGE:
            (outcome,) = self._fetch(head.ticket, timeout)
            return _value(*outcome)
        if head.kind == pb.ReplyHead.GENERATOR:
            return self._items(head.ticket, timeout)
        return _value(head, data)

    def ask(self, path: str, request: bytes, timeout: float = 30, **metadata: Any) -> bytes:
        """Calls a method of another service; `metadata` replaces what is sent with it."""
        number = next(self._numbers)
        sent = {**self.metadata(path, request, number), **metadata}
        pairs = [(name.replace("_", "-"), value) for name, value in sent.items()]
        reply, call = self.channel.unary_unary(path).with_call(
            request, timeout=timeout, metadata=pairs
        )
        seal = dict(call.trailing_metadata())["courier-seal-bin"]
        assert seal == self._seal(b"reply", path, number, reply)
        return reply

    def plain(self, path: str, request: bytes, **metadata: Any) -> bytes:
        """Calls a method of another service with just this metadata."""
        pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return self.channel.unary_unary(path)(request, timeout=30, metadata=pairs)

    def metadata(self, path: str, request: bytes, number: int) -> dict[str, Any]:
        """Returns what proves that a request is of this client."""
        return {
            "courier_session_bin": self._session,
            "courier_sequence": str(number),
            "courier_seal_bin": self._seal(b"request", path, number, request),
        }

    def _seal(self, direction: bytes, path: str, number: int, message: bytes) -> bytes:
        content = path.encode() + number.to_bytes(8, "big") + hashlib.sha256(message).digest()
        return _hmac(self._key, b"courier.v1 service " + direction + content)

    def request(
        self, method: str, args: tuple[Any, ...] = (), *, ticket: bytes = b""
    ) -> tuple[pb.Sealed, list[bytes]]:
        """Returns a sealed request with nothing inside, and what belongs inside."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps((args, {}), protocol=5, buffer_callback=buffers.append)
        parcel = [data, *(buffer.raw().tobytes() for buffer in buffers)]
        described = pb.Parcel(
            pickle_bytes=len(data),
            pickle_sha256=hashlib.sha256(data).digest(),
            buffer_bytes=[len(part) for part in parcel[1:]],
        )
        head = {"method": method, "arguments": described, "ticket": ticket}
        return self.sealed(next(self._numbers), b"", **head), parcel

    def sealed(self, number: int, data: bytes, **head: Any) -> pb.Sealed:
        """Returns a sealed request with this number and pickle; `head` may say anything else."""
        described = pb.Parcel(pickle_bytes=len(data), pickle_sha256=hashlib.sha256(data).digest())
        fields = {"session": self._session, "method": "hit", "arguments": described, **head}
        written = pb.RequestHead(sequence=number, **fields).SerializeToString()
        return pb.Sealed(head=written, seal=self.seal("request", written), pickle=data)

    def seal(self, direction: str, head: bytes) -> bytes:
        """Returns what proves that a head is a `request` or a `reply` of this session."""
        return _hmac(self._key, f"courier.v1 {direction}".encode() + head)

    def _fetch(
        self, ticket: bytes, timeout: float
    ) -> Iterator[tuple[pb.ReplyHead, list[bytearray]]]:
        request, _ = self.request("", ticket=ticket)
        pieces = self.download(request.SerializeToString(), timeout=timeout)
        for piece in pieces:
            opening = pb.Piece.FromString(piece).opening
            head, data = self._open(opening, request)
            sizes = [head.parcel.pickle_bytes, *head.parcel.buffer_bytes]
            if not data[0] and sizes[0]:
                whole = b""
                while len(whole) < sum(sizes):
                    whole += pb.Piece.FromString(next(pieces)).data
                ends = list(itertools.accumulate(sizes))
                data = [
                    bytearray(whole[end - size : end])
                    for size, end in zip(sizes, ends, strict=True)
                ]
            assert hashlib.sha256(data[0]).digest() == head.parcel.pickle_sha256 or not sizes[0]
            yield head, data

    def _items(self, ticket: bytes, timeout: float) -> Iterator[Any]:
        for position, (head, data) in enumerate(self._fetch(ticket, timeout)):
            assert head.item == position
            if head.kind == pb.ReplyHead.END:
                return
            yield _value(head, data)

    def _open(self, message: pb.Sealed, request: pb.Sealed) -> tuple[pb.ReplyHead, list[bytearray]]:
        assert message.seal == self.seal("reply", message.head)
        head = pb.ReplyHead.FromString(message.head)
        assert head.sequence == pb.RequestHead.FromString(request.head).sequence
        if message.pickle:  # otherwise it follows
            assert hashlib.sha256(message.pickle).digest() == head.parcel.pickle_sha256
        return head, [bytearray(message.pickle), *map(bytearray, message.buffers)]

    def close(self) -> None:
        """Ends the connection."""
        self.channel.close()


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode, text: str = "") -> Iterator[None]:
    """Expects an error of gRPC with one of these codes, whose details contain the text."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() in codes, caught.value
    assert text in caught.value.details(), caught.value


def health(address: str, *, waits: bool = False) -> int:
    """Asks the health service; returns the status. `waits`: until it is let in."""
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service="courier.v1.Courier")
        return int(check(request, timeout=20, wait_for_ready=waits).status)


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _pieces(request: pb.Sealed, parcel: list[bytes]) -> Iterator[bytes]:
    yield pb.Piece(opening=request).SerializeToString()
    whole = b"".join(parcel)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield pb.Piece(data=whole[start : start + _PIECE_BYTES]).SerializeToString()


def _value(head: pb.ReplyHead, data: list[bytearray]) -> Any:
    if head.kind == pb.ReplyHead.VALUE:
        return pickle.loads(data[0], buffers=data[1:])
    if head.kind == pb.ReplyHead.FAILURE and data[0]:
        raise pickle.loads(data[0], buffers=data[1:])
    raise Refused(head)
