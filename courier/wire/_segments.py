"""Memory that two processes of one host share, to send large buffers without a socket.

The sender keeps a pool of segments (memfd; they have no name, so that nothing is left of them when
both processes are gone). It copies the buffers of a message into one, and the receiver's value uses
that memory. The first byte of a segment says whether it is in use: the sender sets it, the receiver
clears it when the last view of the memory is freed. That needs no message, and works in any thread
at any moment, also during garbage collection.

Shared memory costs fresh pages (a copy into warm ones is ten times faster), so segments are kept in
a pool. While all are in use, because the receiver keeps its values, buffers go inline.
"""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence

from courier.errors import ProtocolError
from courier.threads.locks import Lock
from courier.values.frozen import Frozen, frozen_of, sealed_memory
from courier.values.parcel import Parcel, WritableBuffer
from courier.values.shared import MIN_BYTES
from courier.wire.frames import Layout, Region

#: The first page holds the byte that says whether a segment is in use.
_DATA = mmap.PAGESIZE
_ALIGNMENT = 64
#: Segments of one connection that its receiver still uses; more buffers go inline.
_MAX_SEGMENTS = 16
_MAX_BYTES = 4 << 30
#: In the first byte of a segment: the sender has dropped it, and the receiver may drop it.
_DROPPED = 2
#: Frozen memories in one frame; the kernel passes no more descriptors at once than 253, and a
#: carrier receives 64. More buffers go inline.
_MAX_FROZEN = 32


class _Segment:
    __slots__ = ("descriptor", "memory", "number", "size", "used_at", "view")

    def __init__(self, number: int, size: int) -> None:
        descriptor = sealed_memory("courier", size)
        try:
            self.memory = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self.number = number
        self.size = size
        #: Its descriptor, until its first frame has it.
        self.descriptor: int | None = descriptor
        self.view = memoryview(self.memory)
        self.used_at = time.monotonic()

    @property
    def is_free(self) -> bool:
        return self.memory[0] == 0


class SegmentPool:
    """The sender's half, for one connection. Thread-safe."""

    def __init__(self, idle_s: float) -> None:
        """Makes an empty pool; memory that is unused for `idle_s` seconds is freed."""
        self._idle_s = idle_s
        self._lock = Lock()
        self._segments: list[_Segment] = []
        self._numbers = itertools.count(1)
        self._closed = False

    def place(self, parcel: Parcel) -> tuple[Layout | None, list[int]]:
        """Puts the large buffers of a parcel into shared memory, if that saves time.

        Returns their places, None if all go inline; and descriptors to send and then to close.
        """
        regions: list[Region] = []
        descriptors: list[int] = []
        places: list[tuple[int, int] | None] = [None] * len(parcel.buffers)
        known: dict[Frozen, int] = {}
        large: dict[int, WritableBuffer] = {}
        for index, buffer in enumerate(parcel.buffers):
            if (part := frozen_of(buffer)) is None:
                if len(buffer) >= MIN_BYTES:
                    large[index] = buffer
                continue
            whole, offset = part
            if whole not in known:
                if len(regions) >= _MAX_FROZEN:
                    continue
                regions.append(Region(0, whole.size, is_new=True))
                descriptors.append(whole.lend())
                known[whole] = len(regions)
            places[index] = (known[whole], offset)
        total = sum(_aligned(len(buffer)) for buffer in large.values())
        segment = self._take(_DATA + total) if total else None
        if segment is not None:
            is_new = segment.descriptor is not None
            if segment.descriptor is not None:
                descriptors.append(segment.descriptor)
            regions.append(Region(segment.number, segment.size, is_new))
            at = _DATA
            for index, buffer in large.items():
                _copy(segment.view, at, buffer)
                places[index] = (len(regions), at)
                at += _aligned(len(buffer))
            # It is the peer's now; its byte says when it is free.
            segment.descriptor = None
        return Layout(regions, places) if regions else None, descriptors

    def _take(self, size: int) -> _Segment | None:
        now = time.monotonic()
        with self._lock:
            self._drop_idle(now)
            fitting = [s for s in self._segments if s.is_free and size <= s.size <= 8 * size]
            if fitting:
                segment = min(fitting, key=lambda fit: fit.size)
                segment.memory[0] = 1
                segment.used_at = now
                return segment
            held = sum(segment.size for segment in self._segments)
            # Untouched pages cost nothing, so sizes are rounded, and segments fit more often.
            size = 1 << (size - 1).bit_length()
            if self._closed or len(self._segments) >= _MAX_SEGMENTS or held + size > _MAX_BYTES:
                return None
            try:
                segment = _Segment(next(self._numbers), size)
            except (OSError, ValueError, OverflowError):  # no memory, or no more descriptors
                return None
            segment.memory[0] = 1
            self._segments.append(segment)
            return segment

    def _drop_idle(self, now: float) -> None:
        for segment in list(self._segments):
            if now - segment.used_at > self._idle_s and segment.is_free:
                segment.memory[0] = _DROPPED
                self._segments.remove(segment)

    def tidy(self) -> bool:
        with self._lock:
            self._drop_idle(time.monotonic())
            return bool(self._segments)

    def close(self) -> None:
        """Frees all segments; those that the peer still uses stay with the peer."""
        with self._lock:
            self._closed = True
            self._segments.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _copy(target: memoryview, at: int, source: WritableBuffer) -> None:
    view = memoryview(source).cast("B")
    size = len(view)
    if view.readonly:
        target[at : at + size] = view
        return
    # Unlike an assignment, this releases the interpreter lock.
    array = ctypes.c_char * size
    ctypes.memmove(array.from_buffer(target, at), array.from_buffer(view), size)


