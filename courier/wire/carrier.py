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

from courier.threads.locks import RLock
from courier.wire.frames import Chunk
from courier.wire.watching import READ, poll_once

if TYPE_CHECKING:
    import ssl  # imported at run time only for TLS

#: Chunks for one system call; the kernel takes at most 1,024.
MAX_CHUNKS = 64
_MAX_DESCRIPTORS = 64
_DESCRIPTOR_BYTES = array.array("i").itemsize
#: Bytes of a full record of TLS, and those that one call encrypts or decrypts at most.
_RECORD_BYTES, _TLS_PIECE_BYTES = 1 << 14, 1 << 18
# Plain numbers, because to combine members of an enumeration takes as long as the system call.
DONTWAIT = int(socket.MSG_DONTWAIT)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CLOEXEC_DONTWAIT = _CLOEXEC | DONTWAIT


class SocketCarrier:
    """A connection to one peer: TCP, or a unix socket in its place."""

    #: `send` of the socket, if bytes go there unchanged and at once.
    send_now: Callable[[Chunk, int], int] | None = None
    # Not properties: looking them up is part of every call.
    #: Whether there may be received data that a poll of the descriptor does not show.
    hides_arrivals = False

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

    def shut(self) -> None:
        """Ends the connection, which wakes its reader. Safe to call twice."""
        with contextlib.suppress(OSError):
            # That of SSLSocket lets later reads go past TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; only when no thread reads or writes any more."""
        self._socket.close()


class UnixCarrier(SocketCarrier):
    """A unix socket, over which descriptors can be passed, and so shared memory."""

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
        """Returns the descriptors that came with the received data; the caller closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        super().close()


class TlsCarrier(SocketCarrier):
    """TCP under TLS.

    Its socket does not block: OpenSSL does not allow one thread to read while another writes, and a
    waiting reader must not block writers.
    """

    def __init__(
        self, sock: socket.socket, peer: str, context: "ssl.SSLContext", *, server: bool
    ) -> None:
        self._tls = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        super().__init__(self._tls, peer, is_exposed=False)
        self._tls.setblocking(False)
        self._read_record: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        self._lock = RLock()
        self._has_ended = False

    def advance_handshake(self) -> bool:
        """Goes on with the handshake; returns whether it is done. Raises ssl.SSLError, OSError."""
        import ssl

        try:
            self._tls.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):  # nothing is wrong with certificates
            raise ConnectionResetError("the peer left during the TLS handshake") from None
        return True

    def receive(self, room: memoryview, *, wait: bool) -> int:
        import ssl

        arrived = self.arrived
        while not self._has_ended:
            arrived[:] = (True,)  # from here on, a Ctrl-C may lose data
            try:
                with self._lock:
                    return self._decrypt(room[:_TLS_PIECE_BYTES])
            except ssl.SSLWantReadError:
                arrived.clear()
            if not wait:
                raise BlockingIOError
            poll_once(self.fileno(), READ, None)
        return 0

    def _decrypt(self, room: memoryview) -> int:
        """Decrypts what has come, one record after the other; returns how many bytes."""
        received = count = self._read_record(len(room), room)
        # A shorter record ends what was sent at once: to look for more would cost an exception.
        while count == _RECORD_BYTES and received < len(room):
            try:
                count = self._read_record(len(room) - received, room[received:])
            except OSError:
                break  # the rest is not here yet; or the next call raises it again
            received += count
        self._has_ended = not count
        self.hides_arrivals = received == len(room) and self._tls.pending() > 0
        return received

    def send(self, chunks: Sequence[Chunk], descriptors: Sequence[int] = ()) -> int:
        import ssl

        assert not descriptors
        taken = 0
        with self._lock, contextlib.suppress(ssl.SSLWantWriteError):
            for chunk in _as_records(chunks):
                piece = chunk
                while piece and taken < _TLS_PIECE_BYTES:
                    written = self._tls.write(piece)  # one record
                    taken += written
                    piece = piece[written:]
        if not taken:
            raise BlockingIOError
        return taken


def _as_records(chunks: Sequence[Chunk]) -> list[memoryview]:
    """Returns the same bytes; a small chunk at the beginning is in one record with what follows."""
    views = [memoryview(chunk) for chunk in chunks]
    if len(views) == 1 or len(views[0]) >= _RECORD_BYTES:
        return views
    first = b"".join([view[:_RECORD_BYTES] for view in views])[:_RECORD_BYTES]
    left = len(first)
    for index, view in enumerate(views):
        views[index] = view[left:]
        left = max(0, left - len(view))
    return [memoryview(first), *views]
