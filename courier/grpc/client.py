"""Frames over a gRPC stream, for proxies, ingresses and meshes that pass nothing else.

The engine sees a socket; at its other end two threads copy to and from the stream.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from courier.client.options import ClientOptions
from courier.errors import ServerUnreachableError
from courier.grpc._wire import PIECE_BYTES, SERVICE, open_channel

#: Pieces that wait for the stream; with more, the engine's socket fills up, and the engine waits.
_MAX_WAITING = 8


def open_stream(options: ClientOptions, timeout_s: float) -> socket.socket:
    """Returns a socket that leads to a server by a stream, or raises ServerUnreachableError."""
    half_ms = max(1000, round(options.keepalive_s * 500))
    keepalive = ("grpc.keepalive_time_ms", half_ms), ("grpc.keepalive_timeout_ms", half_ms)
    channel = open_channel(options.address, options.tls, *keepalive)
    try:
        grpc.channel_ready_future(channel).result(timeout_s)
    except grpc.FutureTimeoutError:
        channel.close()
        raise ServerUnreachableError(f"{options.where}: no gRPC server answers") from None
    outer, inner = socket.socketpair()
    _GrpcStream(channel, outer)
    return inner


class _GrpcStream:
    def __init__(self, channel: grpc.Channel, sock: socket.socket) -> None:
        self._channel = channel
        self._socket = sock
        self._waiting: queue.Queue[bytes] = queue.Queue(_MAX_WAITING)
        connect: Any = channel.stream_stream(f"/{SERVICE}/Connect")
        self._rpc: Any = connect(self._pieces())
        self._taker = threading.Thread(target=self._take, name="courier-stream", daemon=True)
        bringer = threading.Thread(target=self._bring, name="courier-stream", daemon=True)
        try:
            self._taker.start()
            bringer.start()
        except BaseException:
            sock.close()
            channel.close()
            raise

    def _pieces(self) -> Iterator[bytes]:
        while piece := self._waiting.get():
            yield piece

    def _take(self) -> None:
        """Copies what the engine sends to the stream."""
        try:
            with contextlib.suppress(OSError):
                while piece := self._socket.recv(PIECE_BYTES):
                    self._put(piece)
        finally:  # after any error, the other thread and the engine see the end
            self._rpc.cancel()
            self._put(b"")

    def _put(self, piece: bytes) -> None:
        while self._rpc.is_active() or not piece:
            with contextlib.suppress(queue.Full):
                self._waiting.put(piece, timeout=0.1)
                return
            if not piece:
                return

    def _bring(self) -> None:
        """Copies what the stream brings to the engine."""
        try:
            with contextlib.suppress(OSError, grpc.RpcError):
                for piece in self._rpc:
                    self._socket.sendall(piece)
        finally:  # as above
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._taker.join()
            self._socket.close()
            self._channel.close()
