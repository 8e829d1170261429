"""Replies that come in pieces: the items of a generator, or one large value."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from courier._exceptions import ExceptionReport
from courier._grpc.client_session import ClientSession
from courier._grpc.status import error_of
from courier._grpc.wire import parse, receive
from courier._lane import Raised, Refused, Returned
from courier._proto import courier_pb2 as pb
from courier.errors import (
    AuthenticationError,
    CallCancelledError,
    ProtocolError,
    SerializationError,
    UnknownMethodError,
)

if TYPE_CHECKING:
    from courier._grpc.client import GrpcLane


@dataclass(frozen=True, slots=True)
class Deadline:
    at: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def remaining(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def is_no_later_than(self, other: "Deadline") -> bool:
        return other.at is None or (self.at is not None and self.at <= other.at)


class GrpcStream:
    """The items of a generator, or the one value of a large reply."""

    def __init__(
        self,
        lane: "GrpcLane",
        session: ClientSession,
        ticket: bytes,
        deadline: Deadline,
        where: str,
    ) -> None:
        message, self._sequence = session.fetch(ticket)
        self._session = session
        self._where = where
        self._items = 0
        self._over = False
        self._rpc = lane.fetch(message.SerializeToString(), timeout=deadline.remaining())
        self._pieces: Iterator[bytes] = iter(self._rpc)

    def next_reply(self) -> Returned | Raised | Refused | None:
        if self._over:
            return None
        try:
            reply = self._receive()
        except grpc.RpcError:
            self._over = True
            code, details = self._rpc.code(), self._rpc.details() or ""
            if self._rpc.cancelled():
                raise CallCancelledError(f"{self._where}: the stream was closed") from None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                # It knew us when it announced this stream, so it has started anew since.
                code = grpc.StatusCode.UNAVAILABLE
            raise error_of(code, details, self._where) from None
        if not isinstance(reply, Returned):
            self._over = True
        return reply

    def _receive(self) -> Returned | Raised | Refused | None:
        opening = next(self._pieces, None)
        if opening is None:
            raise ProtocolError(f"{self._where}: the stream ended without saying so")
        message = parse(pb.Piece, opening).opening
        head = self._session.open(message, self._sequence, self._where)
        if head.item != self._items:
            raise AuthenticationError(f"{self._where}: an item of the stream is out of order")
        self._items += 1
        if head.kind == pb.ReplyHead.END:
            return None
        return to_reply(message, head, self._pieces)

    def close(self) -> None:
        self._over = True
        self._rpc.cancel()

    cancel = close


def to_reply(
    message: pb.Sealed, head: pb.ReplyHead, pieces: Iterator[bytes]
) -> Returned | Raised | Refused:
    kinds = pb.ReplyHead
    if head.kind == kinds.VALUE:
        return Returned(receive(message, head.parcel, pieces))
    if head.kind == kinds.FAILURE:
        has_pickle = head.HasField("parcel")
        pickled = receive(message, head.parcel, pieces) if has_pickle else None
        return Raised(ExceptionReport(head.type_name, head.text, head.traceback, pickled))
    if head.kind == kinds.UNKNOWN_METHOD:
        return Refused(UnknownMethodError, head.text)
    if head.kind == kinds.UNPICKLABLE:
        return Refused(SerializationError, f"the method ran, but cannot send {head.text}")
    if head.kind == kinds.BAD_ARGUMENTS:
        return Refused(SerializationError, f"cannot unpickle the arguments of {head.text}")
    raise ProtocolError(f"an answer of unknown kind {head.kind}")
