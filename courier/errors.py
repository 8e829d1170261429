"""Everything that can go wrong with a call, as one tree.

    CourierError
    ├── ServerGoneError           one of the two below                                  (ConnectionError)
    │   ├── ServerUnreachableError   no server answers at the address; the call did not run
    │   └── ServerLostError       the connection broke; the call may or may not have run
    ├── CallTimeoutError          no answer in time; the handler may still be running   (TimeoutError)
    ├── CallCancelledError        given up by this caller: cancelled, closed, stopping  (CancelledError)
    ├── ServerBusyError           the server's queue is full; the call did not run
    ├── UnknownMethodError        the object has no such public method                  (AttributeError)
    ├── AuthenticationError       one side could not prove the program's secret         (PermissionError)
    ├── SerializationError        arguments or a result cannot cross the wire           (TypeError)
    ├── RemoteError               the method raised something that cannot be rebuilt here
    ├── ProtocolError             the peer does not speak this protocol
    └── ServerStateError          a server was used before its start or after its stop  (RuntimeError)
        ├── AddressInUseError     another process listens at the address                (OSError)
        └── UnprotectedServerError   would serve strangers, without a secret            (ValueError)

An exception that the remote method raised arrives as itself: `except KeyError`
around a call works. `remote_traceback(error)` says where it happened.

Each class also derives from the built-in that a caller would guess (above in brackets). Errors of
the transport never leave this package.
"""

import concurrent.futures


class CourierError(Exception):
    """The root of all errors that courier itself raises."""


class ServerGoneError(CourierError, ConnectionError):
    """The server is not there, or no longer: one of the two classes below this is raised."""


class ServerUnreachableError(ServerGoneError):
    """No server answers at the address. The call did not run and may be repeated."""


class ServerLostError(ServerGoneError):
    """The connection broke after the call was sent.

    The method may have run once, or not at all; courier does not repeat it. Repeat it if running it
    twice does no harm.

    If the server marks it `courier.idempotent`, courier has repeated it already; it may have run
    more than once.
    """


class CallTimeoutError(CourierError, TimeoutError):
    """No answer came in time. The handler is told, but may still be running.

    The message says what became of the call at its server, if that tells it within a tenth of the
    call's timeout more, and 0.2 s. It is not asked if a tenth is less than 10 ms.
    """


class CallCancelledError(CourierError, concurrent.futures.CancelledError):
    """The call was given up: its future was cancelled, its client closed or asked to stop."""


class ServerBusyError(CourierError):
    """All handlers are busy and the queue is full. The call did not run; try later."""


class UnknownMethodError(CourierError, AttributeError):
    """The served object has no such public method. The message lists those it has."""


class AuthenticationError(CourierError, PermissionError):
    """Client and server do not hold the same secret. Nothing was run or unpickled."""


class SerializationError(CourierError, TypeError):
    """Arguments or a result cannot be pickled, or not be unpickled at the other side."""


class RemoteError(CourierError):
    """The method raised an exception whose type cannot be rebuilt in this process.

    Attributes:
        type_name: Qualified name of the original exception type.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class ProtocolError(CourierError):
    """Something answers at the address, but not in this protocol or version."""


class ServerStateError(CourierError, RuntimeError):
    """The server is not in a state that allows this."""


class AddressInUseError(ServerStateError, OSError):
    """Another process already listens at this host and port."""


class UnprotectedServerError(ServerStateError, ValueError):
    """A server without a secret serves its own user only, on its own machine.

    Calls carry pickles: a process that reaches an unprotected port can run code.
    """
