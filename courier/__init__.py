"""courier: remote calls on Python objects, at the speed of the machine, behind a gRPC front door.

`Server(obj)` serves the public methods of any object; `Client(address)` looks
like that object. This package knows nothing of programs and nodes; it may be
used alone. It imports grpc only when a gRPC client connects.
"""

from typing import TYPE_CHECKING

from courier._distributions import refuse_strangers as _refuse_strangers
from courier._later import later
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
    ServerGoneError,
    ServerLostError,
    ServerStateError,
    ServerUnreachableError,
    UnknownMethodError,
    UnprotectedServerError,
)

_refuse_strangers("courier", __path__[0])

# Loaded at the first use: a launcher needs most of them only once its agent is on its way, which loads
# them for all workers.
if TYPE_CHECKING:
    from courier._timing import Timing
    from courier.calls.context import CallContext, current_call
    from courier.calls.marks import grpc_service, idempotent
    from courier.client.client import (
        Client,
        call_aio,
        close,
        list_methods,
        submit,
        wait_for_futures,
        wait_until_ready,
        with_timeout,
    )
    from courier.client.health import is_healthy
    from courier.client.pool import Pool, PoolChoice
    from courier.server.batching import batched_handler
    from courier.server.cache import Cache
    from courier.server.server import Server
    from courier.values.exceptions import ExceptionReport, remote_traceback
    from courier.values.parcel import dump, dumps
    from courier.values.shared import Shared
    from courier.wire.secret import Secret
    from courier.wire.tls import TlsCredentials
else:
    __getattr__, __dir__ = later(
        globals(),
        {
            "._timing": "Timing",
            ".calls.context": "CallContext current_call",
            ".calls.marks": "grpc_service idempotent",
            ".server.batching": "batched_handler",
            ".server.cache": "Cache",
            ".client.client": "Client call_aio close list_methods submit wait_for_futures "
            "wait_until_ready with_timeout",
            ".client.health": "is_healthy",
            ".client.pool": "Pool PoolChoice",
            ".server.server": "Server",
            ".values.exceptions": "ExceptionReport remote_traceback",
            ".values.parcel": "dump dumps",
            ".values.shared": "Shared",
            ".wire.secret": "Secret",
            ".wire.tls": "TlsCredentials",
        },
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
    "RemoteError",
    "Secret",
    "SerializationError",
    "Server",
    "ServerBusyError",
    "ServerGoneError",
    "ServerLostError",
    "ServerStateError",
    "ServerUnreachableError",
    "Shared",
    "Timing",
    "TlsCredentials",
    "UnknownMethodError",
    "UnprotectedServerError",
    "batched_handler",
    "call_aio",
    "close",
    "current_call",
    "dump",
    "dumps",
    "grpc_service",
    "idempotent",
    "is_healthy",
    "list_methods",
    "remote_traceback",
    "submit",
    "wait_for_futures",
    "wait_until_ready",
    "with_timeout",
]
