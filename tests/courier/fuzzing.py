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

import courier
from courier._engine.frames import Chunk, Frame, FrameReader, Kind, Seals, encode
from courier._engine.handshake import (
    LENGTH,
    NO_NAME,
    ClientHandshake,
    Introduction,
    Purpose,
    SessionKeys,
    prefix,
)
from courier._parcel import Parcel
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
            room = reader.room()
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


# Peers


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("hung up")
        data += piece
    return data


def receive_welcome(sock: socket.socket) -> bytes:
    return receive(sock, *LENGTH.unpack(receive(sock, LENGTH.size)))


def shake_hands(
    sock: socket.socket, secret: courier.Secret | None, server: bytes = NO_NAME
) -> tuple[Introduction, SessionKeys]:
    """Proves itself to a server by hand."""
    handshake = ClientHandshake(secret, server)
    sock.sendall(prefix(Purpose.CALLS) + handshake.hello())
    proof, introduction, keys = handshake.prove(receive_welcome(sock))
    sock.sendall(proof)
    return introduction, keys


def introduction_of(server: courier.Server) -> Introduction:
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        return shake_hands(sock, server.secret)[0]


class Way:
    """A way to a server: its port, or its unix socket."""

    def __init__(self, server: courier.Server, name: str) -> None:
        self.is_local = name == "unix"
        self.server = server
        self._introduction = introduction_of(server)

    def connect(self) -> socket.socket:
        if not self.is_local:
            return socket.create_connection(("127.0.0.1", self.server.port), 10)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect(self._introduction.local)
        return sock

    def connect_proven(self) -> tuple[socket.socket, Seals | None]:
        """Connects and shakes hands; returns what seals the frames that are sent."""
        sock = self.connect()
        _, keys = shake_hands(sock, self.server.secret)
        return sock, None if self.is_local else Seals(keys.requests)


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


def segments(pid: int | str = "self") -> list[str]:
    """Returns the shared segments that a process maps, or has open."""
    mapped = [
        line.split(maxsplit=5)[-1]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:courier" in line
    ]
    return mapped + [target for target in descriptors(pid) if "memfd:courier" in target]


def socket_names() -> list[str]:
    """Returns the names of all unix sockets of this machine that are ours."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [name for line in lines if "courier" in (name := line.split()[-1])]


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
