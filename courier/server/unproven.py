"""A peer that connected and has not proved anything yet. Never blocks."""

import contextlib
import enum
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from courier._timing import Timing
from courier.errors import AuthenticationError, ProtocolError
from courier.wire.carrier import SocketCarrier, TlsCarrier, UnixCarrier
from courier.wire.channel import Channel
from courier.wire.handshake import (
    HELLO_BYTES,
    HTTP2_PREFACE,
    LENGTH,
    MAGIC,
    PREFIX_BYTES,
    PROOF_BYTES,
    TLS_WANTED,
    Health,
    Introduction,
    Purpose,
    ServerHandshake,
    read_prefix,
)
from courier.wire.secret import Secret

if TYPE_CHECKING:
    import ssl

#: Seconds after which a peer that has not proved itself is rejected.
PATIENCE_S = 10.0
#: The first byte of TLS.
_TLS_HANDSHAKE = b"\x16"


class Way(enum.Enum):
    """How the peer connected."""

    PORT = "by the address that users know"
    LOCAL = "by the unix socket, as the same user"
    GRPC = "inside of a gRPC stream"


class Reception(Protocol):
    """Decides about unproven peers."""

    secret: Secret | None
    tls_context: "ssl.SSLContext | None"
    timing: Timing

    @property
    def is_healthy(self) -> bool: ...

    def introduction(self) -> Introduction: ...

    def welcome(self, unproven: "UnprovenPeer", channel: Channel) -> None: ...

    def redirect(self, unproven: "UnprovenPeer", sock: socket.socket, data: bytes) -> None: ...

    def reject(self, unproven: "UnprovenPeer") -> None: ...


class UnprovenPeer:
    """One connection before its proof."""

    def __init__(
        self,
        reception: Reception,
        sock: socket.socket,
        peer: str,
        way: Way,
        on_welcome: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._reception = reception
        self._socket = sock
        self.peer = peer
        self._way = way
        self.on_welcome = on_welcome
        self.came_at = time.monotonic()
        self._data = b""
        self._step: Callable[[], bool] = self._read_prefix
        self._carrier: SocketCarrier | None = None
        self._handshake: ServerHandshake | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_event(self, events: int) -> None:  # noqa: ARG002 - there is one kind to expect
        try:
            while self._step():
                pass
        except BlockingIOError:
            return
        except (OSError, ProtocolError, AuthenticationError):
            # A stranger learns nothing; a client of ours gets the reason from its own half.
            self._reception.reject(self)

    def _read_prefix(self) -> bool:
        piece = self._socket.recv(PREFIX_BYTES - len(self._data))
        if not piece:
            raise ConnectionResetError
        self._data += piece
        data = self._data
        if not MAGIC.startswith(data[: len(MAGIC)]):
            if self._way is not Way.PORT:
                raise ProtocolError("only courier clients come by this way")
            self._step = self._read_preface
            return True
        if len(data) < PREFIX_BYTES:
            return True
        self._data = b""
        if read_prefix(data) is Purpose.HEALTH:
            healthy = Health.SERVING if self._reception.is_healthy else Health.NOT_SERVING
            self._socket.send(bytes((healthy,)))
            raise ConnectionResetError
        context = self._reception.tls_context
        if self._way is Way.LOCAL:
            self._carrier = UnixCarrier(self._socket, self.peer)
        elif context is not None and self._way is Way.PORT:
            self._step = self._begin_tls
            return True
        else:
            # Inside of gRPC, TLS is handled by gRPC.
            self._carrier = SocketCarrier(self._socket, self.peer, is_exposed=context is None)
        self._step = self._read_hello
        return True

    def _read_preface(self) -> bool:
        """Waits until the peer certainly speaks gRPC, which costs more than an unproven peer."""
        is_tls = self._reception.tls_context is not None and self._data[:1] == _TLS_HANDSHAKE
        if not is_tls:
            if not HTTP2_PREFACE.startswith(self._data):
                raise ProtocolError("neither courier nor gRPC")
            if len(self._data) < len(HTTP2_PREFACE):
                self._receive(len(HTTP2_PREFACE))
                return True
        self._reception.redirect(self, self._socket, self._data)
        return False

    def _begin_tls(self) -> bool:
        if self._socket.recv(1, socket.MSG_PEEK) not in (_TLS_HANDSHAKE, b""):
            self._socket.send(LENGTH.pack(TLS_WANTED))
            raise ConnectionResetError
        context = self._reception.tls_context
        assert context is not None
        self._carrier = TlsCarrier(self._socket, self.peer, context, server=True)
        self._step = self._shake_hands
        return True

    def _shake_hands(self) -> bool:
        assert isinstance(self._carrier, TlsCarrier)
        if not self._carrier.advance_handshake():
            return False
        self._step = self._read_hello
        return True

    def _read_hello(self) -> bool:
        if not self._receive(HELLO_BYTES):
            return True
        introduction = self._reception.introduction()
        if not self._can_prove:
            introduction = introduction._replace(idempotent=())
        self._handshake = ServerHandshake(self._reception.secret, introduction)
        welcome = self._handshake.welcome(self._data)
        assert self._carrier is not None
        if self._carrier.send([welcome]) < len(welcome):
            raise ConnectionResetError  # it fits into the buffer of any new connection
        if not self._can_prove:
            raise ConnectionResetError  # it knows the address of our unix socket now
        self._data = b""
        self._step = self._read_proof
        return True

    @property
    def _can_prove(self) -> bool:
        """Whether peers can prove something: a secret, certificates, our user."""
        reception = self._reception
        return (
            self._way is Way.LOCAL
            or reception.secret is not None
            or reception.tls_context is not None
        )

    def _read_proof(self) -> bool:
        if not self._receive(PROOF_BYTES):
            return True
        assert self._handshake is not None
        assert self._carrier is not None
        keys = self._handshake.check(self._data)
        channel = Channel(
            self._carrier,
            receive_key=keys.requests,
            send_key=keys.replies,
            timing=self._reception.timing,
        )
        self._reception.welcome(self, channel)
        return False

    def _receive(self, count: int) -> bool:
        """Receives the missing bytes and no more: frames may follow at once."""
        missing = count - len(self._data)
        if isinstance(self._carrier, TlsCarrier):
            room = bytearray(missing)
            piece = bytes(room[: self._carrier.receive(memoryview(room), wait=False)])
        else:
            # Not through the carrier, which would take the descriptors of a stranger, too.
            piece = self._socket.recv(missing, socket.MSG_DONTWAIT)
        if not piece:
            raise ConnectionResetError
        self._data += piece
        return len(self._data) == count

    def hang_up(self) -> None:
        self._reception.reject(self)

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        with contextlib.suppress(OSError):
            self._socket.close()
