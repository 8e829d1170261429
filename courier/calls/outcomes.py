"""Outcomes of calls: made where a method ends, read where its caller waits.

A transport between the two sends the `kind` and the `parcel` of an outcome. If none arrives,
`PendingCall.wait` raises an error in its place. This module runs no methods. It knows no
transports, only the numbers of kinds in their frames.
"""

import concurrent.futures
import enum
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from courier.errors import (
    CourierError,
    ProtocolError,
    SerializationError,
    ServerBusyError,
    ServerLostError,
    UnknownMethodError,
)
from courier.threads.abandoned import leave
from courier.threads.handler_pool import HandlerPool
from courier.values.exceptions import ExceptionReport
from courier.values.parcel import NO_PARCEL, Parcel, pack, unpack
from courier.values.texts import shortened

Step = concurrent.futures.Future


class Kind(enum.IntEnum):
    """The kind of a frame, as a number. The client sends those below 16, the server the others."""

    CALL = 1
    TIMED_CALL = 2
    CANCEL = 3  # the caller has cancelled this call
    MORE = 4  # the pickle: the weight of the items that were taken, see `frames.item_weight`
    ASK = 5  # where is this call, whose time is over?
    VALUE = 16
    FAILURE = 17
    UNKNOWN_METHOD = 18
    UNPICKLABLE = 19
    BAD_ARGUMENTS = 20
    BUSY = 21
    STOPPING = 22  # this call was not run: the server ends
    GENERATOR = 23  # items follow under the number of the call
    END = 24
    GOODBYE = 25  # no new calls here: the server ends
    TOLD = 26  # the answer to ASK, as text


class DescribedCall(Protocol):
    """The call of an outcome, for messages."""

    @property
    def server_name(self) -> str: ...

    @property
    def where(self) -> str: ...


@dataclass(slots=True)  # frozen ones take four times as long to make
class Value:
    """The method returned this. Never changed."""

    # A plain number: comparing with a member of an enumeration takes longer.
    kind = int(Kind.VALUE)
    parcel: Parcel

    def result(self, call: DescribedCall) -> Any:
        try:
            return unpack(self.parcel)
        except SerializationError as error:
            raise unreadable(call.where, error) from error.__cause__


def unreadable(call: str, error: SerializationError) -> SerializationError:
    return SerializationError(f"{call} answered, but its result cannot be unpickled here: {error}")


class Given(NamedTuple):
    """The method returned this very object, to a caller in the same process."""

    value: Any

    def result(self, call: DescribedCall) -> Any:  # noqa: ARG002 - as all outcomes
        return self.value


@dataclass(frozen=True, slots=True)
class Failure:
    """The method raised this."""

    kind = Kind.FAILURE
    report: ExceptionReport

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> "Failure":
        return cls(ExceptionReport.of(error, skip_frames=skip_frames))

    @property
    def parcel(self) -> Parcel:
        report, pickled = self.report, self.report.parcel or NO_PARCEL
        if pickled.buffers:  # they go beside it: a parcel in a pickle is copied
            report = replace(report, parcel=Parcel(pickled.pickle))
        return Parcel(pickle.dumps(report, protocol=5), pickled.buffers)

    @classmethod
    def read(cls, parcel: Parcel) -> "Failure":
        """Undoes `parcel`, or raises ProtocolError. Only for parcels of checked senders."""
        try:
            report = pickle.loads(parcel.pickle)
        except Exception as error:
            raise ProtocolError("the report of an exception cannot be read") from error
        if not isinstance(report, ExceptionReport):
            raise ProtocolError(f"not the report of an exception, but of type {type(report)!r}")
        if report.parcel and parcel.buffers:
            report = replace(report, parcel=Parcel(report.parcel.pickle, parcel.buffers))
        return cls(report)

    def result(self, call: DescribedCall) -> Any:
        raise self.report.rebuild(call.server_name)


#: The error for the caller of a refused call, and the beginning of its text.
_REFUSALS: dict[int, tuple[type[CourierError], str]] = {
    Kind.UNKNOWN_METHOD: (UnknownMethodError, ""),
    Kind.UNPICKLABLE: (SerializationError, "the method ran, but cannot send "),
    Kind.BAD_ARGUMENTS: (SerializationError, "cannot unpickle the arguments of "),
    Kind.BUSY: (ServerBusyError, "all handlers are busy and the queue is full; nothing was run"),
    Kind.STOPPING: (ServerLostError, "the server stops"),
}


