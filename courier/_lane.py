"""The wall behind which bytes travel.

A client asks a `Lane` to carry calls and knows nothing else about transport.
Today there is one lane, over gRPC; faster ones for the same process and the
same host take their place here, chosen per connection in `open_lane`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from courier._exceptions import ExceptionReport
from courier._parcel import Parcel, unpack
from courier._secret import Secret
from courier.errors import SerializationError, UnknownMethodError


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """What a lane must know about its connection."""

    address: str
    secret: Secret | None
    wait_for_ready: bool
    compress: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """The method returned this."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Raised:
    """The method raised this."""

    report: ExceptionReport


@dataclass(frozen=True, slots=True)
class Refused:
    """The server could not run the method, or not send what it returned."""

    kind: type[UnknownMethodError] | type[SerializationError]
    text: str


class ReplyStream(Protocol):
    """The items of a remote generator. Used by one thread at a time."""

    def next_reply(self) -> "Returned | Raised | Refused | None":
        """Waits for the next item; None at the end. Raises CourierError."""

    def close(self) -> None:
        """Ends the generator early. Safe to call twice, and from any thread."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The method is a generator."""

    stream: ReplyStream


Reply = Returned | Raised | Refused | Streams


class PendingCall(Protocol):
    """A call on its way. Thread-safe."""

    def wait(self) -> Reply:
        """Waits for the answer; a KeyboardInterrupt cancels the call. Raises CourierError."""

    def when_done(self, callback: Callable[["PendingCall"], None]) -> None:
        """Calls back once, soon after the answer came; `wait` then returns at once."""

    def cancel(self) -> bool:
        """Gives the call up; False if the answer is already here."""


class Lane(Protocol):
    """Carries calls to one server. Thread-safe."""

    def submit(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        """Sends a call; does not block."""

    def stop_waiting(self) -> None:
        """From now on, calls fail with ServerUnreachableError where no server answers."""

    def close(self) -> None:
        """Fails all pending calls with CallCancelledError and gives back what it holds."""


def open_lane(options: LaneOptions) -> Lane:
    """Chooses the lane for a connection."""
    from courier._grpc.client import GrpcLane  # grpc loads when it is first needed

    return GrpcLane(options)


def value_of(reply: Returned | Raised | Refused, where: str) -> object:
    """Returns what the method returned, or raises what it raised."""
    if isinstance(reply, Returned):
        try:
            return unpack(reply.parcel)
        except SerializationError as error:
            raise SerializationError(
                f"{where} answered, but its result cannot be unpickled here: {error}"
            ) from error.__cause__
    if isinstance(reply, Raised):
        raise reply.report.rebuild()
    raise reply.kind(f"{where}: {reply.text}")


def iterate(stream: ReplyStream, where: str) -> Iterator[object]:
    """Yields the items of a remote generator; ends it when the iterator is closed."""
    try:
        while (reply := stream.next_reply()) is not None:
            yield value_of(reply, where)
    finally:
        stream.close()
