"""A channel sends and receives frames over one proven connection, on either side."""

import collections
import hashlib
import os
import threading
from collections.abc import Sequence
from threading import get_ident

from courier._timing import DEFAULT, Timing
from courier.errors import CourierError
from courier.threads.locks import Lock
from courier.values.frozen import AVAILABLE
from courier.values.parcel import NO_PARCEL, Parcel
from courier.wire._segments import SegmentMap, SegmentPool
from courier.wire.carrier import DONTWAIT, MAX_CHUNKS, SocketCarrier, UnixCarrier
from courier.wire.frames import (
    SMALL_BYTES,
    Chunk,
    Frame,
    FrameReader,
    Layout,
    Seals,
    SmallFrame,
    encode,
    pack_header,
)

#: Small frames are gathered up to here before they are sent.
_BATCH_BYTES = 1 << 16
_NOT_BLOCKING = (False,)
#: The places of no buffers, and their descriptors.
_ALL_INLINE: tuple[None, tuple[()]] = (None, ())


def try_to_take(lock: threading.Lock, note: list[bool]) -> None:
    """Takes a lock if it is free, and notes whether it was: for a `finally` that releases it."""
    # Inside of extend(), no Ctrl-C can come between the lock and its note.
    note.extend(map(lock.acquire, _NOT_BLOCKING))


class BrokenError(ConnectionError):
    """The connection broke, or the peer broke the protocol."""


class NothingSentError(BrokenError):
    """The connection broke before any byte of a frame was taken."""


def _is_own(error: BaseException) -> bool:
    """Returns whether an error comes from the connection.

    A signal handler may raise TimeoutError, say, at any step, which is none.
    """
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module != "ssl" and not module.startswith("courier."):
            return False
        trace = trace.tb_next
    return isinstance(error, OSError | CourierError)


