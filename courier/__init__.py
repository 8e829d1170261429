"""courier: remote calls on Python objects, at the speed of the machine, behind a gRPC front door.

`Server(obj)` serves the public methods of any object; `Client(address)` looks
like that object. This package knows nothing of programs and nodes; it may be
used alone. It imports grpc only when a gRPC client connects.
"""

from courier._batching import batched_handler
from courier._cache import Cache
from courier._client import (
    Client,
    as_remote,
    call_aio,
    close,
    connection_of,
    credentials,
    list_methods,
    move,
    reconnect,
    stop_calling,
    stop_waiting,
    submit,
    wait_for_futures,
    wait_until_ready,
    with_timeout,
)
from courier._context import CallContext, current_call
from courier._exceptions import ExceptionReport, remote_traceback
from courier._health import is_healthy
from courier._idempotence import idempotent
from courier._parcel import dump, dumps
from courier._remote import Remote
from courier._replicas import Pool, PoolChoice
from courier._secret import Secret
from courier._server import Server
from courier._services import grpc_service
from courier._shared import Shared
from courier._timing import Timing
from courier._tls import TlsCredentials
from courier.errors import (
    AddressInUseError,
    AuthenticationError,
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ProtocolError,
    RemoteError,
    SerializationError,
    ServerBusyError,
    ServerLostError,
    ServerStateError,
    ServerUnreachableError,
    UnknownMethodError,
    UnprotectedServerError,
)

__all__ = [
    "AddressInUseError",
    "AuthenticationError",
    "Cache",
    "CallCancelledError",
    "CallContext",
    "CallTimeoutError",
    "Client",
    "CourierError",
    "ExceptionReport",
    "Pool",
    "PoolChoice",
    "ProtocolError",
    "Remote",
    "RemoteError",
    "Secret",
    "SerializationError",
    "Server",
    "ServerBusyError",
    "ServerLostError",
    "ServerStateError",
    "ServerUnreachableError",
    "Shared",
    "Timing",
    "TlsCredentials",
    "UnknownMethodError",
    "UnprotectedServerError",
    "as_remote",
    "batched_handler",
    "call_aio",
    "close",
    "connection_of",
    "credentials",
    "current_call",
    "dump",
    "dumps",
    "grpc_service",
    "idempotent",
    "is_healthy",
    "list_methods",
    "move",
    "reconnect",
    "remote_traceback",
    "stop_calling",
    "stop_waiting",
    "submit",
    "wait_for_futures",
    "wait_until_ready",
    "with_timeout",
]
