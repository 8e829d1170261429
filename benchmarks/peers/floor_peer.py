"""The floor: frames over a raw socket, nothing else.

A frame is the number of a handler, the length of what follows, and that. Echoes send back what is
in the buffer they received into; no memory is taken per call. What is shared lies in a file in
memory that readers map.
"""

import contextlib
import mmap
import os
import signal
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import harness

_HEAD = struct.Struct("!BQ")
_NAMES = ("echo", "echo_array", "prepare", "snapshot", "shared", "burn")
#: Up to here one send of a copy is faster than two sends.
_JOIN_BYTES = 1 << 16

_file: IO[bytes]


class _Connection:
    """Sends and receives frames."""

    def __init__(self, connected: socket.socket) -> None:
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._reader = connected.makefile("rb", _JOIN_BYTES)
        self._buffer = memoryview(bytearray(_JOIN_BYTES))

    def send(self, number: int, data: Any) -> None:
        """Sends a frame."""
        head = _HEAD.pack(number, len(data))
        if len(data) < _JOIN_BYTES:
            self._socket.sendall(head + data)
        else:
            self._socket.sendall(head)
            self._socket.sendall(data)

    def send_many(self, number: int, data: bytes, times: int) -> None:
        """Sends the same frame many times at once."""
        self._socket.sendall((_HEAD.pack(number, len(data)) + data) * times)

    def receive(self) -> tuple[int, memoryview]:
        """Receives a frame, which is valid until the next one; raises EOFError at the end."""
        head = self._reader.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise EOFError
        number, length = _HEAD.unpack(head)
        if length > len(self._buffer):
            self._buffer = memoryview(bytearray(length))
        frame = self._buffer[:length]
        self._reader.readinto(frame)
        return number, frame


class FloorPeer(harness.BytesPeer):
    """A thread for each connection."""

    can_share = True

    def serve(self, setup: harness.Setup) -> Any:
        """Listens at a Unix socket; with TLS at a port."""
        self._handlers = harness.BytesHandlers(_write_file)
        context = None
        if setup.tls:
            listening = socket.create_server((setup.host, 0))
            context = context_of(setup, ssl.Purpose.CLIENT_AUTH)
            address = listening.getsockname()
        else:
            listening = socket.socket(socket.AF_UNIX)
            address = f"{setup.scratch}/floor"
            listening.bind(address)
            listening.listen(128)
        threading.Thread(target=self._accept, args=(listening, context), daemon=True).start()
        return address

    def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        while True:
            accepted = listening.accept()[0]
            if context is not None:
                accepted = context.wrap_socket(accepted, server_side=True)
            threading.Thread(target=self._answer, args=(accepted,), daemon=True).start()

    def _answer(self, accepted: socket.socket) -> None:
        connection = _Connection(accepted)
        while True:
            try:
                number, frame = connection.receive()
            except (EOFError, OSError):
                return
            name = _NAMES[number]
            if name.startswith("echo"):
                connection.send(number, frame)
            else:
                connection.send(number, harness.handle_bytes(self._handlers, name, frame))

    def connect(self, setup: harness.Setup) -> None:
        """Connects."""
        if setup.tls:
            host, port = setup.address
            connected: socket.socket = context_of(setup, ssl.Purpose.SERVER_AUTH).wrap_socket(
                socket.create_connection((host, port)), server_hostname=host
            )
        else:
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(setup.address)
        self._connection = _Connection(connected)

    def bytes_method(self, name: str) -> Callable[[Any], Any]:
        """Returns a ping-pong."""
        connection, number = self._connection, _NAMES.index(name)

        def call(argument: Any) -> memoryview:
            connection.send(number, harness.encode(argument))
            return connection.receive()[1]

        return call

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a ping-pong; arrays are sent from their own memory."""
        if name != "echo_array":
            return super().method(name)
        connection, number = self._connection, _NAMES.index(name)

        def call(array: Any) -> Any:
            connection.send(number, memoryview(array))
            return harness.to_array(connection.receive()[1])

        return call

    def pipeline(self, calls: int) -> None:
        """Sends all at once, then receives."""
        self._connection.send_many(_NAMES.index("echo"), harness.PAYLOAD, calls)
        for _ in range(calls):
            self._connection.receive()

    @contextlib.contextmanager
    def started(self, setup: harness.Setup) -> Iterator[None]:
        """Forks, and waits for one byte of each child."""
        read, write = os.pipe()
        for _ in range(setup.nodes):
            if os.fork() == 0:
                os.write(write, b"x")
                # As a server would, it lives until it is ended.
                signal.pause()
        received = 0
        while received < setup.nodes:
            received += len(os.read(read, setup.nodes))
        yield

    def open_shared(self, value: Any) -> Any:
        """Maps the file."""
        with Path(bytes(value).decode()).open("rb") as file:
            return harness.to_array(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _write_file(array: Any) -> bytes:
    global _file
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - no name in it
    # Kept open: an unnamed file lives as long as a process has it open.
    _file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    _file.write(array)
    _file.flush()
    return f"/proc/{os.getpid()}/fd/{_file.fileno()}".encode()


def context_of(setup: harness.Setup, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Returns the context of one side, which both prove."""
    assert setup.tls is not None
    context = ssl.create_default_context(purpose, cafile=f"{setup.tls}/authority.pem")
    context.load_cert_chain(f"{setup.tls}/certificate.pem", f"{setup.tls}/key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


if __name__ == "__main__":
    harness.main(FloorPeer())
