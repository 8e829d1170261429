"""Copies bytes between our port and gRPC, which cannot take a connection over.

gRPC would hold what a stranger sends, however much that is, before it asks us. So it gets little of
it until the stranger has proved that it belongs to the program.
"""

import asyncio
import collections
import contextlib
import resource
import socket
from collections.abc import Callable

from courier._engine.handshake import HTTP2_PREFACE
from courier._engine.unproven import PATIENCE_S

#: Strangers at a time; a new one takes the place of the one who has waited longest. Each costs three
#: descriptors.
_MAX_STRANGERS = min(128, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
#: Of who sends more than this, no more is read until it has proved itself; gRPC may be slow to look at
#: the proof. A hundred clients behind one connection of a proxy need half of it.
_MAX_WEIGHT = 4 << 20
#: Of all strangers; when they send more, the one who has sent the most is hung up on.
_MAX_WEIGHT_OF_ALL = 32 << 20
#: What a frame costs gRPC at most beside its content: a request of which nothing comes (15 KiB), or an
#: answer; what belongs to a request, and is not answered.
_FRAME_WEIGHT = 16 << 10
_DATA_WEIGHT = 1 << 10
_PIECE_BYTES = 1 << 16
#: Seconds for data on its way when everything ends; the peer may not take it.
_LAST_S = 2.0

# Frames of HTTP/2: RFC 9113, section 4.1.
_FRAME_HEADER_BYTES = 9
_DATA, _WINDOW_UPDATE = 0, 8


class Scale:
    """Weighs what a stranger sends: the bytes that gRPC may hold because of it. Pure."""

    def __init__(self, *, is_tls: bool) -> None:
        """Starts where the connection starts.

        Args:
            is_tls: Whether only gRPC can read it; gRPC accepts no peer without a certificate.
        """
        self._is_tls = is_tls
        #: Until the next frame begins.
        self._skip = len(HTTP2_PREFACE)
        self._header = bytearray()

    def weigh(self, data: bytes) -> int:
        """Returns the weight of what comes next."""
        weight, at = len(data), 0
        while at < len(data) and not self._is_tls:
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                step = min(_FRAME_HEADER_BYTES - len(self._header), len(data) - at)
                self._header += data[at : at + step]
                if len(self._header) == _FRAME_HEADER_BYTES:
                    is_light = self._header[3] in (_DATA, _WINDOW_UPDATE)
                    weight += _DATA_WEIGHT if is_light else _FRAME_WEIGHT
                    self._skip = int.from_bytes(self._header[:3], "big")
                    self._header.clear()
            at += step
        return weight


class _Line:
    """One who speaks gRPC."""

    def __init__(self, peer: str, outer: socket.socket) -> None:
        self.peer = peer
        self.outer = outer
        self.proven = asyncio.Event()
        self.weight = 0
        self.task: asyncio.Task[None]
        self.patience: asyncio.TimerHandle
        self._has_ended = False

    def end(self) -> None:
        """Hangs up; once, because that lasts some turns of the loop."""
        if not self._has_ended:
            self._has_ended = True
            self.task.cancel()


class Relay:
    """Two sockets for each who speaks gRPC. For the thread that runs its event loop."""

    def __init__(self, *, is_tls: bool) -> None:
        """Takes connections, which wait until `open`.

        Args:
            is_tls: Whether they come under TLS, which is gRPC's to read.
        """
        self._is_tls = is_tls
        self._opened = asyncio.Event()
        self._reach: Callable[[], tuple[socket.socket, str]] = _nowhere
        self._open: set[_Line] = set()
        #: Those that have reached gRPC, by the name that it knows them by.
        self._lines: dict[str, _Line] = {}
        self._strangers: collections.OrderedDict[_Line, None] = collections.OrderedDict()
        #: Of the strangers, and of those who leave.
        self._weight = 0
        #: Those that had to make room, and that gRPC has not let go of yet.
        self._leaving: set[_Line] = set()

    def open(self, reach: Callable[[], tuple[socket.socket, str]]) -> None:
        """Lets in all who wait.

        Args:
            reach: Connects to gRPC; returns the socket and how gRPC names its peer.
        """
        self._reach = reach
        self._opened.set()

    def take(self, sock: socket.socket, data: bytes, peer: str) -> None:
        """Takes a connection over.

        Args:
            sock: The connection.
            data: What has been read from it already.
            peer: Who it is, for people to read.
        """
        if len(self._strangers) == _MAX_STRANGERS:
            if len(self._leaving) == _MAX_STRANGERS:
                sock.close()  # more come than gRPC can see out
                return
            self._reject(next(iter(self._strangers)))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        line = _Line(peer, sock)
        line.task = loop.create_task(self._carry(line, data))
        line.patience = loop.call_later(PATIENCE_S, line.end)
        self._open.add(line)
        line.task.add_done_callback(lambda _: self._forget(line))
        self._strangers[line] = None

    def _reject(self, line: _Line) -> None:
        del self._strangers[line]
        self._leaving.add(line)
        line.end()

    def _forget(self, line: _Line) -> None:
        line.outer.close()
        self._uncount(line)
        self._leaving.discard(line)
        self._open.discard(line)

    def _uncount(self, line: _Line) -> None:
        """Stops to count a peer as a stranger."""
        line.patience.cancel()
        self._strangers.pop(line, None)
        self._weight -= line.weight
        line.weight = 0

    def prove(self, name: str) -> None:
        """Notes that a peer belongs to the program.

        Args:
            name: Of the peer, as gRPC knows it.
        """
        line = self._lines.get(name)
        if line is not None and line in self._strangers:
            line.proven.set()
            self._uncount(line)

    def peer_of(self, name: str) -> str:
        """Returns who it is that gRPC knows by a name; the name itself if he has left."""
        line = self._lines.get(name)
        return line.peer if line is not None else name

    async def _carry(self, line: _Line, data: bytes) -> None:
        await self._opened.wait()
        outer = line.outer
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))  # either side has hung up
            inner, name = self._reach()
            stack.enter_context(inner)
            inner.setblocking(False)
            self._lines[name] = line
            stack.callback(self._lines.pop, name)
            bringing = asyncio.create_task(self._bring(line, inner, data))
            try:
                await _copy(inner, outer)
                outer.shutdown(socket.SHUT_WR)
                # Closed with something unread, it would lose what is on its way out.
                await asyncio.wait([bringing], timeout=_LAST_S)
            finally:
                bringing.cancel()
                await asyncio.wait([bringing])
                with contextlib.suppress(OSError):  # the peer has left
                    outer.shutdown(socket.SHUT_RDWR)  # a forked child may hold it, too
                outer.close()
                # Until gRPC lets go it holds a descriptor, and this line counts.
                inner.shutdown(socket.SHUT_WR)
                await _exhaust(inner)

    async def _bring(self, line: _Line, inner: socket.socket, data: bytes) -> None:
        """Copies what comes from outside; nothing of it is left unread when gRPC hangs up."""
        with contextlib.suppress(OSError):
            await self._bring_stranger(line, inner, data)
            await _copy(line.outer, inner)
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_WR)
            await _exhaust(line.outer)

    async def _bring_stranger(self, line: _Line, inner: socket.socket, data: bytes) -> None:
        scale = Scale(is_tls=self._is_tls)
        loop = asyncio.get_running_loop()
        while data and not line.proven.is_set():
            weight = scale.weigh(data)
            line.weight += weight
            self._weight += weight
            if self._weight > _MAX_WEIGHT_OF_ALL and self._strangers:
                self._reject(max(self._strangers, key=lambda each: each.weight))
            await loop.sock_sendall(inner, data)
            if line.weight > _MAX_WEIGHT:
                await line.proven.wait()  # or until its patience is over
            data = await _receive(line.outer)
        await loop.sock_sendall(inner, data)

    def survive_fork(self) -> None:
        """Closes, in a forked child, what belongs to the parent."""
        for line in self._open:
            line.outer.close()

    async def stop(self) -> None:
        """Ends all; what has come is passed on first, if those it comes from have proved themselves."""
        self._opened.clear()
        self._reach = _nowhere
        for line in self._strangers:
            line.end()
        for limit_s in (_LAST_S, None):
            if self._open:
                await asyncio.wait([line.task for line in self._open], timeout=limit_s)
            for line in list(self._open):
                line.end()


def _nowhere() -> tuple[socket.socket, str]:
    raise ConnectionRefusedError


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await _receive(source):
        await loop.sock_sendall(target, data)


async def _exhaust(sock: socket.socket) -> None:
    """Waits a moment for the other side to end, which may be busy with sending."""

    async def read() -> None:
        while await _receive(sock):
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(read(), _LAST_S)


async def _receive(sock: socket.socket) -> bytes:
    await asyncio.sleep(0)  # what is there already comes without a turn of the others
    return await asyncio.get_running_loop().sock_recv(sock, _PIECE_BYTES)
