"""The frame protocol: calls and answers as a stream of bytes. Pure: no I/O.

    frame = header | meta | regions | places | pickle | seal | inline buffers

    header   kind u8, regions u8, meta bytes u16, buffers u32, call u64, pickle bytes u64
    meta     of a call: the method, in UTF-8, behind its timeout in seconds (f64) if it is timed
    region   id u64, size u64: memory that both sides share, see `segments`
    place    size u64, where u64: 0 is inline; otherwise a region of this frame, counted from 1,
             in the upper 16 bits and the offset in the others
    seal     32 bytes; only on carriers that others can write to

All numbers are little-endian. Frames come only after the handshake has proved the peer; a wrong
frame is a ProtocolError, and ends the connection.
"""

import functools
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from courier.calls.outcomes import Kind
from courier.errors import AuthenticationError, ProtocolError, UnknownMethodError
from courier.values.parcel import NO_PARCEL, Parcel, ParcelAssembler, WritableBuffer

_HEADER = struct.Struct("<BBHIQQ")
pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_HEADER_BYTES = _HEADER.size
_PAIR = struct.Struct("<QQ")
_TIMEOUT = struct.Struct("<d")
_OFFSET_BITS = 48
_SEAL_BYTES = 32
_MAX_NAME_BYTES = 1 << 15
#: Size of the room, into which short parts are received at once; longer ones go straight to their
#: memory. All heads fit: see `MOST_BUFFERS`.
_ROOM_BYTES = 1 << 17
#: Frames up to this size are copied into one piece, which is cheaper than sending their parts.
SMALL_BYTES = 1 << 15

Chunk = bytes | bytearray | memoryview


# A plain number: comparing with a member of an enumeration takes longer.
_CALL = int(Kind.CALL)

#: The cost for a reader to receive and hold an item, as a number of bytes, beside its own bytes: by
#: these alone, a hundred thousand numbers would be sent before the next answer.
_ITEM_BYTES = 1 << 10


def item_weight(parcel: Parcel) -> int:
    """Returns the weight of an item, in bytes, in the limit by which a generator runs ahead."""
    return parcel.total_bytes + _ITEM_BYTES


class Region(NamedTuple):
    """Shared memory in which buffers of a frame lie."""

    #: Number of a reused segment on its connection; 0 is memory that is mapped once.
    number: int
    #: Bytes in all.
    size: int
    #: Whether its descriptor comes with the frame.
    is_new: bool


#: Marks the regions whose descriptor comes with the frame.
_NEW = 1 << 63


class Layout(NamedTuple):
    """The places of the buffers of a parcel that are not inline."""

    regions: Sequence[Region]
    #: For each buffer of the parcel, region (counted from 1) and offset; None is inline.
    places: Sequence[tuple[int, int] | None]


@dataclass(slots=True)
class Frame:
    """A complete frame."""

    kind: int
    call: int
    meta: bytes
    parcel: Parcel

    def method(self) -> tuple[str, float | None]:
        """Returns the method of a call and its timeout in seconds, or raises ProtocolError."""
        name, timeout_s = self.meta, None
        if self.kind == Kind.TIMED_CALL:
            if len(name) < _TIMEOUT.size:
                raise _no_method()
            (timeout_s,) = _TIMEOUT.unpack_from(name)
            name = name[_TIMEOUT.size :]
        return method_of(name), timeout_s


#: A small frame without buffers: its kind, call, meta and pickle.
SmallFrame = tuple[int, int, bytearray, bytearray]


def whole(small: SmallFrame) -> Frame:
    kind, call, meta, data = small
    return Frame(kind, call, bytes(meta), Parcel(data))


def method_of(name: bytes | bytearray) -> str:
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _no_method() from error


def _no_method() -> ProtocolError:
    return ProtocolError("a call without a proper method")


