"""Bytes without frames, by connections of their own, whose peers have proved themselves."""

import contextlib
import queue
import select
import threading
from collections import deque
from collections.abc import Iterator

from courier.errors import ServerLostError
from courier.threads.forks import survive
from courier.wire.carrier import SocketCarrier
from courier.wire.frames import Chunk
from courier.wire.watching import READ, WRITE, Spin

#: Bytes that are sent before it receives again.
_PIECE_BYTES = 1 << 18


class ByteStream:
    """One end of a connection that carries bytes. For one thread, except `shut`.

    Example:
        stream = lowlevel.open_stream(client, "take_frames", "camera")
        stream.where = "the camera"
    """

    def __init__(self, carrier: SocketCarrier) -> None:
        """Takes over a carrier."""
        #: The peer, for errors.
        self.where = carrier.peer
        self._carrier = carrier
        self.fileno = carrier.fileno
        #: Ends the connection, which wakes a thread that waits for it. Thread-safe.
        self.shut = carrier.shut
        survive(self)

    def send(self, data: Chunk) -> int:
        """Sends as much as goes now; returns how many bytes. Raises ServerLostError."""
        try:
            return self._carrier.send((data,))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, room: memoryview) -> int:
        """Receives what is there now; returns how many bytes. Raises ServerLostError."""
        try:
            received = self._carrier.receive(room, wait=False)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if not received:
            raise self._lost("the other side closed it, or is silent")
        return received

    def _lost(self, reason: object) -> ServerLostError:
        return ServerLostError(f"{self.where}: the connection broke: {reason}")

    def _survive_fork(self) -> None:
        self._carrier.close()


class Duplex:
    """Sends by one stream while it receives from another. For one thread.

    Example:
        both = lowlevel.Duplex(stream, stream)
        both.send(memoryview(b"frames"))
        both.receive(memoryview(answer))
    """

    def __init__(self, out: ByteStream, into: ByteStream) -> None:
        self._out, self._into = out, into
        self._unsent: deque[memoryview] = deque()
        #: What another thread sends, while there is one; and its error.
        self._queue: queue.SimpleQueue[memoryview | None] | None = None
        self._error: BaseException | None = None
        self._spin = Spin()

    @contextlib.contextmanager
    def sending(self, *, aside: bool) -> Iterator[None]:
        """Sends, in a context, at whose end all is sent; `aside`: by another thread."""
        if not aside:
            yield
            self._flush()
            return
        queued = self._queue = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._send_queued, args=(queued,), name="courier-sender", daemon=True
        )
        thread.start()
        try:
            yield
        except BaseException:
            self._out.shut()  # the thread may wait for a peer that reads no more
            raise
        finally:
            self._queue = None
            queued.put(None)
            thread.join()
            if self._error is not None:
                raise self._error

    def _send_queued(self, queued: "queue.SimpleQueue[memoryview | None]") -> None:
        both = Duplex(self._out, self._into)
        try:
            while (data := queued.get()) is not None:
                both.send(data)
                both._flush()
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._error = error
            self._into.shut()  # which wakes it

    def send(self, data: memoryview) -> None:
        """Sends bytes, which must not change until `sending` has ended."""
        if self._queue is not None:
            self._queue.put(data)
        else:
            self._unsent.append(data)

    def receive(self, room: memoryview) -> None:
        """Fills `room`. Raises ServerLostError, as `sending` does."""
        while room:
            sent = self._send_some()
            count = self._into.receive(room)
            room = room[count:]
            if not (count or sent):
                self._wait(self._into, READ)

    def _flush(self) -> None:
        while self._unsent:
            if not self._send_some():
                self._wait(self._out, WRITE)

    def _send_some(self) -> int:
        if not self._unsent:
            return 0
        data = self._unsent[0]
        sent = self._out.send(data[:_PIECE_BYTES])
        if sent == len(data):
            self._unsent.popleft()
        else:
            self._unsent[0] = data[sent:]
        return sent

    def _wait(self, stream: ByteStream, events: int) -> None:
        wanted = {self._out: WRITE} if self._unsent else {}
        wanted[stream] = wanted.get(stream, 0) | events  # they may be one
        poll = select.poll()
        for each, its_events in wanted.items():
            poll.register(each, its_events)
        if not self._spin.look(poll.poll):
            poll.poll()
