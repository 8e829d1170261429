"""Health checks of servers, from outside."""

import contextlib
import time

from courier.wire.address import connect, split_address
from courier.wire.handshake import Purpose, prefix
from courier.wire.tls import TlsCredentials


def is_healthy(address: str, timeout_s: float, *, tls: TlsCredentials | None = None) -> bool:
    """Checks a server, without a secret: a courier server, or the gRPC health service of another.

    A courier server answers also while all its handlers are busy; a process that is stopped or
    stuck does not. A server that cannot be reached counts as unhealthy, without an exception. Each
    check makes a connection and leaves nothing behind; it takes less than a millisecond on one
    machine, so it may run every second. Thread-safe.

    Args:
        address: `host:port`, of a courier server or any gRPC server that has the health service.
        timeout_s: Seconds that all of it may take. Where no server listens, the answer comes at once.
        tls: Certificates, for gRPC under TLS: of another server, or of a proxy before ours. A
            courier server with certificates answers clients without any, too.

    Returns:
        Whether the server answers in time that it serves.

    Raises:
        ValueError: `address` is not host:port, or the timeout is not above 0.

    Example:
        if not courier.is_healthy("127.0.0.1:4711", timeout_s=2):
            print("it does not serve")
    """
    host, port = split_address(address)
    if not timeout_s > 0:
        raise ValueError(f"a check needs more time than {timeout_s} s")
    give_up_at = time.monotonic() + timeout_s
    answer = b""
    try:
        with connect(host, port, timeout_s) as sock:
            sock.sendall(prefix(Purpose.HEALTH))
            with contextlib.suppress(ConnectionError):
                sock.settimeout(max(0.001, give_up_at - time.monotonic()))
                answer = sock.recv(2)
    except (OSError, UnicodeError):
        return False  # no server listens, or it does not answer
    if len(answer) == 1:
        return answer == b"\1"
    left = give_up_at - time.monotonic()
    if left <= 0:
        return False
    from courier.grpc.client import is_serving  # loads grpc only for other protocols

    return is_serving(address, left, tls)