class Channel:
    """Frames over a carrier. Any thread may post and flush; one at a time receives."""

    def __init__(
        self, carrier: SocketCarrier, receive_key: bytes, send_key: bytes, timing: Timing = DEFAULT
    ) -> None:
        """Wraps a carrier whose peer has proved itself. The keys seal frames, if it is exposed."""
        self.carrier = carrier
        #: The same number on both sides, which tells nothing of the keys.
        both = hashlib.blake2b(min(receive_key, send_key), digest_size=4, person=b"courier tag")
        self.tag = int.from_bytes(both.digest(), "little")
        self._pool: SegmentPool | None = None
        self._map: SegmentMap | None = None
        if isinstance(carrier, UnixCarrier) and AVAILABLE:
            self._pool = SegmentPool(timing.segment_idle_s)
            self._map = SegmentMap(carrier.take_descriptors)
        self._reader = FrameReader(
            self._map.map if self._map is not None else None,
            Seals(receive_key) if carrier.is_exposed else None,
        )
        self._seals = Seals(send_key) if carrier.is_exposed else None
        self._send_now = carrier.send_now
        self._queue_lock = Lock()
        #: Held by the one thread that sends; the others leave their frames to it.
        self._sending = Lock()
        #: Idents of the threads that post or flush. A signal handler or finaliser in one of them
        #: must do neither, because the interrupted code holds locks.
        self.busy: dict[int, None] = {}
        #: Chunks to send, each with its descriptors.
        self._chunks: collections.deque[tuple[Chunk, Sequence[int]]] = collections.deque()
        #: Frames so small that several become one chunk.
        self._batch: list[Chunk] = []
        self._batch_bytes = 0
        #: Bytes that wait to be sent; read without the lock, as an estimate.
        self.unsent_bytes = 0
        self.is_shut = False
        self.is_closed = False

    @property
    def is_pending(self) -> bool:
        return self.unsent_bytes > 0

    def post(self, kind: int, call: int, parcel: Parcel = NO_PARCEL, *, meta: bytes = b"") -> None:
        me = get_ident()
        self.busy[me] = None
        try:
            layout, descriptors = self._place(parcel) if parcel.buffers else _ALL_INLINE
            with self._queue_lock:  # frames are sent in the order of their seals
                chunks = encode(kind, call, parcel, meta=meta, layout=layout, seals=self._seals)
                self._put(chunks, descriptors)
        except BaseException as error:  # noqa: BLE001
            raise self._ended_by(error)  # noqa: B904 - it has its cause
        finally:
            self.busy.pop(me, None)  # a signal handler may have run this, too

    def _ended_by(self, error: BaseException) -> BaseException:
        """Returns what to raise for an error that ended sending."""
        if not _is_own(error):
            self.shut()  # a Ctrl-C, say: half a frame may be sent, and nothing must follow it
        elif not isinstance(error, BrokenError):
            broken = BrokenError(str(error))
            broken.__cause__ = error
            return broken
        return error

    def _place(self, parcel: Parcel) -> tuple[Layout | None, Sequence[int]]:
        return self._pool.place(parcel) if self._pool is not None else _ALL_INLINE

    def send(self, kind: int, call: int, parcel: Parcel, meta: bytes) -> bool:
        """Posts a frame and flushes. NothingSentError: none of its bytes was taken."""
        data = parcel.pickle
        me = get_ident()
        self.busy[me] = None
        try:
            sending = self._sending
            is_small = not parcel.buffers and len(data) <= SMALL_BYTES
            if not is_small or self._send_now is None or sending.locked():
                return self._send(kind, call, parcel, meta)
            # Written out for nearly all calls: each function call would take a third of the time of
            # the system call. Another thread holds the lock only for an instant.
            with sending:
                if self.unsent_bytes or self.is_closed:
                    sent = 0
                else:
                    frame = pack_header(kind, 0, len(meta), 0, call, len(data)) + meta + data
                    try:
                        sent = self._send_now(frame, DONTWAIT)
                    except BaseException as error:  # noqa: BLE001 - raised there
                        sent = self._find_nothing_sent(error)
                    if sent < len(frame):
                        self._keep((frame,), sent)
                        sent = len(frame)
            if not sent:
                return self._send(kind, call, parcel, meta)
            # Another thread may have found the lock taken, and queued its frames.
            return not self.unsent_bytes or self._flush()
        except BaseException as error:  # noqa: BLE001
            raise self._ended_by(error)  # noqa: B904 - it has its cause
        finally:
            self.busy.pop(me, None)  # a signal handler may have run this, too

    def _send(self, kind: int, call: int, parcel: Parcel, meta: bytes) -> bool:
        """Sends a frame past the queue if that is empty, otherwise behind what waits there."""
        layout, descriptors = self._place(parcel) if parcel.buffers else _ALL_INLINE
        turn: list[bool] = []
        try:
            try_to_take(self._sending, turn)
            with self._queue_lock:  # as in `post`
                if self.is_closed:
                    _close_all(descriptors)
                    raise NothingSentError("the connection is closed")
                chunks = encode(kind, call, parcel, meta=meta, layout=layout, seals=self._seals)
                is_next = turn[0] and not self.is_pending and len(chunks) <= MAX_CHUNKS
                if not is_next:
                    self._put(chunks, descriptors)
            if is_next:
                self._send_directly(chunks, descriptors)
        finally:
            if turn and turn[0]:
                self._sending.release()
        return self._flush()  # also after a sent frame, as above

    def _send_directly(self, chunks: Sequence[Chunk], descriptors: Sequence[int] = ()) -> None:
        """Sends as much of a frame as goes now, past the empty queue."""
        try:
            sent = self.carrier.send(chunks, descriptors)
        except BaseException as error:  # noqa: BLE001 - raised there
            sent = self._find_nothing_sent(error, descriptors)
        if sent:
            _close_all(descriptors)
            descriptors = ()
        self._keep(chunks, sent, descriptors)

    def _find_nothing_sent(self, error: BaseException, descriptors: Sequence[int] = ()) -> int:
        """Returns 0 if the connection is full; raises NothingSentError if it broke."""
        is_own = _is_own(error)
        if is_own and isinstance(error, BlockingIOError):
            return 0
        _close_all(descriptors)
        if is_own:
            raise NothingSentError(str(error)) from error
        raise error  # it is not known how much was sent

    def _keep(self, chunks: Sequence[Chunk], sent: int, descriptors: Sequence[int] = ()) -> None:
        """Puts the rest of a frame at the head of the queue."""
        rest: list[tuple[Chunk, Sequence[int]]] = []
        for chunk in chunks:
            if sent < len(chunk):
                rest.append((memoryview(chunk)[sent:], descriptors))
                descriptors = ()
            sent = max(0, sent - len(chunk))
        if rest:
            with self._queue_lock:
                # Others may have queued frames meanwhile.
                self._chunks.extendleft(reversed(rest))
                self.unsent_bytes += sum(len(chunk) for chunk, _ in rest)

    def _put(self, chunks: list[Chunk], descriptors: Sequence[int]) -> None:
        if self.is_closed:
            _close_all(descriptors)
            return
        if len(chunks) == 1 and not descriptors:
            size = len(chunks[0])
            self._batch += chunks
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
        """Sends as much as goes now, unless another thread does so already.

        Threads do not queue for the socket: at each system call under a lock they would wait for
        each other, and for the interpreter's lock too, thousands of answers long. Returns whether
        nothing is left to do here. Raises BrokenError.
        """
        me = get_ident()
        self.busy[me] = None
        try:
            return self._flush()
        except BaseException as error:  # noqa: BLE001
            raise self._ended_by(error)  # noqa: B904 - it has its cause
        finally:
            self.busy.pop(me, None)  # a signal handler may have run this, too

    def _flush(self) -> bool:
        while self.is_pending and not self.is_closed:
            turn: list[bool] = []
            try:
                try_to_take(self._sending, turn)
                if not turn[0]:
                    return True
                if not self._send_all():
                    return False
            finally:
                if turn and turn[0]:
                    self._sending.release()
            # Once more: another thread may have found it locked just before.
        return True

    def _send_all(self) -> bool:
        carrier = self.carrier
        try:
            while run := self._next_run():
                chunks, descriptors = run
                sent = carrier.send(chunks, descriptors)
                self._drop(sent)
        except BaseException as error:
            if isinstance(error, BlockingIOError) and _is_own(error):
                return False
            self.shut()  # it is not known how much was sent, and nothing must be sent twice
            raise
        return True

    def _next_run(self) -> tuple[list[Chunk], Sequence[int]] | None:
        with self._queue_lock:
            self._end_batch()
            if not self._chunks:
                return None
            first, descriptors = self._chunks[0]
            if descriptors:
                return [first], descriptors
            run: list[Chunk] = []
            for chunk, its_descriptors in self._chunks:
                if its_descriptors or len(run) == MAX_CHUNKS:
                    break
                run.append(chunk)
            return run, ()

    def _drop(self, sent: int) -> None:
        """Removes sent bytes, and any descriptors of the first chunk, from the queue."""
        with self._queue_lock:
            self.unsent_bytes -= sent
            chunks = self._chunks
            while sent:
                chunk, descriptors = chunks.popleft()
                _close_all(descriptors)
                if sent < len(chunk):
                    chunks.appendleft((memoryview(chunk)[sent:], ()))
                    return
                sent -= len(chunk)

    def receive(self, *, wait: bool) -> SmallFrame | list[Frame] | None:
        """Receives data; returns complete frames, or None at the end of the connection.

        A small frame that came alone, without buffers, as nearly all do, is a tuple. Raises
        BlockingIOError if nothing is there and `wait` is false; BrokenError if the connection
        broke, the peer broke the protocol, or a frame is not the peer's. If good frames came
        before, they are returned, and `check` raises.
        """
        reader = self._reader
        try:
            count = self.carrier.receive(reader.room, wait=wait)
            if not count:
                return None
            return reader.small(count) or reader.filled(count)
        except (OSError, CourierError) as error:
            if isinstance(error, BlockingIOError) or not _is_own(error):
                raise
            raise BrokenError(str(error)) from error

    def check(self) -> None:
        """Raises the BrokenError after the last received frames; see `receive`."""
        try:
            self._reader.check()
        except CourierError as error:
            raise BrokenError(str(error)) from error

    def tidy(self) -> bool:
        """Frees memory that was not used for long; returns whether some is left. For the reader."""
        left = [each.tidy() for each in (self._pool, self._map) if each is not None]
        return any(left)

    def shut(self) -> None:
        self.is_shut = True
        self.carrier.shut()

    def close(self) -> None:
        """Closes the connection; only when no thread reads any more."""
        with self._sending, self._queue_lock:
            self.is_closed = True
            for _, descriptors in self._chunks:
                _close_all(descriptors)
            self._chunks.clear()
            self._batch.clear()
            self.unsent_bytes = 0
        if self._pool is not None:
            self._pool.close()
        if self._map is not None:
            self._map.close()
        self.carrier.close()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
