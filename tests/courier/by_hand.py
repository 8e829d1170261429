"""Both halves of the wire, made by hand so that they can do what ours never would."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import courier
from courier.client.options import ClientOptions
from courier.errors import AuthenticationError
from courier.grpc.client import open_stream
from courier.values.parcel import Parcel
from courier.wire.address import split_address
from courier.wire.frames import Chunk, Frame, FrameReader, Seals, call_meta, encode
from courier.wire.handshake import (
    HELLO_BYTES,
    LENGTH,
    NAME_BYTES,
    NO_NAME,
    PREFIX_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    Introduction,
    Purpose,
    ServerHandshake,
    SessionKeys,
    prefix,
)

#: What our clients say first.
OPENING = prefix(Purpose.CALLS)


def connected(address: str, unix: str = "") -> socket.socket:
    """Connects to the port, or to the unix socket, of a server."""
    if unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(unix)
    else:
        sock = socket.create_connection(split_address(address))
    sock.settimeout(20)
    return sock


def connected_by_grpc(address: str) -> socket.socket:
    """Connects to a server by a stream of gRPC, without TLS."""
    options = ClientOptions(address, None, None, False, False, None, 20.0)
    return open_stream(options, 20.0)


class HungUpError(Exception):
    """The other side left."""


class _Side:
    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(20)
        self.socket = sock
        self._reader = FrameReader()
        self._waiting: list[Frame] = []
        self.seals = Seals(b"")

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._receive_some(count - len(data))
            data += piece
        return data

    def _receive_some(self, count: int) -> bytes:
        try:
            piece = self.socket.recv(count)
        except TimeoutError:
            raise AssertionError("the other side neither speaks nor leaves") from None
        except OSError as error:
            raise HungUpError from error
        if not piece:
            raise HungUpError
        return piece

    def read(self) -> Frame:
        """Waits for a frame; raises HungUpError at the end."""
        while not self._waiting:
            room = self._reader.room
            piece = self._receive_some(min(len(room), 1 << 16))
            room[: len(piece)] = piece
            self._waiting += self._reader.filled(len(piece))
        return self._waiting.pop(0)

    def is_hung_up_on(self) -> bool:
        """Waits for the end, and for nothing else."""
        try:
            self.receive(1)
        except HungUpError:
            return True
        return False

    def write(self, kind: int, call: int, data: bytes = b"", *, meta: bytes = b"") -> list[Chunk]:
        """Returns a sealed frame that is not sent yet."""
        return encode(kind, call, Parcel(data), meta=meta, seals=self.seals)

    def send(self, chunks: list[Chunk]) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(b"".join(chunks))

    def _begin_frames(self, receive_key: bytes, send_key: bytes) -> None:
        self._reader = FrameReader(seals=Seals(receive_key))
        self.seals = Seals(send_key)


class Visitor(_Side):
    """A client of ours, seen by a server that is made by hand."""

    keys: SessionKeys

    def greet(self, secret: courier.Secret | None, *, idempotent: tuple[str, ...] = ()) -> None:
        """Proves the secret and names of methods, and hears the client's proof."""
        self.receive(PREFIX_BYTES)
        handshake = ServerHandshake(
            secret, Introduction(os.urandom(NAME_BYTES).hex(), idempotent=idempotent)
        )
        self.socket.sendall(handshake.welcome(self.receive(HELLO_BYTES)))
        self.keys = handshake.check(self.receive(PROOF_BYTES))
        self._begin_frames(self.keys.requests, self.keys.replies)


class Stranger(_Side):
    """A client made by hand, which may hold the secret."""

    def __init__(
        self,
        address: str,
        secret: courier.Secret | None,
        *,
        unix: str = "",
        server: bytes = NO_NAME,
        sock: socket.socket | None = None,
    ) -> None:
        sock = sock or connected(address, unix)
        super().__init__(sock)
        handshake = ClientHandshake(secret, server)
        sock.sendall(prefix(Purpose.CALLS) + handshake.hello())
        (length,) = LENGTH.unpack(self.receive(LENGTH.size))
        self.welcome = welcome = self.receive(length)
        #: Whether the server could prove what this side believes to be the secret.
        self.is_trusted = True
        try:
            self.proof, self.introduction, self.keys = handshake.prove(welcome)
        except AuthenticationError:
            self.is_trusted = False
            self.proof, self.keys = os.urandom(PROOF_BYTES), SessionKeys(b"", b"")
        if unix:
            self._reader, self.seals = FrameReader(), None  # type: ignore[assignment]
        else:
            self._begin_frames(self.keys.replies, self.keys.requests)

    def call(self, number: int, data: bytes, method: str = "hit") -> list[Chunk]:
        """Returns a call that is not sent yet."""
        kind, meta = call_meta(method, None)
        return self.write(kind, number, data, meta=meta)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


def relay(near: socket.socket, address: str, heard: list[bytes] | None = None) -> None:
    """Passes on what a peer and a server say, until one leaves; notes what is heard."""
    with connected(address) as far:
        back = threading.Thread(target=_pass_on, args=(far, near, heard))
        back.start()
        _pass_on(near, far, heard)
        back.join(20)


def _pass_on(source: socket.socket, target: socket.socket, heard: list[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if heard is not None:
                heard.append(data)
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def answered_by_hand(behave: Callable[[Visitor], None]) -> Iterator[str]:
    """Listens, and has each connection treated by `behave`; yields the address."""
    lock = threading.Lock()
    open_sockets: set[socket.socket] = set()
    threads: list[threading.Thread] = []

    def treat(sock: socket.socket) -> None:
        with sock, contextlib.suppress(HungUpError, OSError, AuthenticationError):
            behave(Visitor(sock))
        with lock:
            open_sockets.discard(sock)

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with lock:
                open_sockets.add(sock)
            threads.append(threading.Thread(target=treat, args=(sock,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept, args=(listener,))
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(20)
            with lock:
                for sock in open_sockets:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(20)
