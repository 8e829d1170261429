"""Makes a proven connection to an address: the one place that chooses the carrier.

First TCP, to the only address that users know. There the server introduces itself; if it is on
this machine, a unix socket of the same server takes over. Where a proxy lets only gRPC through, the
frames go over a gRPC stream.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from courier.client.options import ClientOptions
from courier.errors import AuthenticationError, CourierError, ProtocolError, ServerUnreachableError
from courier.wire.address import connect, split_address
from courier.wire.carrier import SocketCarrier, TlsCarrier, UnixCarrier
from courier.wire.channel import Channel
from courier.wire.handshake import (
    HTTP2_PREFACE,
    LENGTH,
    MAX_WELCOME_BYTES,
    NO_NAME,
    TLS_WANTED,
    ClientHandshake,
    Introduction,
    Purpose,
    prefix,
)
from courier.wire.place import host_name, is_own_user, keep_alive
from courier.wire.watching import READ, poll_once

#: A frame of HTTP/2 without content, with which both sides begin (RFC 9113, section 6.5).
_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER_BYTES = 9


class SpeechlessError(ServerUnreachableError):
    """The peer at the address hung up before it had introduced itself."""


class _OtherProtocolError(ProtocolError):
    """The peer at the address may let only gRPC through."""


class Dialled(NamedTuple):
    """A connection whose server has proved itself."""

    channel: Channel
    introduction: Introduction


def dial(options: ClientOptions, timeout_s: float | None, *, over_grpc: bool = False) -> Dialled:
    """Connects once; `over_grpc`: tries gRPC if the peer hangs up, as proxies for gRPC do."""
    timing = options.timing
    limit_s = (
        timing.attempt_s if timeout_s is None else min(timing.attempt_s, max(timeout_s, 0.001))
    )
    try:
        return _dial_directly(options, limit_s)
    except (SpeechlessError, _OtherProtocolError) as error:
        if isinstance(error, SpeechlessError) and not over_grpc:
            raise
        return _dial_over_grpc(options, min(limit_s, timing.grpc_attempt_s), error)


def _dial_directly(options: ClientOptions, limit_s: float) -> Dialled:
    give_up_at = time.monotonic() + limit_s
    host, port = split_address(options.address)
    try:
        sock = connect(host, port, limit_s)
    except (OSError, UnicodeError) as error:
        raise ServerUnreachableError(f"{options.where}: no server answers ({error})") from error
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        with _failures(options):
            keep_alive(sock, options.keepalive_s)
            tls, opening = options.tls, prefix(Purpose.CALLS)
            if tls is None:
                carrier = SocketCarrier(sock, options.address, is_exposed=True)
            else:
                sock.sendall(opening)
                opening = b""
                carrier = TlsCarrier(sock, options.address, tls.client_context(), server=False)
                stack.callback(carrier.close)
                while not carrier.advance_handshake():
                    _wait(carrier, give_up_at)
            proof, dialled = _introduce(options, carrier, opening, give_up_at)
            local = _dial_local(options, dialled.introduction, give_up_at)
            if local is not None:
                return local
            _want_proof(options)
            carrier.send([proof])
        stack.pop_all()
        return dialled


def _introduce(
    options: ClientOptions,
    carrier: SocketCarrier,
    opening: bytes,
    give_up_at: float,
    server: bytes = NO_NAME,
) -> tuple[bytes, Dialled]:
    """Sends the hello and checks the welcome; the proof is still to be sent."""
    handshake = ClientHandshake(options.secret, server)
    with contextlib.suppress(OSError):  # what comes next tells why
        carrier.send([opening + handshake.hello()])
    (length,) = LENGTH.unpack(_receive(carrier, LENGTH.size, give_up_at))
    if length == TLS_WANTED:
        raise AuthenticationError("the server wants certificates: pass tls=, of its authority")
    if length > MAX_WELCOME_BYTES:
        raise _OtherProtocolError("the peer is no courier server")
    proof, introduction, keys = handshake.prove(_receive(carrier, length, give_up_at))
    if introduction.refusal:
        raise ServerUnreachableError(introduction.refusal)
    channel = Channel(
        carrier, receive_key=keys.replies, send_key=keys.requests, timing=options.timing
    )
    return proof, Dialled(channel, introduction)


def _receive(carrier: SocketCarrier, count: int, give_up_at: float) -> bytes:
    """Receives so many bytes and no more, until a monotonic time at most."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            received = carrier.receive(view, wait=False)
        except BlockingIOError:
            _wait(carrier, give_up_at)
            continue
        if not received:
            raise ConnectionResetError("the server hung up")
        view = view[received:]
    return bytes(data)


