"""Frames over a pair of descriptors: launcher to agent, agent to worker.

    u32 length of head | u64 length of body | head: JSON | body: any bytes

The head says what happened ("op" and its fields), the body carries what only
the ends understand: pickled work, output. Both ends belong to one program and
share a private pipe, so there is nothing to prove.
"""

import collections
import json
import math
import os
import selectors
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

#: What the agent of the launcher's machine says before its first frame. Elsewhere `boot` has its own:
#: it travels as text, and to import it takes longer than a launch has.
MARKER = b"\0agent of launchpad-lite\0"
_HEADER = struct.Struct("!IQ")
_READ_BYTES = 1 << 18
#: How much is remembered of what comes before the first frame.
_PROLOGUE_BYTES = 4096
#: Signs of life that both ends give within the time after which silence means that the link is cut.
SIGNS_PER_SILENCE = 4
#: Who wakes up so many seconds too late was stopped, or asleep.
OVERSLEPT_S = 1.0


class Reach(Protocol):
    """What reaches an agent and passes bytes on: a process, or what behaves as one.

    As `subprocess.Popen`, of which it is a part. `wait` raises `subprocess.TimeoutExpired`.
    """

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit code."""

    def terminate(self) -> None:
        """Makes it end."""

    def kill(self) -> None:
        """Ends it at once."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        op: What it says.
        fields: Details that JSON can hold.
        body: Bytes that go with it.
    """

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def encode(self) -> bytes:
        """Returns its bytes."""
        head = json.dumps({"op": self.op, **self.fields}).encode()
        return _HEADER.pack(len(head), len(self.body)) + head + self.body


class FrameDecoder:
    """Finds the frames in a stream of bytes, however it is cut.

    Attributes:
        awaited: The first frame comes after these bytes; none once they have come. What stands before
            them is passed over: an interpreter, or a shell, may print while it starts.
    """

    def __init__(self, awaited: bytes = b"") -> None:
        self.awaited = awaited
        self._buffer = bytearray()

    @property
    def prologue(self) -> bytes:
        """The last of what came, while the first frame is awaited."""
        return bytes(self._buffer) if self.awaited else b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Takes in bytes and yields the frames that are complete."""
        self._buffer += data
        if self.awaited:
            before, found, after = self._buffer.partition(self.awaited)
            self._buffer = after if found else before[-_PROLOGUE_BYTES:]
            if not found:
                return
            self.awaited = b""
        while (frame := self._take()) is not None:
            yield frame

    def _take(self) -> Frame | None:
        if len(self._buffer) < _HEADER.size:
            return None
        head_bytes, body_bytes = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + head_bytes + body_bytes
        if len(self._buffer) < end:
            return None
        fields = json.loads(self._buffer[_HEADER.size : _HEADER.size + head_bytes])
        body = bytes(self._buffer[_HEADER.size + head_bytes : end])
        del self._buffer[:end]
        return Frame(fields.pop("op"), fields, body)


class FrameReader:
    """Frames from a blocking descriptor, waited for no longer than one likes. For one thread."""

    def __init__(self, fd: int, awaited: bytes = b"") -> None:
        self._fd = fd
        self.decoder = FrameDecoder(awaited)
        self._frames: collections.deque[Frame] = collections.deque()
        #: Monotonic time at which anything came last.
        self.last_read_at = -math.inf

    def read(self, give_up_at: float = math.inf) -> Frame | None:
        """Returns the next frame; None when the other end is closed.

        Args:
            give_up_at: Monotonic time.

        Raises:
            TimeoutError: None has come by then.
        """
        while not self._frames:
            if not (data := self._read_some(give_up_at)):
                return None
            self._frames += self.decoder.feed(data)
        return self._frames.popleft()

    def begin(self, give_up_at: float) -> None:
        """Waits until what the decoder awaits has come.

        Raises:
            EOFError: The other end was closed before.
            TimeoutError: It has not come by then.
        """
        while self.decoder.awaited:
            if not (data := self._read_some(give_up_at)):
                raise EOFError
            self._frames += self.decoder.feed(data)

    def _read_some(self, give_up_at: float) -> bytes:
        left = give_up_at - time.monotonic()
        if not math.isinf(left):
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                if not selector.select(max(0.0, left)):
                    raise TimeoutError
        data = read_some(self._fd)
        self.last_read_at = time.monotonic()
        return data


def read_some(fd: int) -> bytes:
    """Waits for bytes and returns them; none when the other end is closed."""
    try:
        return os.read(fd, _READ_BYTES)
    except (ConnectionResetError, OSError):
        return b""


def write_all(fd: int, data: bytes) -> bool:
    """Writes to a blocking descriptor; returns False if it has no reader any more."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        return False
    return True


class Outbox:
    """Bytes on their way to a descriptor that must never block its writer."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()
        self.broken = False
        #: Bytes that were written.
        self.written = 0

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, frame: Frame) -> None:
        """Adds a frame and writes what fits."""
        self._buffer += frame.encode()
        self.flush()

    def flush(self) -> None:
        """Writes what fits; drops everything when there is no reader any more."""
        try:
            while self._buffer and not self.broken:
                written = os.write(self.fd, memoryview(self._buffer)[:_READ_BYTES])
                del self._buffer[:written]
                self.written += written
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        if self.broken:
            self._buffer.clear()
