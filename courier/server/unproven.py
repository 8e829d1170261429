"""A peer that connected and has not proved anything yet. Never blocks."""

import contextlib
import enum
import socket
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from courier.errors import AuthenticationError, ProtocolError
from courier.wire import handshake
from courier.wire.carrier import SocketCarrier, TlsCarrier, UnixCarrier
from courier.wire.channel import Channel

if TYPE_CHECKING:
    from courier.server.host import ConnectionServer

#: Seconds after which a peer that has not proved itself is rejected.
PATIENCE_S = 10.0
#: The first byte of TLS.
_TLS_HANDSHAKE = b"\x16"


class Way(enum.Enum):
    """How the peer connected."""

    PORT = "by the address that users know"
    LOCAL = "by the unix socket, as the same user"
    GRPC = "inside of a gRPC stream"


class UnprovenPeer:
    """One connection before its proof."""

    def __init__(
        self,
        host: "ConnectionServer",
        sock: socket.socket,
        peer: str,
        way: Way,
        on_welcome: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._host = host
        self._socket = sock
        self.peer = peer
        self._way = way
        self.on_welcome = on_welcome
        self.came_at = time.monotonic()
        self._carrier: SocketCarrier | None = None
        #: Stops where more bytes must come.
        self._steps = self._prove()

    def fileno(self) -> int:
        return (self._carrier or self._socket).fileno()

    def on_event(self, events: int) -> None:  # noqa: ARG002 - there is one kind to expect
        try:
            next(self._steps, None)
        except (OSError, ProtocolError, AuthenticationError):
            # A stranger learns nothing; a client of ours gets the reason from its own half.
            self._host.reject(self)

    def _prove(self) -> Iterator[None]:
        host = self._host
        opening = b""
        while len(opening) < handshake.PREFIX_BYTES:
            opening += yield from self._some(handshake.PREFIX_BYTES - len(opening))
            if not handshake.MAGIC.startswith(opening[: len(handshake.MAGIC)]):
                yield from self._redirect(opening)
                return
        if handshake.read_prefix(opening) is handshake.Purpose.HEALTH:
            self._socket.send(bytes((host.is_healthy,)))
            raise ConnectionResetError
        carrier = self._carrier = yield from self._make_carrier()
        hello = yield from self._exactly(handshake.HELLO_BYTES)
        introduction = host.introduction()
        if not self._can_prove:
            introduction = introduction._replace(idempotent=())
        server = handshake.ServerHandshake(host.secret, introduction)
        welcome = server.welcome(hello)
        if carrier.send([welcome]) < len(welcome):
            raise ConnectionResetError  # it fits into the buffer of any new connection
        if not self._can_prove:
            raise ConnectionResetError  # it knows the address of our unix socket now
        keys = server.check((yield from self._exactly(handshake.PROOF_BYTES)))
        channel = Channel(
            carrier, receive_key=keys.requests, send_key=keys.replies, timing=host.timing
        )
        host.welcome(self, channel)

    def _redirect(self, data: bytes) -> Iterator[None]:
        """Waits until the peer certainly speaks gRPC, which costs more than an unproven peer."""
        if self._way is not Way.PORT:
            raise ProtocolError("only courier clients come by this way")
        if self._host.tls_context is None or data[:1] != _TLS_HANDSHAKE:
            preface = handshake.HTTP2_PREFACE
            while data != preface:
                if not preface.startswith(data):
                    raise ProtocolError("neither courier nor gRPC")
                data += yield from self._some(len(preface) - len(data))
        self._host.redirect(self, self._socket, data)

    def _make_carrier(self) -> Generator[None, None, SocketCarrier]:
        context = self._host.tls_context
        if self._way is Way.LOCAL:
            return UnixCarrier(self._socket, self.peer)
        if context is None or self._way is not Way.PORT:
            # Inside of gRPC, TLS is handled by gRPC.
            return SocketCarrier(self._socket, self.peer, is_exposed=context is None)
        first = yield from self._some(1, socket.MSG_PEEK)
        if first != _TLS_HANDSHAKE:
            self._socket.send(handshake.LENGTH.pack(handshake.TLS_WANTED))
            raise ConnectionResetError
        # Already here, so that it is closed with the peer.
        carrier = self._carrier = TlsCarrier(self._socket, self.peer, context, server=True)
        while not carrier.advance_handshake():
            yield
        return carrier

    @property
    def _can_prove(self) -> bool:
        """Whether peers can prove something: a secret, certificates, our user."""
        host = self._host
        return self._way is Way.LOCAL or host.secret is not None or host.tls_context is not None

    def _exactly(self, count: int) -> Generator[None, None, bytes]:
        data = b""
        while len(data) < count:
            data += yield from self._some(count - len(data))
        return data

    def _some(self, most: int, flags: int = 0) -> Generator[None, None, bytes]:
        """Receives the bytes that are there, and no more than wanted: frames may follow at once."""
        while True:
            try:
                if isinstance(self._carrier, TlsCarrier):
                    room = bytearray(most)
                    piece = bytes(room[: self._carrier.receive(memoryview(room), wait=False)])
                else:
                    # Not through the carrier, which would take the descriptors of a stranger, too.
                    piece = self._socket.recv(most, socket.MSG_DONTWAIT | flags)
            except BlockingIOError:
                yield
                continue
            if not piece:
                raise ConnectionResetError
            return piece

    def hang_up(self) -> None:
        self._host.reject(self)

    def close(self) -> None:
        self._steps = iter(())  # they refer to this object, and its memory is to be freed at once
        if self._carrier is not None:
            self._carrier.close()
        with contextlib.suppress(OSError):
            self._socket.close()