class Seals:
    """Seals the frames of one direction in their order; no frame can be left out or repeated."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, *parts: Chunk) -> bytes:
        # Keyed BLAKE2 (RFC 7693) is a MAC already, and takes less than half the time of an HMAC.
        mac = blake2b(self._count.to_bytes(8, "little"), key=self._key, digest_size=_SEAL_BYTES)
        for part in parts:
            mac.update(part)
        self._count += 1
        return mac.digest()

    def check(self, seal: Chunk, *parts: Chunk) -> None:
        """Checks the seal of the next frame, or raises AuthenticationError."""
        if not hmac.compare_digest(self.next(*parts), seal):
            raise AuthenticationError("a frame does not carry the seal of its connection")


def encode(
    kind: int,
    call: int,
    parcel: Parcel = NO_PARCEL,
    *,
    meta: bytes = b"",
    layout: Layout | None = None,
    seals: Seals | None = None,
) -> list[Chunk]:
    """Returns a frame as chunks to send in order; with seals, in the order of encoding, too."""
    data, buffers = parcel.pickle, parcel.buffers
    if not buffers and len(data) <= SMALL_BYTES:
        # In one piece, as most frames are.
        frame = pack_header(kind, 0, len(meta), 0, call, len(data)) + meta + data
        return [frame if seals is None else frame + seals.next(frame)]
    regions = layout.regions if layout is not None else ()
    places = layout.places if layout is not None else (None,) * len(buffers)
    parts = [pack_header(kind, len(regions), len(meta), len(buffers), call, len(data)), meta]
    parts += [
        _PAIR.pack(region.number | (_NEW if region.is_new else 0), region.size)
        for region in regions
    ]
    inline: list[Chunk] = []
    for buffer, place in zip(buffers, places, strict=True):
        if place is None:
            parts.append(_PAIR.pack(len(buffer), 0))
            inline.append(memoryview(buffer).cast("B"))
        else:
            parts.append(_PAIR.pack(len(buffer), place[0] << _OFFSET_BITS | place[1]))
    head = b"".join(parts)
    chunks: list[Chunk] = [head, data]
    if seals is not None:
        chunks.append(seals.next(head, data))
    chunks += inline
    if sum(map(len, chunks)) <= SMALL_BYTES:
        return [b"".join(chunks)]
    return chunks


def call_meta(method: str, timeout_s: float | None) -> tuple[int, bytes]:
    """Returns kind and meta of a call; raises UnknownMethodError if the name is too long."""
    name = _encoded(method)
    return (
        (_CALL, name) if timeout_s is None else (Kind.TIMED_CALL, _TIMEOUT.pack(timeout_s) + name)
    )


@functools.lru_cache(maxsize=1024)
def _encoded(method: str) -> bytes:
    name = method.encode("utf-8", "surrogatepass")
    if len(name) > _MAX_NAME_BYTES:
        raise UnknownMethodError(f"no method has a name of {len(name):,} bytes")
    return name


#: Returns the memory of the regions of a frame, in their order.
Mapper = Callable[[Sequence[Region]], Sequence[memoryview]]


class FrameReader:
    """Puts frames together from a stream of bytes.

    Receive into `room`, then pass the number of bytes to `filled()`, which returns complete frames.
    Not thread-safe. Do not use it after an error.
    """

    def __init__(self, mapper: Mapper | None = None, seals: Seals | None = None) -> None:
        """Makes a reader. `mapper` maps regions; None where the carrier has none."""
        self._mapper = mapper
        self._seals = seals
        self._memory = bytearray(_ROOM_BYTES)
        self._view = memoryview(self._memory)
        #: Received data between these two is not taken yet.
        self._start = 0
        self._end = 0
        #: A frame with parts longer than the room.
        self._long: _LongFrame | None = None
        self._failure: ProtocolError | AuthenticationError | None = None
        #: The memory for the next bytes; never empty.
        self.room = self._view
        #: Whether all received data is taken, and frames have no seals.
        self._is_clear = seals is None

    def small(self, count: int) -> SmallFrame | None:
        """Takes bytes if they are one small frame, as nearly all are; otherwise does nothing."""
        if not self._is_clear or count < _HEADER_BYTES:
            return None
        memory = self._memory
        kind, regions, meta_bytes, buffers, call, pickle_bytes = _unpack_header(memory)
        middle = _HEADER_BYTES + meta_bytes
        if middle + pickle_bytes != count or buffers or regions:
            return None
        return kind, call, memory[_HEADER_BYTES:middle], memory[middle:count]

    def filled(self, count: int) -> list[Frame]:
        """Takes `count` bytes in the room; returns complete frames.

        Raises ProtocolError if the peer broke the protocol, AuthenticationError for a wrong seal.
        Frames that came before are returned first; the next call raises.
        """
        self.check()
        frames: list[Frame] = []
        try:
            self._take_all(count, frames)
        except (ProtocolError, AuthenticationError) as error:
            if not frames:
                raise
            self._failure = error
            self._long = None
            self._start = self._end = 0
        long = self._long
        self.room = self._view[self._end :] if long is None or long.room is None else long.room
        self._is_clear = not (self._end or long or self._seals or self._failure)
        return frames

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take_all(self, count: int, frames: list[Frame]) -> None:
        long = self._long
        if long is None:
            self._end += count
        else:
            long.filled(count)
            if long.room is not None:
                return
            self._long = None
            frames.append(long.frame(self._seals))
        start, end = self._start, self._end
        view = self._view
        seals = self._seals
        seal_bytes = 0 if seals is None else _SEAL_BYTES
        while end - start >= _HEADER_BYTES:
            kind, regions, meta_bytes, buffers, call, pickle_bytes = _unpack_header(view, start)
            if not (buffers or regions):
                middle = start + _HEADER_BYTES + meta_bytes
                after = middle + pickle_bytes
                if after + seal_bytes <= end:
                    if seals is not None:
                        seals.check(view[after : after + seal_bytes], view[start:after])
                    meta = bytes(view[start + _HEADER_BYTES : middle]) if meta_bytes else b""
                    frames.append(Frame(kind, call, meta, Parcel(bytes(view[middle:after]))))
                    start = after + seal_bytes
                    continue
            elif not regions and seals is None:
                found = self._in_room(start, kind, meta_bytes, buffers, call, pickle_bytes)
                if found is not None:
                    frames.append(found[0])
                    start = found[1]
                    continue
            self._start = start
            frame = self._next(regions, meta_bytes, buffers)
            if frame is None:
                break
            frames.append(frame)
            start = self._start
        else:
            self._start = start
        if self._long is None:
            self._make_room()

    def _in_room(
        self, start: int, kind: int, meta_bytes: int, buffers: int, call: int, pickle_bytes: int
    ) -> tuple[Frame, int] | None:
        """Returns a frame with its inline buffers, if all of it is in the room, and its end."""
        names = start + _HEADER_BYTES
        places = names + meta_bytes
        data = places + _PAIR.size * buffers
        at = data + pickle_bytes
        if at > self._end:
            return None
        memory = self._memory
        parts: list[bytearray] = []
        for size, where in _PAIR.iter_unpack(memory[places:data]):
            if where or size > self._end - at:
                return None
            parts.append(memory[at : at + size])
            at += size
        parcel = Parcel(memory[data : data + pickle_bytes], parts)
        return Frame(kind, call, bytes(memory[names:places]), parcel), at

    def _make_room(self) -> None:
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
        elif start:
            self._memory[: end - start] = self._memory[start:end]
            self._start, self._end = 0, end - start

    def _next(self, regions: int, meta_bytes: int, buffers: int) -> Frame | None:
        """Takes the next frame out of the room; None if it is incomplete."""
        start = self._start
        head_bytes = _HEADER_BYTES + meta_bytes + _PAIR.size * (regions + buffers)
        if head_bytes > _ROOM_BYTES:
            raise ProtocolError("a frame announces more buffers than a message has")
        if self._end - start < head_bytes:
            return None
        head = bytes(self._view[start : start + head_bytes])
        self._start += head_bytes
        long = _LongFrame(head, sealed=self._seals is not None, mapper=self._mapper)
        taken = long.take(self._view[self._start : self._end])
        self._start += taken
        if long.room is None:
            return long.frame(self._seals)
        self._long = long
        self._start = self._end = 0
        return None


class _LongFrame(ParcelAssembler):
    """A frame whose parts are received straight into their memory."""

    def __init__(self, head: bytes, *, sealed: bool, mapper: Mapper | None) -> None:
        kind, regions, meta_bytes, _, call, pickle_bytes = _unpack_header(head)
        self._head = head
        self._kind, self._call = kind, call
        at = _HEADER_BYTES
        self._meta = head[at : at + meta_bytes]
        at += meta_bytes
        self._mapper = mapper
        self._regions = [
            Region(number & ~_NEW, size, bool(number & _NEW))
            for number, size in _PAIR.iter_unpack(head[at : at + regions * _PAIR.size])
        ]
        at += regions * _PAIR.size
        self._places = list(_PAIR.iter_unpack(head[at:]))
        self._check_places()
        inline = [size for size, where in self._places if not where]
        super().__init__(pickle_bytes, inline, _SEAL_BYTES if sealed else 0)

    def _check_places(self) -> None:
        if self._regions and self._mapper is None:
            raise ProtocolError("shared memory where there is none")
        for size, where in self._places:
            if where:
                index, offset = where >> _OFFSET_BITS, where & ((1 << _OFFSET_BITS) - 1)
                if not 0 < index <= len(self._regions):
                    raise ProtocolError("a buffer in an unknown region")
                if offset + size > self._regions[index - 1].size:
                    raise ProtocolError("a buffer beyond the end of its region")

    def frame(self, seals: Seals | None) -> Frame:
        """Returns it; raises AuthenticationError if its seal is not the next one."""
        if seals is not None:
            seals.check(self.seal, self._head, memoryview(self.pickle))
        inline = iter(self.buffers)
        memories = self._mapper(self._regions) if self._mapper and self._regions else ()
        buffers: list[WritableBuffer] = []
        for size, where in self._places:
            if where:
                offset = where & ((1 << _OFFSET_BITS) - 1)
                buffers.append(memories[(where >> _OFFSET_BITS) - 1][offset : offset + size])
            else:
                buffers.append(next(inline))
        return Frame(self._kind, self._call, self._meta, Parcel(memoryview(self.pickle), buffers))