class SegmentMap:
    """The receiver's half: maps the peer's memory. Used by one thread at a time."""

    def __init__(self, take_descriptors: Callable[[], list[int]]) -> None:
        """Makes one; `take_descriptors` returns received ones, in the order of their frames."""
        self._take_descriptors = take_descriptors
        self._mapped: dict[int, mmap.mmap] = {}
        #: Keeps the callbacks alive that release segments.
        self._leases: dict[int, weakref.ref[object]] = {}
        #: Received descriptors of frames that are not received yet.
        self._descriptors: list[int] = []

    def map(self, regions: Sequence[Region]) -> list[memoryview]:
        """Returns the memory of the regions of a frame; ProtocolError if it did not come."""
        self._descriptors += self._take_descriptors()
        self.tidy()
        return [self._map(region) for region in regions]

    def tidy(self) -> bool:
        """Unmaps segments that the sender has dropped; returns whether some are left."""
        for number, memory in list(self._mapped.items()):
            if memory[0] == _DROPPED:
                self._mapped.pop(number, None)
                self._leases.pop(number, None)
        return bool(self._mapped)

    def _map(self, region: Region) -> memoryview:
        if region.number == 0:
            return memoryview(self._open(region, mmap.MAP_PRIVATE))
        if region.is_new:
            self._mapped[region.number] = self._open(region, mmap.MAP_SHARED)
        memory = self._mapped.get(region.number)
        if memory is None or len(memory) < region.size:
            raise ProtocolError("a segment that was never sent")
        lease = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._leases[region.number] = weakref.ref(lease, functools.partial(_give_back, memory))
        return memoryview(lease).cast("B")

    def _open(self, region: Region, flags: int) -> mmap.mmap:
        if not self._descriptors:
            raise ProtocolError("shared memory without its descriptor")
        descriptor = self._descriptors.pop(0)
        try:
            if os.fstat(descriptor).st_size < region.size or region.size <= 0:
                raise ProtocolError("shared memory that is smaller than announced")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("shared memory that could be taken away")
            return mmap.mmap(
                descriptor, region.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError, OverflowError) as error:
            raise ProtocolError(f"shared memory that cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Forgets all segments; views of the memory stay valid."""
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self._mapped.clear()
        # The memory is not reused any more.
        self._leases.clear()


def _give_back(memory: mmap.mmap, _: object) -> None:
    memory[0] = 0
