"""What comes of a call: made where its method ends, read where its caller waits.

A transport between the two sends the `kind` and the `parcel` of an outcome. If none arrives,
`PendingCall.wait` raises an error in its place. Nothing here runs methods or knows transports.
"""

import concurrent.futures
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from courier._abandoned import leave
from courier._exceptions import ExceptionReport
from courier._kinds import Kind
from courier._parcel import Parcel, pack, unpack
from courier._pool import HandlerPool
from courier._texts import shortened
from courier.errors import (
    CourierError,
    ProtocolError,
    SerializationError,
    ServerBusyError,
    ServerLostError,
    UnknownMethodError,
)

Step = concurrent.futures.Future


@dataclass(slots=True)  # frozen ones take four times as long to make
class Value:
    """The method returned this. Never changed."""

    # A plain number: comparing with a member of an enumeration takes longer.
    kind = int(Kind.VALUE)
    parcel: Parcel

    def result(self, where: str, method: str) -> Any:
        """Returns it.

        Raises:
            SerializationError: It cannot be unpickled here.
        """
        try:
            return unpack(self.parcel)
        except SerializationError as error:
            raise unreadable(f"{where}: {method}", error) from error.__cause__


def unreadable(call: str, error: SerializationError) -> SerializationError:
    """Returns what the caller gets if what a method returned cannot be unpickled."""
    return SerializationError(f"{call} answered, but its result cannot be unpickled here: {error}")


