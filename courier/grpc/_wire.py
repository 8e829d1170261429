"""Messages of `courier.proto`: sealing, checking, cutting large ones into pieces."""

from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from courier._proto import courier_pb2 as pb
from courier.errors import ProtocolError
from courier.values.parcel import Parcel, ParcelAssembler, writable_copy

M = TypeVar("M", bound=Message)

SERVICE = "courier.v1.Courier"
#: Larger parcels are sent in pieces after the proof of their sender: before it, little is accepted.
INLINE_BYTES = 256 << 10
PIECE_BYTES = 1 << 20

#: Options of both sides. gRPC buffers a whole message before we check its sender. A proxy must
#: never see a program's calls.
COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 2 * PIECE_BYTES),
    ("grpc.enable_http_proxy", 0),
)


def describe(parcel: Parcel) -> pb.Parcel:
    return pb.Parcel(
        pickle_bytes=len(parcel.pickle),
        pickle_sha256=parcel.digest(),
        buffer_bytes=[len(buffer) for buffer in parcel.buffers],
    )


def fits_inline(parcel: Parcel) -> bool:
    return parcel.total_bytes <= INLINE_BYTES


def sealed(head: bytes, seal: bytes, parcel: Parcel | None) -> pb.Sealed:
    message = pb.Sealed(head=head, seal=seal)
    if parcel is not None:
        message.pickle = bytes(parcel.pickle)
        message.buffers.extend(bytes(buffer) for buffer in parcel.buffers)
    return message


def inside(message: pb.Sealed) -> Parcel:
    return Parcel(message.pickle, [writable_copy(data) for data in message.buffers])


def checked(parcel: Parcel, expected: pb.Parcel) -> Parcel:
    """Returns the parcel; raises ProtocolError if it does not fit its sealed description."""
    sizes = [len(buffer) for buffer in parcel.buffers]
    if sizes != list(expected.buffer_bytes) or parcel.digest() != expected.pickle_sha256:
        raise ProtocolError("the message is damaged: its content does not match its seal")
    return parcel


async def receive(message: pb.Sealed, expected: pb.Parcel, pieces: AsyncIterator[bytes]) -> Parcel:
    """Returns a parcel from its message, or the `Piece` messages after it; not `checked`."""
    buffers = len(message.buffers)
    if len(message.pickle) == expected.pickle_bytes and buffers == len(expected.buffer_bytes):
        return inside(message)
    assembler = ParcelAssembler(expected.pickle_bytes, expected.buffer_bytes)
    while assembler.room is not None:
        piece = await anext(pieces, None)
        if piece is None:
            break
        assembler.add(parse(pb.Piece, piece).data)
    return assembler.finish()


def send(message: pb.Sealed, parcel: Parcel) -> Iterator[bytes]:
    yield pb.Piece(opening=message).SerializeToString()
    for piece in parcel.pieces(PIECE_BYTES):
        yield pb.Piece(data=piece).SerializeToString()


def parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except (DecodeError, SystemError) as error:  # the latter comes from protobuf 3.20
        raise ProtocolError(f"not a {kind.__name__} message") from error
