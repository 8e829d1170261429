"""gRPC as a client: frames over a stream, and the standard health service.

Proxies, ingresses and meshes may pass nothing else. The engine sees a socket; at its other end, what
it sends is read by a thread of gRPC, and what comes is written by one of ours.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from courier.client.options import ClientOptions
from courier.errors import ServerUnreachableError
from courier.grpc._wire import COMMON_OPTIONS, PIECE_BYTES, SERVICE
from courier.wire.tls import TlsCredentials


def _open_channel(
    address: str, tls: TlsCredentials | None, *options: tuple[str, int]
) -> grpc.Channel:
    # Without a scheme, gRPC would take some host names for one.
    target = f"dns:///{address}"
    options = (*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1), *options)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.secure_channel(target, credentials, options=options)


def open_stream(options: ClientOptions, timeout_s: float) -> socket.socket:
    """Returns a socket that leads to a server by a stream, or raises ServerUnreachableError."""
    half_ms = max(1000, round(options.keepalive_s * 500))
    keepalive = ("grpc.keepalive_time_ms", half_ms), ("grpc.keepalive_timeout_ms", half_ms)
    with contextlib.ExitStack() as stack:
        channel = _open_channel(options.address, options.tls, *keepalive)
        stack.callback(channel.close)
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
        except grpc.FutureTimeoutError:
            raise ServerUnreachableError(f"{options.where}: no gRPC server answers") from None
        outer, inner = map(stack.enter_context, socket.socketpair())
        connect: Any = channel.stream_stream(f"/{SERVICE}/Connect")
        coming = connect(_going(outer.dup(), channel))
        threading.Thread(
            target=_bring, args=(coming, outer, channel), name="courier-stream", daemon=True
        ).start()
        stack.pop_all()
    return inner


def _going(sock: socket.socket, channel: grpc.Channel) -> Iterator[bytes]:
    """Yields what the engine sends, and ends the stream with it."""
    with sock, contextlib.suppress(OSError):
        while piece := sock.recv(PIECE_BYTES):
            yield piece
    channel.close()


def _bring(coming: Any, sock: socket.socket, channel: grpc.Channel) -> None:
    """Copies what the stream brings to the engine."""
    with sock:
        try:
            with contextlib.suppress(OSError, grpc.RpcError):
                for piece in coming:
                    sock.sendall(piece)
        finally:  # after any error, the engine and the other thread see the end
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            channel.close()


def is_serving(address: str, timeout_s: float, tls: TlsCredentials | None) -> bool:
    """Asks the standard health service of a server."""
    from grpc_health.v1 import health_pb2

    request = health_pb2.HealthCheckRequest().SerializeToString()
    # Its own channel costs 1 ms, and needs no care when closing, forking or reconnecting. There is
    # no pause after a failed attempt.
    with _open_channel(address, tls) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            reply = health_pb2.HealthCheckResponse.FromString(check(request, timeout=timeout_s))
        except (grpc.RpcError, DecodeError):
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