class Given(NamedTuple):
    """The method returned this very object, to a caller in the same process."""

    value: Any

    def result(self, where: str, method: str) -> Any:  # noqa: ARG002 - as all outcomes
        """Returns it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Failure:
    """The method raised this."""

    kind = Kind.FAILURE
    report: ExceptionReport

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> "Failure":
        """Describes an exception, as `ExceptionReport.of`."""
        return cls(ExceptionReport.of(error, skip_frames=skip_frames))

    @property
    def parcel(self) -> Parcel:
        """The report, packed."""
        report = self.report
        pickled = report.parcel
        data = None if pickled is None else bytes(pickled.pickle)
        head = (report.type_name, report.message, report.traceback, report.causes, data)
        return Parcel(pickle.dumps(head, protocol=5), () if pickled is None else pickled.buffers)

    @classmethod
    def read(cls, parcel: Parcel) -> "Failure":
        """Undoes `parcel`. Call it only for parcels whose sender has been checked.

        Raises:
            ProtocolError: It is no report.
        """
        try:
            type_name, message, traceback, causes, data = pickle.loads(parcel.pickle)
        except Exception as error:
            raise ProtocolError("the report of an exception cannot be read") from error
        pickled = Parcel(data, parcel.buffers) if data is not None else None
        return cls(ExceptionReport(type_name, message, traceback, pickled, causes))

    def result(self, where: str, method: str) -> Any:  # noqa: ARG002 - as all outcomes
        """Raises it."""
        raise self.report.rebuild(where)


#: The error that the caller of a refused call gets, and what it says before the text.
_REFUSALS: dict[int, tuple[type[CourierError], str]] = {
    Kind.UNKNOWN_METHOD: (UnknownMethodError, ""),
    Kind.UNPICKLABLE: (SerializationError, "the method ran, but cannot send "),
    Kind.BAD_ARGUMENTS: (SerializationError, "cannot unpickle the arguments of "),
    Kind.BUSY: (
        ServerBusyError,
        "all handlers are busy and the queue is full; nothing was run",
    ),
    Kind.STOPPING: (ServerLostError, "the server stops"),
}


class Refusal(NamedTuple):
    """The server could not run the method, or not send what it returned."""

    kind: Kind
    text: str = ""

    @property
    def parcel(self) -> Parcel:
        """The text, packed."""
        return Parcel(shortened(self.text).encode("utf-8", "replace"))

    def error(self, call: str) -> CourierError:
        """Returns what the caller gets. Messages name the call as `call`."""
        error, begin = _REFUSALS[self.kind]
        return error(f"{call}: {begin}{self.text}")

    def result(self, where: str, method: str) -> Any:
        """Raises the error."""
        raise self.error(f"{where}: {method}")


BUSY = Refusal(Kind.BUSY)
STOPPING = Refusal(Kind.STOPPING)


class End:
    """A generator has no more items."""

    kind = Kind.END
    parcel = Parcel(b"")


class Items:
    """The method is a generator; `next_item` takes one step. One step at a time."""

    kind = Kind.GENERATOR
    parcel = Parcel(b"")
    #: Whether a step that `begin` has begun holds no thread.
    is_async = False

    def next_item(self) -> "Item":
        """Waits for the next item. Raises CourierError if the way to the generator is lost."""
        raise NotImplementedError

    def begin(self, handlers: HandlerPool, then: Callable[["Step[Any]"], object]) -> None:
        """Takes one step in a thread of the pool, and calls back with its outcome."""
        handlers.submit(self.next_item).add_done_callback(then)

    def close(self) -> None:
        """Ends the generator early. Safe to call twice, and from any thread."""
        raise NotImplementedError

    def result(self, where: str, method: str) -> "RemoteIterator":
        """Returns an iterator over the items."""
        return RemoteIterator(self._results(where, method), self.close)

    def _results(self, where: str, method: str) -> Iterator[Any]:
        try:
            while not isinstance(item := self.next_item(), End):
                yield item.result(where, method)
        finally:
            self.close()


#: A step of a generator.
Item = Value | Failure | Refusal | End
#: What can be sent.
Answer = Value | Failure | Refusal | Items
Outcome = Answer | Given


class RemoteIterator(Iterator[Any]):
    """The items of a remote generator, one by one, as they come.

    The generator runs ahead of its reader by about 1 MiB, a thousand items at most.
    Not thread-safe. Ends the generator when closed or no longer referenced.
    """

    #: Until it is made: a Ctrl-C may come before.
    _is_over = True

    def __init__(self, items: Iterator[Any], close: Callable[[], None]) -> None:
        self._items = items
        self._close = close
        self._is_over = False

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except BaseException:
            self._is_over = True
            self._close()
            raise

    def close(self) -> None:
        """Ends the generator early."""
        self._close()

    def __del__(self) -> None:
        if not self._is_over:
            leave(self._close)

    async def __aiter__(self) -> AsyncIterator[Any]:
        import asyncio

        end = object()
        try:
            while (item := await asyncio.to_thread(next, self._items, end)) is not end:
                yield item
        finally:
            # Also wakes the thread that waits for an item when this task was cancelled.
            self._close()


class Later:
    """What comes of a method is not known yet, and no thread waits for it. Thread-safe.

    It is for one who asks, by `then`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: Answer | None = None
        self._callback: Callable[[Answer], None] | None = None

    def settle(self, outcome: Answer) -> None:
        """Reports what came of it; once."""
        with self._lock:
            self._outcome = outcome
            callback = self._callback
        if callback is not None:
            callback(outcome)

    def then(self, callback: Callable[[Answer], None]) -> None:
        """Calls back with the outcome: here and now, or later in the thread that brings it."""
        with self._lock:
            self._callback = callback
            outcome = self._outcome
        if outcome is not None:
            callback(outcome)


def packed(result: Any) -> Value | Refusal:
    """Returns the outcome of a method that returned this."""
    try:
        return Value(pack(result))
    except SerializationError as error:
        text = f"a result of type {type(result).__qualname__}: {error}"
        return Refusal(Kind.UNPICKLABLE, text)


def read(kind: int, parcel: Parcel) -> Value | Failure | Refusal:
    """Returns an outcome that has come from a proven server.

    Raises:
        ProtocolError: It is none.
    """
    if kind == Value.kind:
        return Value(parcel)
    if kind == Failure.kind:
        return Failure.read(parcel)
    if kind in _REFUSALS:
        text = bytes(parcel.pickle).decode("utf-8", "replace")
        return Refusal(Kind(kind), text)
    raise ProtocolError(f"an answer of unknown kind {kind}")