def _wait(carrier: SocketCarrier, give_up_at: float) -> None:
    left = give_up_at - time.monotonic()
    if left <= 0:
        raise TimeoutError
    poll_once(carrier.fileno(), READ, left)


def _dial_local(
    options: ClientOptions, introduction: Introduction, give_up_at: float
) -> Dialled | None:
    if not introduction.local or not introduction.host or introduction.host != host_name():
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, give_up_at - time.monotonic()))
        sock.connect(introduction.local)
        if not is_own_user(sock):
            raise AuthenticationError("the unix socket belongs to another user")
        carrier = UnixCarrier(sock, options.address)
        server, opening = bytes.fromhex(introduction.name), prefix(Purpose.CALLS)
        proof, dialled = _introduce(options, carrier, opening, give_up_at, server)
        carrier.send([proof])
    except (CourierError, ValueError, PermissionError):
        sock.close()
        return None  # TCP works, as users asked for
    except OSError:
        sock.close()
        if not _has_proof(options):
            raise  # the server is just leaving; it is worth another try
        return None
    return dialled


def _has_proof(options: ClientOptions) -> bool:
    """Returns whether a server must prove more than that it runs as our user."""
    return options.secret is not None or options.tls is not None


def _want_proof(options: ClientOptions) -> None:
    """Raises AuthenticationError where any process could have its pickles loaded here."""
    if not _has_proof(options):
        raise AuthenticationError(
            "without a secret, clients and servers trust only processes of their own user on their "
            "own machine, and this is no such server: pass the same secret=courier.Secret(...) to both"
        )


def _dial_over_grpc(options: ClientOptions, limit_s: float, first: CourierError) -> Dialled:
    give_up_at = time.monotonic() + limit_s
    # gRPC itself would take long to find out that the peer does not speak it.
    if options.tls is None and not _speaks_http2(options, limit_s):
        raise first from None
    from courier.grpc.client import open_stream  # loads grpc only here

    try:
        sock = open_stream(options, limit_s)
    except CourierError:
        raise first from None
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        try:
            with _failures(options):
                # Under TLS, gRPC sees to it.
                carrier = SocketCarrier(sock, options.address, is_exposed=options.tls is None)
                proof, dialled = _introduce(options, carrier, prefix(Purpose.CALLS), give_up_at)
                _want_proof(options)
                carrier.send([proof])
        except SpeechlessError:
            if isinstance(first, SpeechlessError):
                raise first from None
            raise ProtocolError(
                f"{options.where}: a gRPC server answers, but it is no courier server"
            ) from None
        stack.pop_all()
        return dialled


def _speaks_http2(options: ClientOptions, limit_s: float) -> bool:
    host, port = split_address(options.address)
    try:
        with connect(host, port, limit_s) as sock:
            sock.settimeout(min(limit_s, options.timing.probe_s))
            sock.sendall(HTTP2_PREFACE + _EMPTY_SETTINGS)
            answer = sock.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except (OSError, UnicodeError):
        return False
    return answer[3:4] == _EMPTY_SETTINGS[3:4]


@contextlib.contextmanager
def _failures(options: ClientOptions) -> Iterator[None]:
    where = options.where
    try:
        yield
    except CourierError as error:
        raise type(error)(f"{where}: {error}") from None
    except TimeoutError as error:
        raise ServerUnreachableError(f"{where}: no server introduces itself in time") from error
    except OSError as error:
        if options.tls is not None:
            import ssl

            if isinstance(error, ssl.SSLError):
                # This says what is wrong with a certificate.
                reason = getattr(error, "verify_message", "") or error.reason or error
                raise AuthenticationError(
                    f"{where}: TLS failed ({reason}); both sides need certificates of "
                    "the same authority"
                ) from error
        raise SpeechlessError(f"{where}: the server hangs up ({error})") from error
