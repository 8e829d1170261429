"""Peers that do not keep to the protocol, and a look at what a process holds."""

import contextlib
import gc
import os
import random
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import courier
from courier.values.parcel import Parcel
from courier.wire.frames import _HEADER, Chunk, Frame, FrameReader, Kind, Seals, encode
from tests.courier.by_hand import Stranger, connected
from tests.courier.waiting import wait_until

#: Threads that wait for work a while, and then end, and the one that comes with the first work.
_POOLS = ("courier-handler", "courier-control", "courier-transfer", "courier-watch")
#: Nothing that a stranger sends may cost more than this for long.
_SLACK_BYTES = 64 << 20


# Bytes


def joined(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def call_frame(
    number: int, data: bytes, method: bytes = b"hit", seals: Seals | None = None
) -> bytes:
    return joined(encode(Kind.CALL, number, Parcel(data), meta=method, seals=seals))


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Cuts data into pieces of these sizes, over and over."""
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


def feed(reader: FrameReader, pieces: Iterable[bytes]) -> Iterator[Frame]:
    """Has a reader receive these pieces, one after another."""
    for piece in pieces:
        left = memoryview(piece)
        while left:
            room = reader.room
            assert len(room), "a reader that has no room waits for ever"
            count = min(len(room), len(left))
            room[:count] = left[:count]
            left = left[count:]
            yield from reader.filled(count)


_EXTREMES = (
    0,
    1,
    0x7F,
    0xFF,
    0xFFFF,
    1 << 24,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 56,
    (1 << 64) - 1,
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Changes bytes here and there."""
    changed = bytearray(data or b"\0")
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(7):
            case 0 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 1 if changed:
                changed[at] = chance.randrange(256)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + chance.randrange(1, 32)]
            case 4:
                changed[at:at] = chance.randbytes(chance.randrange(1, 64))
            case 5:
                changed[at:at] = changed[at : at + chance.randrange(1, 64)]
            case _:
                width = chance.choice((1, 2, 4, 8))
                value = chance.choice(_EXTREMES) & ((1 << 8 * width) - 1)
                changed[at : at + width] = value.to_bytes(width, "little")
    return bytes(changed)


def small_heads(chance: random.Random) -> bytes:
    """Frames that announce little, so that something becomes complete."""
    return b"".join(
        _HEADER.pack(
            chance.randrange(32),
            chance.choice((0, 0, 0, 1, 2)),
            chance.choice((0, 0, 3, 20)),
            chance.choice((0, 0, 1, 2)),
            chance.randrange(4),
            chance.randrange(64),
        )
        + chance.randbytes(chance.randrange(100))
        for _ in range(3)
    )


# Peers


class Target:
    """What strangers would like to call."""

    def __init__(self) -> None:
        self.calls = 0

    def hit(self, *_: Any) -> int:
        self.calls += 1
        return self.calls

    def alive(self) -> str:
        return "yes"

    def items(self) -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(1000)

    def large(self) -> bytes:
        return bytes(5 << 20)


class Way:
    """A way to a server: its port, or its unix socket."""

    def __init__(self, server: courier.Server, name: str) -> None:
        self.server = server
        self.name = name
        self.unix = ""
        with Stranger(server.address, server.secret) as scout:
            scout.send([scout.proof])
            if name == "unix":
                self.unix = scout.introduction.local

    def connect(self) -> socket.socket:
        return connected(self.server.address, self.unix)

    def connect_proven(self) -> tuple[socket.socket, Seals | None]:
        """Connects and shakes hands; returns what seals the frames that are sent."""
        stranger = Stranger(self.server.address, self.server.secret, unix=self.unix)
        stranger.send([stranger.proof])
        return stranger.socket, stranger.seals


def send_anyway(sock: socket.socket, data: bytes) -> None:
    """Sends to a peer who may have hung up, for good reasons."""
    with contextlib.suppress(OSError):
        sock.sendall(data)


def slam(sock: socket.socket) -> None:
    """Closes so that the peer gets a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def is_hung_up(sock: socket.socket) -> bool:
    """Waits for the peer to hang up, whatever it says before."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


# Processes


def resident_bytes(pid: int | str = "self") -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def descriptors(pid: int | str = "self") -> list[str]:
    """Returns what the open descriptors of a process lead to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return found


def connections() -> int:
    """Returns how many sockets are open here."""
    return sum(target.startswith("socket:") for target in descriptors())


def segments(pid: int | str = "self") -> list[str]:
    """Returns the shared segments that a process maps, or has open."""
    mapped = [
        line.split(maxsplit=5)[-1]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:courier" in line
    ]
    return mapped + [target for target in descriptors(pid) if "memfd:courier" in target]


def _lasting_threads() -> int:
    return sum(not thread.name.startswith(_POOLS) for thread in threading.enumerate())


@contextlib.contextmanager
def nothing_left(slack_bytes: int = _SLACK_BYTES) -> Iterator[None]:
    """Fails if more threads, descriptors, segments or memory are in use afterwards."""
    threads, files, memory = _lasting_threads(), len(descriptors()), resident_bytes()
    mapped = len(segments())
    yield
    # Exceptions and their tracebacks hold one another, and what was on its way with them.
    gc.collect()
    wait_until(lambda: len(descriptors()) <= files)
    wait_until(lambda: _lasting_threads() <= threads)
    wait_until(lambda: len(segments()) <= mapped)
    assert resident_bytes() < memory + slack_bytes
