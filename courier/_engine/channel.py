"""One proven connection, seen by either side: frames in, frames out."""

import collections
import os
import threading
from collections.abc import Sequence

from courier._engine.carrier import Carrier
from courier._engine.frames import (
    SMALL_BYTES,
    Chunk,
    Frame,
    FrameReader,
    Layout,
    Seals,
    encode,
    encode_small,
)
from courier._engine.segments import AVAILABLE, SegmentMap, SegmentPool
from courier._parcel import Parcel

_NO_PARCEL = Parcel(b"")
#: Small frames are gathered up to here before they are sent.
_BATCH_BYTES = 1 << 16


class NothingSentError(ConnectionError):
    """The connection broke before any byte of a frame was taken."""


class Channel:
    """Frames over a carrier.

    Any thread may post and flush; one at a time receives.
    """

    def __init__(self, carrier: Carrier, receive_key: bytes, send_key: bytes) -> None:
        """Wraps a carrier.

        Args:
            carrier: Its peer has proved itself.
            receive_key: For the seals of what comes in, where the carrier is exposed.
            send_key: The same for what goes out.
        """
        self.carrier = carrier
        shares = carrier.passes_descriptors and AVAILABLE
        self._pool = SegmentPool() if shares else None
        self._map = SegmentMap(carrier.take_descriptors) if shares else None
        self._reader = FrameReader(
            self._map.map if self._map is not None else None,
            Seals(receive_key) if carrier.is_exposed else None,
        )
        self._seals = Seals(send_key) if carrier.is_exposed else None
        self._write_lock = threading.Lock()
        #: Chunks to send, each with the descriptors that go with it.
        self._chunks: collections.deque[tuple[Chunk, Sequence[int]]] = collections.deque()
        #: Frames so small that several become one chunk.
        self._batch: list[Chunk] = []
        self._batch_bytes = 0
        #: Bytes that wait to be sent; read without the lock, as an estimate.
        self.unsent_bytes = 0
        self._is_held_back = False
        self.is_closed = False

    @property
    def is_pending(self) -> bool:
        """Whether something waits to be sent."""
        return self.unsent_bytes > 0 or self._is_held_back

    def post(self, kind: int, call: int, parcel: Parcel = _NO_PARCEL, *, meta: bytes = b"") -> None:
        """Puts a frame behind those that wait to be sent; does not block."""
        layout: Layout | None = None
        descriptors: Sequence[int] = ()
        if parcel.buffers and self._pool is not None:
            placed = self._pool.place(parcel)
            if placed is not None:
                layout, descriptors = placed
        if self._seals is None:
            chunks = encode(kind, call, parcel, meta=meta, layout=layout)
            with self._write_lock:
                self._add(chunks, descriptors)
            return
        with self._write_lock:
            self._add(encode(kind, call, parcel, meta=meta, seals=self._seals), ())

    def send(self, kind: int, call: int, parcel: Parcel, meta: bytes) -> bool:
        """Posts a frame and flushes; returns whether all was sent.

        Raises:
            NothingSentError: The connection broke before any byte of this frame was taken.
            OSError: The connection broke.
        """
        data = parcel.pickle
        if not parcel.buffers and self._seals is None and len(data) <= SMALL_BYTES:
            # What most frames are: worth a way of its own.
            chunk = encode_small(kind, call, meta, data)
            with self._write_lock:
                if self.unsent_bytes or self._is_held_back or self.is_closed:
                    self._add([chunk], ())
                    return self._flush()
                try:
                    sent = self.carrier.send((chunk,))
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    raise NothingSentError(str(error)) from error
                except BaseException:
                    self.carrier.shut()  # how much went is not known
                    raise
                if sent == len(chunk):
                    self._is_held_back = self.carrier.holds_back
                    return not self._is_held_back
                self._chunks.append((memoryview(chunk)[sent:], ()))
                self.unsent_bytes += len(chunk) - sent
                return False
        self.post(kind, call, parcel, meta=meta)
        return self.flush()

    def _add(self, chunks: list[Chunk], descriptors: Sequence[int]) -> None:
        if self.is_closed:
            _close_all(descriptors)
            return
        if len(chunks) == 1 and not descriptors:
            size = len(chunks[0])
            self._batch.append(chunks[0])
            self._batch_bytes += size
            self.unsent_bytes += size
            if self._batch_bytes >= _BATCH_BYTES:
                self._end_batch()
            return
        self._end_batch()
        for chunk in chunks:
            if len(chunk):
                self._chunks.append((chunk, descriptors))
                self.unsent_bytes += len(chunk)
                descriptors = ()

    def _end_batch(self) -> None:
        batch = self._batch
        if batch:
            self._chunks.append((batch[0] if len(batch) == 1 else b"".join(batch), ()))
            self._batch = []
            self._batch_bytes = 0

    def flush(self) -> bool:
        """Sends what can be sent now; returns whether that was all.

        Raises:
            OSError: The connection broke.
        """
        with self._write_lock:
            return self._flush() if not self.is_closed else True

    def _flush(self) -> bool:
        self._end_batch()
        chunks, carrier = self._chunks, self.carrier
        try:
            while chunks:
                first, descriptors = chunks[0]
                if descriptors or len(chunks) == 1:
                    sent = carrier.send((first,), descriptors)
                    _close_all(descriptors)
                    chunks[0] = (first, ())
                else:
                    sent = carrier.send(_plain_run(chunks))
                self._drop(sent)
        except BlockingIOError:
            return False
        except BaseException:
            # A Ctrl-C: how much went is not known, and nothing must go twice.
            carrier.shut()
            raise
        self._is_held_back = carrier.holds_back
        return not self._is_held_back

    def _drop(self, sent: int) -> None:
        self.unsent_bytes -= sent
        chunks = self._chunks
        while sent:
            chunk, descriptors = chunks[0]
            if sent < len(chunk):
                chunks[0] = (memoryview(chunk)[sent:], descriptors)
                return
            sent -= len(chunk)
            chunks.popleft()

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """Receives what is there; returns the frames that are complete.

        Returns:
            None at the end of the connection.

        Raises:
            BlockingIOError: Nothing is there, and `wait` is false.
            OSError: The connection broke.
            ProtocolError: The peer does not keep to the protocol. If good frames came before, they
                are returned, and `check` raises.
            AuthenticationError: A frame is not the peer's; the same.
        """
        reader = self._reader
        count = self.carrier.receive(reader.room(), wait=wait)
        return reader.filled(count) if count else None

    def check(self) -> None:
        """Raises what is wrong behind the frames that were received last; see `receive`."""
        self._reader.check()

    def tidy(self) -> None:
        """Gives back what was not used for long. For whoever receives."""
        if self._pool is not None:
            self._pool.tidy()
        if self._map is not None:
            self._map.tidy()

    def shut(self) -> None:
        """Ends the connection; whoever reads wakes up."""
        self.carrier.shut()

    def close(self) -> None:
        """Gives everything back; only when nobody reads any more."""
        with self._write_lock:
            self.is_closed = True
            for _, descriptors in self._chunks:
                _close_all(descriptors)
            self._chunks.clear()
            self._batch.clear()
            self.unsent_bytes = 0
            self._is_held_back = False
        if self._pool is not None:
            self._pool.close()
        if self._map is not None:
            self._map.close()
        self.carrier.close()


def _plain_run(chunks: Sequence[tuple[Chunk, Sequence[int]]]) -> list[Chunk]:
    """Returns the first chunks up to one that descriptors go with."""
    run: list[Chunk] = []
    for chunk, descriptors in chunks:
        if descriptors or len(run) == 64:
            break
        run.append(chunk)
    return run


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
