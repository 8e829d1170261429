"""The parts of courier for launchers and engines, not for users.

Launchers tell clients here that servers move, are gone or stay away, and that nodes are to end. The
rest is shared with the packages above: pickling, and threads that survive errors. Nothing in
courier imports it.
"""

from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from courier._distributions import refuse_others, refuse_strangers
from courier._later import later
from courier.values.modules import loaded_module

# Loaded at the first use, as in `courier`.
if TYPE_CHECKING:
    from courier.calls import records as call_records
    from courier.calls.context import CallContext
    from courier.calls.records import call_numbers
    from courier.calls.tasks import Tasks
    from courier.client.connection import Connection
    from courier.threads.clock import require_running_clock
    from courier.threads.surviving import surviving
    from courier.values.annotations import signature_of
    from courier.values.definitions import SCRIPT_NAMES, stand_in
    from courier.values.parcel import Parcel, Pickler, allocate, names_in
    from courier.values.texts import shortened
    from courier.wire.address import bound, join_address, loopback, split_address
    from courier.wire.secret import Secret
    from courier.wire.stream import ByteStream, Duplex
    from courier.wire.tls import TlsCredentials
    from courier.wire.watching import Spin
else:
    __getattr__, __dir__ = later(
        globals(),
        {
            "courier.calls.records": "call_records= call_numbers",
            "courier.calls.tasks": "Tasks",
            "courier.threads.clock": "require_running_clock",
            "courier.threads.surviving": "surviving",
            "courier.values.annotations": "signature_of",
            "courier.values.definitions": "SCRIPT_NAMES stand_in",
            "courier.values.parcel": "Parcel Pickler allocate names_in",
            "courier.values.texts": "shortened",
            "courier.wire.address": "bound join_address loopback split_address",
            "courier.wire.stream": "ByteStream Duplex",
            "courier.wire.watching": "Spin",
        },
    )

__all__ = [
    "SCRIPT_NAMES",
    "AwaitedCall",
    "ByteStream",
    "Duplex",
    "Parcel",
    "Pickler",
    "Spin",
    "Tasks",
    "allocate",
    "answered_call",
    "awaited_call",
    "bound",
    "call_numbers",
    "call_records",
    "connection_of",
    "credentials",
    "join_address",
    "later",
    "loaded_module",
    "loopback",
    "move",
    "names_in",
    "open_stream",
    "reconnect",
    "refuse_others",
    "refuse_strangers",
    "require_running_clock",
    "shortened",
    "signature_of",
    "split_address",
    "stand_in",
    "stop_calling",
    "stop_waiting",
    "surviving",
    "take_stream",
    "with_arguments",
]


def connection_of(client: object) -> "Connection":
    """Returns the object that all copies and views of a client share.

    It lives as long as the client, a view or a method of it, or a future is used. Functions that
    take a client take it as well. For code that must not keep clients alive.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        assert lowlevel.connection_of(client) is lowlevel.connection_of(with_timeout(client, 1.0))
    """
    from courier.client.client import connection_of as find

    return find(client)


def credentials(client: object) -> "tuple[Secret | None, TlsCredentials | None]":
    """Returns the secret and certificates of a client, to make other clients or to hand them on.

    A process that has it can call all servers of the program that the client belongs to, and can
    pass for one of them: hand it on by a private channel only.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        secret, tls = lowlevel.credentials(client)
        other = courier.Client("10.0.0.7:4711", secret=secret, tls=tls)
    """
    options = connection_of(client).options
    return options.secret, options.tls


def move(client: object, address: str) -> None:
    """Makes a client follow its server to another address.

    From now on `client.address` is the new one, and calls go there, or wait there until the server
    answers, also those that wait already. The connection to the old address is closed: calls in
    flight, and generators that are read, raise ServerLostError at once, as when a server is lost.
    Calls to methods marked `courier.idempotent` are repeated at the new address under the same
    conditions as then: they were sent by a connection, and the client waits for servers.

    `stop_waiting`, `stop_calling` and `close` hold at the new address, too. Clients that
    `with_timeout` made of it move along; earlier pickles of it do not. A move to the present
    address does nothing. Safe from any thread; of two concurrent moves, one is last.

    Args:
        client: A courier client.
        address: `host:port` of the server from now on.

    Raises:
        TypeError: `client` is no courier client.
        ValueError: `address` is not host:port.

    Example:
        lowlevel.move(client, "10.0.0.7:4711")
    """
    from courier.wire.address import split_address

    lane = connection_of(client).lane
    split_address(address)
    lane.move(address)


def reconnect(client: object) -> None:
    """Closes the present connection of a client, because its server is known to be gone.

    For callers that know more than the connection: one to a machine that is cut off looks alive for
    `keepalive_s`. Calls in flight, and generators that are read, raise ServerLostError at once, as
    when a server is lost; the next call connects again. Safe from any thread.

    Args:
        client: A courier client.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        lowlevel.reconnect(client)  # the machine of its server is known to be gone
    """
    connection_of(client).lane.move(None)


def stop_waiting(client: object) -> None:
    """Makes a client stop waiting for its server: for servers that do not come back.

    Calls that wait for one, and later ones that find none, raise ServerUnreachableError. Calls that
    a server has already go on. Safe to call twice and from any thread.

    Example:
        lowlevel.stop_waiting(client)  # its server does not come back
    """
    connection_of(client).lane.stop_waiting()


