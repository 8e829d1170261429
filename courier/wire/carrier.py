"""Carriers send bytes to one peer by a socket: plain, with descriptors, or under TLS.

The socket is blocking, so that a waiting reader needs one system call; callers that must not wait
say so per call. One thread at a time may read, and one may write, both at the same time.
"""

import array
import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from courier.threads.locks import Lock
from courier.wire.frames import Chunk

if TYPE_CHECKING:
    import ssl  # imported at run time only for TLS

#: Chunks for one system call; the kernel takes at most 1,024.
MAX_CHUNKS = 64
_MAX_DESCRIPTORS = 64
_DESCRIPTOR_BYTES = array.array("i").itemsize
#: Bytes that are encrypted before they are sent. A message of one large piece goes in small ones: the
#: peer decrypts the first while this side encrypts the next. For longer messages it does so anyway.
_TLS_PIECE_BYTES, _TLS_SOON_BYTES = 1 << 18, 40 << 10
_TLS_HANDSHAKE_BYTES = 1 << 12
# Plain numbers, because to combine members of an enumeration takes as long as the system call.
DONTWAIT = int(socket.MSG_DONTWAIT)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CLOEXEC_DONTWAIT = _CLOEXEC | DONTWAIT


class SocketCarrier:
    """A connection to one peer: TCP, or a unix socket in its place."""

    #: Whether it can pass descriptors, and so shared memory.
    passes_descriptors = False
    #: `send` of the socket, if bytes go there unchanged and at once.
    send_now: Callable[[Chunk, int], int] | None = None
    # Not properties: looking them up is part of every call.
    #: Whether there may be received data that a poll of the descriptor does not show.
    hides_arrivals = False
    #: Whether accepted bytes wait here for the next `send`.
    holds_back = False

    def __init__(self, sock: socket.socket, peer: str, *, is_exposed: bool) -> None:
        """Takes over a socket. `is_exposed`: an attacker on the path could change the data."""
        sock.setblocking(True)
        self._socket = sock
        # Clients may be dropped without `close`, alone or in a cycle; __del__ may be too late for
        # the latter.
        weakref.finalize(self, sock.close).atexit = False
        self.peer = peer
        self.is_exposed = is_exposed
        #: Empty if an exception interrupted `receive` before anything had arrived.
        self.arrived: list[Any] = []
        self._receive_into = sock.recv_into
        self._send = sock.send

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, room: memoryview, *, wait: bool) -> int:
        """Receives into `room`; returns how many bytes, 0 at the end, or raises BlockingIOError."""
        arrived = self.arrived
        arrived.clear()
        # Not a plain call: a Ctrl-C that comes with the data would lose their number. Inside of
        # extend() nothing is interrupted but the wait itself.
        arrived.extend(map(self._receive_into, (room,), (0,), (0 if wait else DONTWAIT,)))
        return arrived[0]  # type: ignore[no-any-return]

    def send(self, chunks: Sequence[Chunk], descriptors: Sequence[int] = ()) -> int:
        """Sends as much as goes now, of MAX_CHUNKS; returns how many bytes. May raise as above."""
        assert not descriptors
        if len(chunks) == 1:
            return self._send(chunks[0], DONTWAIT)
        return self._socket.sendmsg(chunks, (), DONTWAIT)

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors that came with the received data; the caller closes them."""
        return []

    def shut(self) -> None:
        """Ends the connection, which wakes its reader. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; only when no thread reads or writes any more."""
        self._socket.close()


class UnixCarrier(SocketCarrier):
    """A unix socket, over which descriptors can be passed."""

    passes_descriptors = True

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(sock, peer, is_exposed=False)
        self.send_now = sock.send
        self._receive_message = sock.recvmsg_into
        self._ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        self._descriptors: list[int] = []

    def receive(self, room: memoryview, *, wait: bool) -> int:
        arrived = self.arrived
        arrived.clear()
        flags = _CLOEXEC if wait else _CLOEXEC_DONTWAIT
        arrived.extend(map(self._receive_message, ((room,),), (self._ancillary_bytes,), (flags,)))
        count, ancillary, _, _ = arrived[0]
        if ancillary:
            self._keep(ancillary)
        return count  # type: ignore[no-any-return]

    def _keep(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
                self._descriptors += received

    def send(self, chunks: Sequence[Chunk], descriptors: Sequence[int] = ()) -> int:
        if not descriptors:
            return super().send(chunks)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        return self._socket.sendmsg(chunks, (rights,), DONTWAIT)

    def take_descriptors(self) -> list[int]:
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        super().close()


class TlsCarrier(SocketCarrier):
    """TCP under TLS.

    The cipher works on memory, between the socket and us: OpenSSL does not allow one thread to read
    while another writes, and a waiting reader must not block writers.
    """

    def __init__(
        self, sock: socket.socket, peer: str, context: "ssl.SSLContext", *, server: bool
    ) -> None:
        import ssl

        super().__init__(sock, peer, is_exposed=False)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server, server_hostname=None
        )
        self._lock = Lock()
        # Small until the peer has proved something.
        self._raw = memoryview(bytearray(_TLS_HANDSHAKE_BYTES))
        self._has_ended = False
        #: Whether there may be data to decrypt; some may come with the handshake.
        self.hides_arrivals = True
        #: Ciphertext that the socket did not take yet.
        self._unsent: memoryview | bytes = b""

    def advance_handshake(self) -> bool:
        """Goes on with the handshake; returns whether it is done. Raises ssl.SSLError, OSError."""
        import ssl

        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_ciphertext()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._send_ciphertext()  # the alert that tells the peer why
                raise
            else:
                self._send_ciphertext()
                self._raw = memoryview(bytearray(_TLS_PIECE_BYTES))
                return True
            try:
                count = super().receive(self._raw, wait=False)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("the peer left during the TLS handshake")
            self._incoming.write(self._raw[:count])

    def _send_ciphertext(self) -> None:
        self._send_all(bytes(self._unsent) + self._outgoing.read())

    def receive(self, room: memoryview, *, wait: bool) -> int:
        if self.hides_arrivals:
            with self._lock:
                received = self._decrypt(room)
            if received:
                return received
        while not self._has_ended:
            count = super().receive(self._raw, wait=wait)
            if not count:
                return 0
            with self._lock:
                self._incoming.write(self._raw[:count])
                received = self._decrypt(room)
            if received:
                return received
        return 0

    def _decrypt(self, room: memoryview) -> int:
        """Decrypts what has come, one record after the other; returns how many bytes."""
        import ssl

        tls, incoming = self._tls, self._incoming
        received = 0
        is_more = True
        while is_more and received < len(room):
            try:
                received += tls.read(len(room) - received, room[received:])  # type: ignore[operator]
            except ssl.SSLWantReadError:
                is_more = False  # the rest of a record is not here yet
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                is_more, self._has_ended = False, True
            else:
                # Reading would cost an exception.
                is_more = incoming.pending > 0 or tls.pending() > 0
        self.hides_arrivals = is_more
        return received

    def send(self, chunks: Sequence[Chunk], descriptors: Sequence[int] = ()) -> int:
        assert not descriptors
        if self._unsent:
            self._send_all(self._unsent)
            if self._unsent:
                raise BlockingIOError
        write = self._tls.write
        is_long = sum(map(len, chunks)) > _TLS_PIECE_BYTES
        limit = _TLS_PIECE_BYTES if is_long else _TLS_SOON_BYTES
        taken = 0
        with self._lock:
            for chunk in chunks:
                piece = chunk
                if taken + len(chunk) > limit:
                    piece = memoryview(chunk).cast("B")[: limit - taken]
                while len(piece):
                    written = write(piece)  # one record at a time
                    taken += written
                    piece = memoryview(piece)[written:] if written < len(piece) else b""
                if taken >= limit:
                    break
            ciphertext = self._outgoing.read()
        self._send_all(ciphertext)
        return taken

    def _send_all(self, ciphertext: memoryview | bytes) -> None:
        try:
            while ciphertext:
                sent = self._send(ciphertext, DONTWAIT)
                if sent == len(ciphertext):
                    ciphertext = b""
                else:
                    ciphertext = memoryview(ciphertext)[sent:]
        except BlockingIOError:
            pass
        self._unsent = ciphertext

    @property
    def holds_back(self) -> bool:  # type: ignore[override]
        if self._unsent:
            self._send_all(self._unsent)
        return bool(self._unsent)
