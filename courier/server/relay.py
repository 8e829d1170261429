"""Copies bytes between our port and gRPC, which cannot take over a connection.

gRPC would buffer all that a stranger sends before it asks us. So it gets little until the stranger
has proved that it belongs to the program.
"""

import asyncio
import collections
import contextlib
import resource
import socket
from collections.abc import Callable

from courier.server.unproven import PATIENCE_S
from courier.wire.handshake import HTTP2_PREFACE

#: Strangers at a time; a new one takes the place of the one that has waited longest. Each costs
#: three descriptors.
_MAX_STRANGERS = min(128, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
#: No more than this weight is read of a stranger until it has proved itself; gRPC may be slow to
#: check the proof. A hundred clients behind one connection of a proxy need half of it.
_MAX_WEIGHT = 4 << 20
#: Of all strangers; if they send more, the connection that has sent the most is closed.
_MAX_WEIGHT_OF_ALL = 32 << 20
#: The most that a frame costs gRPC beside its content: a request without content (15 KiB) or an
#: answer; and frames inside a request, which are not answered.
_FRAME_WEIGHT = 16 << 10
_DATA_WEIGHT = 1 << 10
_PIECE_BYTES = 1 << 16
#: Seconds for data on its way when everything ends; the peer may not take it.
_LAST_S = 2.0

# Frames of HTTP/2: RFC 9113, section 4.1.
_FRAME_HEADER_BYTES = 9
_DATA, _WINDOW_UPDATE = 0, 8


class Scale:
    """Weighs the data of a stranger: the bytes that gRPC may hold for it. Pure."""

    def __init__(self, *, is_tls: bool) -> None:
        """Begins. `is_tls`: only gRPC can read it, and it accepts no peer without a certificate."""
        self._is_tls = is_tls
        #: Bytes until the next frame begins.
        self._skip = len(HTTP2_PREFACE)
        self._header = bytearray()

    def weigh(self, data: bytes) -> int:
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


class _GrpcClient:
    def __init__(self, peer: str, outer: socket.socket) -> None:
        self.peer = peer
        self.outer = outer
        self.proven = asyncio.Event()
        self.weight = 0
        self.task: asyncio.Task[None]
        self.patience: asyncio.TimerHandle
        self._has_ended = False

    def end(self) -> None:
        """Closes both sockets; once, because that takes some turns of the loop."""
        if not self._has_ended:
            self._has_ended = True
            self.task.cancel()


class GrpcRelay:
    """Two sockets for each peer that speaks gRPC. For the thread that runs its event loop."""

    def __init__(self, *, is_tls: bool) -> None:
        """Takes connections, which wait until `open`. `is_tls`: only gRPC can read them."""
        self._is_tls = is_tls
        self._opened = asyncio.Event()
        self._reach: Callable[[], tuple[socket.socket, str]] = _nowhere
        self._open: set[_GrpcClient] = set()
        #: Peers that have reached gRPC, by the names that gRPC gives them.
        self._lines: dict[str, _GrpcClient] = {}
        self._strangers: collections.OrderedDict[_GrpcClient, None] = collections.OrderedDict()
        #: Of all strangers together.
        self._weight = 0
        #: Peers that had to make room, and whose connections gRPC has not closed yet.
        self._leaving: set[_GrpcClient] = set()

    def open(self, reach: Callable[[], tuple[socket.socket, str]]) -> None:
        """Connects all that wait; `reach` returns a socket to gRPC, and the peer's name there."""
        self._reach = reach
        self._opened.set()

    def take(self, sock: socket.socket, data: bytes, peer: str) -> None:
        if len(self._strangers) == _MAX_STRANGERS:
            if len(self._leaving) == _MAX_STRANGERS:
                sock.close()  # gRPC cannot close them fast enough
                return
            self._reject(next(iter(self._strangers)))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        line = _GrpcClient(peer, sock)
        line.task = loop.create_task(self._carry(line, data))
        line.patience = loop.call_later(PATIENCE_S, line.end)
        self._open.add(line)
        line.task.add_done_callback(lambda _: self._forget(line))
        self._strangers[line] = None

    def _reject(self, line: _GrpcClient) -> None:
        del self._strangers[line]
        self._leaving.add(line)
        line.end()

    def _forget(self, line: _GrpcClient) -> None:
        line.outer.close()
        self._uncount(line)
        self._leaving.discard(line)
        self._open.discard(line)

    def _uncount(self, line: _GrpcClient) -> None:
        line.patience.cancel()
        self._strangers.pop(line, None)
        self._weight -= line.weight
        line.weight = 0

    def prove(self, name: str) -> None:
        """Notes that a peer belongs to the program; `name` is that by which gRPC knows it."""
        line = self._lines.get(name)
        if line is not None and line in self._strangers:
            line.proven.set()
            self._uncount(line)

    def peer_of(self, name: str) -> str:
        line = self._lines.get(name)
        return line.peer if line is not None else name

    async def _carry(self, line: _GrpcClient, data: bytes) -> None:
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
                # A socket that is closed with unread data drops its outgoing data.
                await asyncio.wait([bringing], timeout=_LAST_S)
            finally:
                bringing.cancel()
                await asyncio.wait([bringing])
                with contextlib.suppress(OSError):  # the peer has left
                    outer.shutdown(socket.SHUT_RDWR)  # a forked child may hold it, too
                outer.close()
                # Until gRPC closes it, it holds a descriptor, and this line counts.
                inner.shutdown(socket.SHUT_WR)
                await _exhaust(inner)

    async def _bring(self, line: _GrpcClient, inner: socket.socket, data: bytes) -> None:
        """Copies data from outside; leaves none unread when gRPC closes."""
        with contextlib.suppress(OSError):
            await self._bring_stranger(line, inner, data)
            await _copy(line.outer, inner)
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_WR)
            await _exhaust(line.outer)

    async def _bring_stranger(self, line: _GrpcClient, inner: socket.socket, data: bytes) -> None:
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
                await line.proven.wait()  # or until its time is over
            data = await _receive(line.outer)
        await loop.sock_sendall(inner, data)

    def survive_fork(self) -> None:
        for line in self._open:
            line.outer.close()

    async def stop(self) -> None:
        """Ends all connections; passes received data of proven peers on first."""
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
    """Waits a moment for the other side to end, which may still be sending."""

    async def read() -> None:
        while await _receive(sock):
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(read(), _LAST_S)


async def _receive(sock: socket.socket) -> bytes:
    await asyncio.sleep(0)  # data that is there already arrives without a turn of the others
    return await asyncio.get_running_loop().sock_recv(sock, _PIECE_BYTES)