def stop_calling(client: object) -> None:
    """Makes a client refuse new calls: for a node that is to end.

    From now on they raise CallCancelledError at once. Calls in flight, and generators that are
    read, go on to their end. A handler that answers a call of its own server may still call, in its
    own thread and context, so that it can finish its answer.

    Does not imply `stop_waiting`: calls in flight may still wait for a server. Clients that
    `with_timeout` made of it refuse calls, too; unpickled ones do not. Cannot be undone. Safe to
    call twice, from any thread, and from finalizers.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        lowlevel.stop_calling(client)
    """
    connection_of(client).stop_calling()


def with_arguments(client: object, **more: Any) -> Any:
    """Returns the same client, whose calls have more arguments by name, over the same connection.

    Clients that `with_timeout` makes of it have them, too; pickles of it do not. Thread-safe.

    Raises:
        TypeError: `client` is no courier client.

    Example:
        lowlevel.with_arguments(client, lease=3).step(1)  # as client.step(1, lease=3)
    """
    from courier.client.client import with_timeout

    view = with_timeout(client, connection_of(client).timeout_s)
    connection_of(view).more = {**connection_of(view).more, **more}
    return view


def open_stream(client: object, method: str, *args: Any) -> "ByteStream":
    """Calls a method by a connection of its own, which becomes a stream of bytes to that method.

    The method begins with `take_stream`, and is the first to send. Then its return value, or what
    it raises, goes nowhere. If the first bytes are others, the call was refused.

    Raises:
        CourierError: The server cannot be reached, or does not prove itself.

    Example:
        stream = lowlevel.open_stream(client, "take_frames", "camera")
    """
    return connection_of(client).open_stream(method, args)


def take_stream() -> "ByteStream":
    """Returns, in a method that was called by `open_stream`, its end of the stream.

    Raises:
        RuntimeError: The method was not called by a connection.

    Example:
        def take_frames(self, name):
            self.streams[name] = lowlevel.take_stream()
            self.streams[name].send(b"!")
    """
    from courier.calls.context import current_call
    from courier.wire.stream import ByteStream

    if (connection := current_call().connection) is None:
        raise RuntimeError("this call did not come by a connection that can be taken over")
    return ByteStream(connection.take_over())


class AwaitedCall(NamedTuple):
    """A call for whose answer a thread waits.

    Attributes:
        server: Name of the server; its address if it has none.
        method: Name of the method.
        where: Both, for messages.
        is_limited: Whether the wait ends after some time.
    """

    server: str
    method: str
    where: str
    is_limited: bool = False


def awaited_call(frame: FrameType) -> AwaitedCall | None:
    """Returns the call for which a frame of courier waits; None if there is none.

    Example:
        for frame, _ in traceback.walk_stack(None):
            print(lowlevel.awaited_call(frame))
    """
    from concurrent.futures import ALL_COMPLETED, wait

    from courier.calls.outcomes import Items
    from courier.client.client import answer_to
    from courier.client.connection import Connection
    from courier.client.future import CallFuture
    from courier.client.pool import PoolCall

    connection: Connection
    values, is_limited = frame.f_locals, False
    if frame.f_code is Connection.call.__code__:
        connection, method = values["self"], values["method"]
    elif frame.f_code is Connection.finish.__code__:
        connection, method = values["self"], values["pending"]._method
    elif frame.f_code is Items._results.__code__:  # for an item of a stream
        server, _, method = (where := values["call"].where).rpartition(": ")
        is_limited = getattr(values["call"], "deadline", None) is not None
        return AwaitedCall(server.partition(" (")[0], method, where, is_limited)
    elif frame.f_code is PoolCall.is_refused.__code__:
        connection, method = values["self"].member.connection, values["self"].method
    elif frame.f_code is PoolCall.run.__code__:  # no server can be reached; any other would do, too
        call: PoolCall = values["self"]
        connection, method, is_limited = call.pool._members[0].connection, call.method, True
    elif frame.f_code in (CallFuture.result.__code__, answer_to.__code__, wait.__code__):
        is_limited = values.get("return_when", ALL_COMPLETED) != ALL_COMPLETED  # or ends sooner
        several = fs if isinstance(fs := values.get("fs"), set | list | tuple) else ()
        futures = [values.get("self"), values.get("future"), *several]
        calls = (each for each in futures if isinstance(each, CallFuture) and not each.done())
        if (future := next(calls, None)) is None:
            return None
        connection, method = future._connection, future._method
    else:
        return None
    options = connection.lane.options
    is_limited |= connection.timeout_s is not None or values.get("timeout") is not None
    return AwaitedCall(
        options.name or options.address, method, connection.where(method), is_limited
    )


def answered_call(frame: FrameType) -> "CallContext | None":
    """Returns the call that a frame of courier has a method answer; None if there is none.

    Example:
        for frame, _ in traceback.walk_stack(None):
            print(lowlevel.answered_call(frame))
    """
    from courier.calls.dispatch import Dispatcher
    from courier.calls.tasks import answer

    answers = frame.f_code in (Dispatcher._run_method.__code__, answer.__code__)
    return frame.f_locals["call"] if answers else None
