"""gRPC's status codes and the errors that callers see instead."""

import grpc

from courier.errors import (
    AuthenticationError,
    CallTimeoutError,
    CourierError,
    ProtocolError,
    ServerBusyError,
    ServerLostError,
)

_Code = grpc.StatusCode

#: What a status means for a call that was sent. Before a call is sent, a status of the
#: hello means the same, except that a lost server is then an unreachable one.
ERROR_OF_STATUS: dict[grpc.StatusCode, type[CourierError]] = {
    _Code.OK: ProtocolError,  # never an error; here for completeness
    # Cancelled by the other side: this side knows of its own cancellations.
    _Code.CANCELLED: ServerLostError,
    _Code.UNKNOWN: ServerLostError,
    _Code.INVALID_ARGUMENT: ProtocolError,
    _Code.DEADLINE_EXCEEDED: CallTimeoutError,
    _Code.NOT_FOUND: ProtocolError,
    _Code.ALREADY_EXISTS: ProtocolError,
    _Code.PERMISSION_DENIED: AuthenticationError,
    _Code.RESOURCE_EXHAUSTED: ServerBusyError,
    _Code.FAILED_PRECONDITION: ProtocolError,
    _Code.ABORTED: ServerLostError,
    _Code.OUT_OF_RANGE: ProtocolError,
    _Code.UNIMPLEMENTED: ProtocolError,
    _Code.INTERNAL: ServerLostError,
    _Code.UNAVAILABLE: ServerLostError,
    _Code.DATA_LOSS: ServerLostError,
    _Code.UNAUTHENTICATED: AuthenticationError,
}

_ADVICE: dict[type[CourierError], str] = {
    ServerLostError: "the connection broke after the call was sent; it may have run",
    ServerBusyError: "the server is busy: all its handlers run and its queue is full",
    AuthenticationError: "the server does not accept the secret of this client",
    ProtocolError: "the server does not speak this protocol",
}

#: How gRPC says that a call never left this process.
_NEVER_SENT = ("failed to connect", "connection refused", "name resolution", "dns resolution")


def was_never_sent(code: grpc.StatusCode, details: str) -> bool:
    """Tells whether a call failed before any byte of it reached a server."""
    lowered = details.lower()
    return code is _Code.UNAVAILABLE and any(text in lowered for text in _NEVER_SENT)


def error_of(code: grpc.StatusCode, details: str, where: str) -> CourierError:
    """Returns the error that a caller sees for a status.

    Args:
        code: What gRPC said.
        details: Its text; shown, never interpreted.
        where: Address and method.
    """
    kind = ERROR_OF_STATUS[code]
    if kind is CallTimeoutError:
        return CallTimeoutError(f"{where}: no answer in time; the handler may still be running")
    return kind(f"{where}: {_ADVICE[kind]} ({code.name}: {details})")
