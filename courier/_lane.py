"""The wall behind which bytes travel.

A client asks a `Lane` to carry calls and knows nothing else about transport.
`open_lane` chooses: the same process, or the engine, which in turn chooses how
bytes travel (see `courier._engine.dialing`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from courier._address import place
from courier._exceptions import ExceptionReport
from courier._parcel import Parcel, unpack
from courier._secret import Secret
from courier._timing import DEFAULT, Timing
from courier._tls import TlsCredentials
from courier.errors import SerializationError, UnknownMethodError


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """What a lane must know about its connection."""

    address: str
    secret: Secret | None
    wait_for_ready: bool
    compress: bool
    tls: TlsCredentials | None
    keepalive_s: float
    timing: Timing = DEFAULT
    #: What messages call the server, besides its address.
    name: str = ""

    @property
    def where(self) -> str:
        """The server, for messages."""
        return place(self.address, self.name)


@dataclass(slots=True)
class Returned:
    """The method returned this."""

    parcel: Parcel


@dataclass(slots=True)
class Given:
    """The method returned this very object, in the same process."""

    value: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The method raised this."""

    report: ExceptionReport


@dataclass(frozen=True, slots=True)
class Refused:
    """The server could not run the method, or not send what it returned."""

    kind: type[UnknownMethodError] | type[SerializationError]
    text: str


def cannot_send(text: str) -> Refused:
    """Reports that a method ran, but its result cannot be pickled."""
    return Refused(SerializationError, f"the method ran, but cannot send {text}")


def cannot_unpickle(text: str) -> Refused:
    """Reports that the arguments cannot be unpickled, so nothing ran."""
    return Refused(SerializationError, f"cannot unpickle the arguments of {text}")


class ReplyStream(Protocol):
    """The items of a remote generator. Used by one thread at a time."""

    def next_reply(self) -> "Returned | Given | Raised | Refused | None":
        """Waits for the next item; None at the end. Raises CourierError."""

    def close(self) -> None:
        """Ends the generator early. Safe to call twice, and from any thread."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The method is a generator."""

    stream: ReplyStream


Reply = Returned | Given | Raised | Refused | Streams


class PendingCall(Protocol):
    """A call on its way. Thread-safe."""

    @property
    def where(self) -> str:
        """The server and the method, for messages."""

    @property
    def is_settled(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> Reply:
        """Waits for the answer; a KeyboardInterrupt cancels the call. Raises CourierError."""

    def wait_until(self, deadline: float | None) -> bool:
        """Waits until a monotonic time at most; returns whether the answer is here."""

    def when_done(self, callback: Callable[["PendingCall"], None]) -> None:
        """Calls back once, soon after the answer came; `wait` then returns at once."""

    def hurry(self) -> None:
        """Notes that the answer must be reported even though no thread waits for it."""

    def cancel(self) -> bool:
        """Gives the call up; False if the answer is already here."""


class Lane(Protocol):
    """Carries calls to one server. Thread-safe."""

    #: Methods that the server listed last; None if it has listed none. It may have
    #: others by now.
    methods: frozenset[str] | None

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        """Sends a call.

        Args:
            method: Which.
            args: Its arguments.
            kwargs: Its arguments.
            timeout_s: Seconds it may take; None is for ever.
            blocking: Whether the caller is going to wait at once.

        Raises:
            SerializationError: The arguments cannot be pickled.
        """

    def forward(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        """As `submit`, of arguments that are packed already, for a caller who does not wait."""

    def open_futures(self) -> list[PendingCall]:
        """Returns the calls that have not ended and that no thread was going to wait for."""

    def stop_waiting(self) -> None:
        """From now on, calls fail with ServerUnreachableError where no server answers."""

    def move(self, address: str) -> Callable[[], None]:
        """From now on, calls go to the server at another address, those too that wait for one.

        Returns:
            Finishes the move: gives up the connection, whose calls raise ServerLostError. Not done
            by `move` itself, because their callers may call again; so call it without locks.
        """

    def close(self, reason: str) -> None:
        """Fails all pending calls with CallCancelledError and gives back what it holds."""

    def drop(self) -> None:
        """Forgets its connection in a forked child; the parent continues with it."""


def open_lane(options: LaneOptions) -> Lane:
    """Chooses the lane for a connection."""
    from courier._local import LocalLane  # which knows this room

    return LocalLane(options)


def result_of(reply: Returned, where: str, method: str) -> object:
    """Returns what a method returned.

    Raises:
        SerializationError: It cannot be unpickled here.
    """
    try:
        return unpack(reply.parcel)
    except SerializationError as error:
        raise SerializationError(
            f"{where}: {method} answered, but its result cannot be unpickled here: {error}"
        ) from error.__cause__


def value_of(reply: Returned | Given | Raised | Refused, where: str, method: str) -> object:
    """Returns what a method returned, or raises what it raised."""
    if isinstance(reply, Returned):
        return result_of(reply, where, method)
    if isinstance(reply, Given):
        return reply.value
    if isinstance(reply, Raised):
        raise reply.report.rebuild(where)
    raise reply.kind(f"{where}: {method}: {reply.text}")


def iterate(stream: ReplyStream, where: str, method: str) -> Iterator[object]:
    """Yields the items of a remote generator; ends it when the iterator is closed."""
    try:
        while (reply := stream.next_reply()) is not None:
            yield value_of(reply, where, method)
    finally:
        stream.close()