class Refusal(NamedTuple):
    """The server could not run the method, or not send its result."""

    kind: Kind
    text: str = ""

    @property
    def parcel(self) -> Parcel:
        return Parcel(shortened(self.text).encode("utf-8", "replace"))

    def error(self, call: str) -> CourierError:
        """Returns the error for the caller. Messages name the call as `call`."""
        error, begin = _REFUSALS[self.kind]
        return error(f"{call}: {begin}{self.text}")

    def result(self, call: DescribedCall) -> Any:
        raise self.error(call.where)


BUSY = Refusal(Kind.BUSY)
STOPPING = Refusal(Kind.STOPPING)


class End:
    """A generator has no more items."""

    kind = Kind.END
    parcel = NO_PARCEL


class Items:
    """The method is a generator; `next_item` takes one step. One step at a time."""

    kind = Kind.GENERATOR
    parcel = NO_PARCEL
    #: Whether a step from `begin` holds no thread.
    is_async = False
    #: Whether a step has raised.
    has_failed = False

    def next_item(self) -> "Item":
        """Waits for the next item. Raises CourierError if the connection is lost."""
        raise NotImplementedError

    def begin(self, handlers: HandlerPool, then: Callable[["Step[Any]"], object]) -> None:
        """Takes one step in a thread of the pool, and calls back with its outcome."""
        handlers.submit(self.next_item).add_done_callback(then)

    def close(self) -> None:
        """Ends the generator early. Safe to call twice, and from any thread."""
        raise NotImplementedError

    def result(self, call: DescribedCall) -> "RemoteIterator":
        return RemoteIterator(self._results(call), self.close)

    def _results(self, call: DescribedCall) -> Iterator[Any]:
        try:
            while not isinstance(item := self.next_item(), End):
                yield item.result(call)
        finally:
            self.close()


Item = Value | Failure | Refusal | End
#: The outcomes that can be sent.
Answer = Value | Failure | Refusal | Items
Outcome = Answer | Given


class RemoteIterator(Iterator[Any]):
    """The items of a remote generator, one by one, as they come.

    The generator runs ahead of its reader by about 1 MiB, a thousand items at most.
    Not thread-safe. Ends the generator when closed or no longer referenced.
    """

    #: For a Ctrl-C before `__init__` has set it.
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
            # Also wakes the thread that waits for an item, after this task was cancelled.
            self._close()


class Later:
    """An outcome that is not known yet; no thread waits for it. Thread-safe."""

    def __init__(
        self, future: "Step[Any]", answer_of: "Callable[[Step[Any]], Answer] | None" = None
    ) -> None:
        """Wraps a future; `answer_of` makes the outcome of it, by default from its result."""
        self._future = future
        self._answer_of = answer_of or Step.result

    def before(self, note: Callable[["Answer"], object]) -> None:
        """Has a function called with the outcome before all others; before `then`."""
        answer_of = self._answer_of

        def noted(done: "Step[Any]") -> "Answer":
            answer = answer_of(done)
            note(answer)
            return answer

        self._answer_of = noted

    def then(self, callback: Callable[["Answer"], object]) -> None:
        """Calls back with the outcome: at once, or later in the thread that brings it."""
        # The callback must not refer to the future, which keeps its callbacks: that would hold its
        # result in memory.
        answer_of = self._answer_of
        self._future.add_done_callback(lambda done: callback(answer_of(done)))


def packed(result: Any) -> Value | Refusal:
    try:
        return Value(pack(result))
    except SerializationError as error:
        text = f"a result of type {type(result).__qualname__}: {error}"
        return Refusal(Kind.UNPICKLABLE, text)


def read(kind: int, parcel: Parcel) -> Value | Failure | Refusal:
    """Returns an outcome from the frame of a proven server; raises ProtocolError if it is none."""
    if kind == Value.kind:
        return Value(parcel)
    if kind == Failure.kind:
        return Failure.read(parcel)
    if kind in _REFUSALS:
        text = bytes(parcel.pickle).decode("utf-8", "replace")
        return Refusal(Kind(kind), text)
    raise ProtocolError(f"an answer of unknown kind {kind}")
