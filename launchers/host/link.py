"""Frames over a pair of descriptors: launcher to agent, agent to worker.

    u32 length of head | u64 length of body | head: JSON | body: any bytes

The head says what happened ("op" and its fields). The body carries bytes that only the ends interpret:
pickled work, output. Both ends belong to one program and share a private pipe, so neither authenticates.
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

#: The agent of this machine sends it first. `boot`, whose import would delay a launch, has another.
MARKER = b"\0agent of launchpad-lite\0"
_HEADER = struct.Struct("!IQ")
_READ_BYTES = 1 << 18
#: How many bytes are kept of what comes before the first frame.
_PROLOGUE_BYTES = 4096
#: How many messages each end sends within the silence after which a link counts as cut.
SIGNS_PER_SILENCE = 4
#: A process that wakes up so many seconds too late was stopped, or its machine slept.
OVERSLEPT_S = 1.0


class Reach(Protocol):
    """Carries bytes to and from an agent: a part of `subprocess.Popen` with pipes, and its exceptions."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit code."""

    def terminate(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it at once."""


@dataclass(frozen=True)
class LinkFrame:
    """One message: its kind, details that JSON can hold, and bytes that go with it."""

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def encode(self) -> bytes:
        head = json.dumps({"op": self.op, **self.fields}).encode()
        return _HEADER.pack(len(head), len(self.body)) + head + self.body


class FrameDecoder:
    """Finds frames in a stream of bytes; ignores what shells print before `awaited` comes."""

    def __init__(self, awaited: bytes = b"") -> None:
        self.awaited = awaited
        self._buffer = bytearray()

    @property
    def prologue(self) -> bytes:
        """The last bytes that came before `awaited`; empty once that has come."""
        return bytes(self._buffer) if self.awaited else b""

    def feed(self, data: bytes) -> Iterator[LinkFrame]:
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

    def _take(self) -> LinkFrame | None:
        if len(self._buffer) < _HEADER.size:
            return None
        head_bytes, body_bytes = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + head_bytes + body_bytes
        if len(self._buffer) < end:
            return None
        fields = json.loads(self._buffer[_HEADER.size : _HEADER.size + head_bytes])
        body = bytes(self._buffer[_HEADER.size + head_bytes : end])
        del self._buffer[:end]
        return LinkFrame(fields.pop("op"), fields, body)


class LinkReader:
    """Reads frames from a blocking descriptor, with a time limit. For one thread."""

    def __init__(self, fd: int, awaited: bytes = b"") -> None:
        self._fd = fd
        self.decoder = FrameDecoder(awaited)
        self._frames: collections.deque[LinkFrame] = collections.deque()
        #: Monotonic time at which bytes came last.
        self.last_read_at = -math.inf

    def read(self, give_up_at: float = math.inf) -> LinkFrame | None:
        """Returns the next frame; None when the other end is closed. It may raise TimeoutError."""
        while not self._frames:
            if not self._take_in(give_up_at):
                return None
        return self._frames.popleft()

    def begin(self, give_up_at: float) -> None:
        """Waits for the bytes before the first frame. EOFError: the other end was closed first."""
        while self.decoder.awaited:
            if not self._take_in(give_up_at):
                raise EOFError

    def _take_in(self, give_up_at: float) -> bool:
        """Reads and decodes what comes; returns False when the other end is closed."""
        left = give_up_at - time.monotonic()
        if not math.isinf(left):
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                if not selector.select(max(0.0, left)):
                    raise TimeoutError
        data = read_some(self._fd)
        self.last_read_at = time.monotonic()
        self._frames += self.decoder.feed(data)
        return bool(data)


def read_some(fd: int) -> bytes:
    """Waits for bytes and returns them; none when the other end is closed."""
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:
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


class SendBuffer:
    """Buffers bytes for a descriptor, so that its writer never blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()
        self.broken = False
        #: Bytes that were written.
        self.written = 0

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, frame: LinkFrame) -> None:
        """Adds a frame and writes what fits."""
        self.add(frame.encode())

    def add(self, data: bytes) -> None:
        self._buffer += data
        self.flush()

    def flush(self) -> None:
        """Writes what fits; drops everything when there is no reader any more."""
        try:
            while self._buffer and not self.broken:
                written = self._write(memoryview(self._buffer))
                del self._buffer[:written]
                self.written += written
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        if self.broken:
            self._buffer.clear()

    def _write(self, data: memoryview) -> int:
        return os.write(self.fd, data[:_READ_BYTES])
