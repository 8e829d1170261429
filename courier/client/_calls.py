"""Calls and streams of items, on the side of the client."""

import collections
import threading
import time
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING

from courier.calls.outcomes import BUSY, STOPPING, End, Item, Items, Kind, Value, read
from courier.calls.pending import PendingCall
from courier.calls.records import MethodNumbers, how_ended
from courier.client._background_reader import BACKGROUND_READER
from courier.client._link import Exchange, Link, seconds_until
from courier.errors import CallCancelledError, CourierError, ServerLostError
from courier.values.parcel import NO_PARCEL, Parcel
from courier.wire.frames import Frame, call_meta, item_weight

if TYPE_CHECKING:
    from courier.client._lane import Lane

#: Times a call to an idempotent method is sent again when its connection broke. The call may be
#: what killed its server, and must not kill each new one.
_MAX_REPEATS = 3
#: The part of its time that a call whose time is over has more, for its server to say what became of
#: it; how many seconds at most; and fewer are too few to ask.
_TELLS, _TELLS_S, _SOONEST_S = 0.1, 0.2, 0.01
#: Of so many at a time by one connection it is asked; a server that has too much to do is spared.
_MOST_ASKING = 16
_SILENT = "the server does not say what became of it: it was stopped, is busy, or runs code that holds the GIL"


class WireCall(PendingCall, Exchange):
    """One call to another process."""

    # Not set for each call, as in `PendingCall`.
    #: The connection it was sent over; None while there is none.
    link: Link | None = None
    number = 0
    #: Whether nothing more will come on its link.
    is_ready = True
    #: Above 0 the call may have run.
    _repeats = 0
    #: Whether it waits for a server that is not there; None: as the client does.
    waits: bool | None = None

    def __init__(
        self,
        lane: "Lane",
        method: str,
        arguments: Parcel,
        timeout_s: float | None,
        numbers: MethodNumbers,
        *,
        is_shared: bool,
    ) -> None:
        # As `PendingCall` does it, without the time that it takes to call that.
        self._method = method
        self._timeout_s = timeout_s
        if timeout_s is not None:
            self.deadline = time.monotonic() + timeout_s
        self.is_shared = is_shared
        self._lane = lane
        self.numbers = numbers
        self._arguments: Parcel | None = arguments
        self.gates: list[threading.Lock] = []

    @property
    def server_name(self) -> str:
        return self._lane.options.where

    # Called by clients

    def _break_off(self) -> None:
        link = self.link
        self.cancel()
        if link is not None:
            link.hand_on()  # this thread may have been woken to lead

    def wait_until(self, deadline: float | None) -> bool:
        while self.outcome is None:
            link = self.link
            if link is None:
                self._wait_for_link(deadline)
            else:
                link.wait(self, deadline)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self.outcome is not None

    def _wait_for_link(self, deadline: float | None) -> None:
        """Waits until it has been sent, was settled, or a monotonic time has come."""
        gate = threading.Lock()
        gate.acquire()
        self.gates.append(gate)
        try:
            if not self.is_settled and self.link is None:
                gate.acquire(timeout=seconds_until(deadline))
        finally:
            self.gates.remove(gate)

    def hurry(self) -> None:
        link = self.link
        if link is not None:
            link.flush()
            BACKGROUND_READER.attend(link, soon=True)

    # Called by its link

    def send(self, link: Link, *, at_once: bool) -> None:
        arguments = self._arguments
        if arguments is None or self.outcome is not None:
            return
        if self._repeats and self._method not in link.idempotent:
            self.settle(
                ServerLostError(
                    f"{self.where}: {self.what_ran()}; the server that answers now does not call "
                    "the method idempotent"
                )
            )
            return
        self.link = link
        self.is_ready = False
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            kind, meta = call_meta(self._method, left)
        except CourierError as error:
            self.settle(error)
            return
        link.begin(self, kind, meta, arguments, at_once=at_once)
        if self.was_given_up:
            # Cancelled meanwhile, perhaps before it was sent.
            link.forget(self.number)
            if not link.is_lost:
                link.post(Kind.CANCEL, self.number, NO_PARCEL)

    def take_number(self, number: int, tag: int) -> None:
        self.number = number
        if self.record:  # it has waited, or is repeated
            self.numbers.sent(self.record, tag, number)
        else:
            self.began = began = perf_counter()
            self.record = self.numbers.begin(began, tag, number, get_ident())

    def accept(self, frame: Frame) -> None:
        kind = frame.kind
        link = self.link
        if kind == Value.kind:
            self.settle(Value(frame.parcel))
            return
        try:
            if kind == Items.kind:
                assert link is not None
                stream = WireStream(self, link, self.number)
                if not self.settle(stream):
                    stream.close()
            elif kind == STOPPING.kind:
                # It did not run, so the next server may run it.
                if link is not None:
                    link.forget(self.number)
                self.take_back("the server stops")
            elif kind == BUSY.kind:
                self.settle(BUSY.error(self.where))
            elif kind == Kind.TOLD and self.is_late:
                text = bytes(frame.parcel.pickle).decode(errors="replace")
                self._give_up(self.timeout_error(why=text))
            else:
                self.settle(read(kind, frame.parcel))
        except CourierError as error:
            self.settle(type(error)(f"{self.where}: {error}"))

    def take_back(self, reason: str, *, unsent: bool = False) -> None:
        self._leave_link()
        self._lane.resubmit(self, reason, unsent=unsent)
        self.wake()

    def lose(self, error: CourierError) -> None:
        if not isinstance(error, ServerLostError):
            self.settle(type(error)(f"{self.where}: {error}"))
            return
        link = self.link
        self._leave_link()
        lost = ServerLostError(f"{self.where}: {error}; the call may have run")
        idempotent = link is not None and self._method in link.idempotent
        if not idempotent or self._repeats >= _MAX_REPEATS:
            self.settle(lost)
            return
        self._repeats += 1
        self._lane.resubmit(self, str(error))
        self.wake()

    def _leave_link(self) -> None:
        self.link = None
        # In this order: a waiting thread that finds itself ready looks for the link next.
        self.is_ready = True

    def expire(self) -> None:
        """Asks the server, which has a moment, what became of the call; then gives it up."""
        assert self.deadline is not None
        now = time.monotonic()
        link = self.link
        tells_s = min(_TELLS_S, _TELLS * (self._timeout_s or 0.0))
        if link is None or link.is_lost:
            self._give_up(self.timeout_error(why=self.what_ran()))
        elif not self.is_late and (tells_s < _SOONEST_S or len(link.asking) >= _MOST_ASKING):
            self._give_up(self.timeout_error())
        elif not self.is_late:
            link.asking.add(self.number)
            self.deadline = now + tells_s
            self.is_late = True
            link.post(Kind.ASK, self.number, NO_PARCEL)
        elif now >= self.deadline:  # not where two threads come at once
            self._give_up(self.timeout_error(why=_SILENT))

    def what_ran(self) -> str:
        return "it was sent before and may have run" if self._repeats else "nothing was run"

    @property
    def was_given_up(self) -> bool:
        return isinstance(self.outcome, Exception)

    @property
    def may_have_run(self) -> bool:
        return self._repeats > 0

    def _give_up(self, error: CourierError) -> bool:
        link, number = self.link, self.number
        if not self.settle(error):
            return False
        if link is not None:
            link.post(Kind.CANCEL, number, NO_PARCEL)
        return True

    def _note_end(self) -> None:
        self.is_ready = True
        self._arguments = None
        link = self.link
        if self.is_late and link is not None:
            link.asking.discard(self.number)
        if link is None:
            self._lane.forget(self)
        elif not isinstance(self.outcome, Items):
            link.forget(self.number)
        if self.gates:
            self.wake()


class WireStream(Items, Exchange):
    """The items of a generator on a server."""

    is_shared = True

    def __init__(self, call: WireCall, link: Link, number: int) -> None:
        self._link = link
        self._call = call
        self.number = number
        self.deadline = call.deadline
        self.gates: list[threading.Lock] = []
        self._frames: collections.deque[Frame] = collections.deque()
        self._error: CourierError | None = None
        self._over = False
        link.replace(number, self)

    @property
    def is_ready(self) -> bool:
        return bool(self._frames) or self._error is not None or self._over

    def next_item(self) -> Item:
        if self._over:
            return End()
        while not self._frames:
            if self._error is not None:
                self._finish(how_ended(self._error))
                raise self._error
            if self._over:
                raise CallCancelledError(f"{self._call.where}: the stream was closed")
            self._link.wait(self, self.deadline)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.expire()
        frame = self._frames.popleft()
        if frame.kind == End.kind:
            self._finish()
            return End()
        try:
            item = read(frame.kind, frame.parcel)
        except CourierError as error:
            self.close()
            raise type(error)(f"{self._call.where}: {error}") from None
        if isinstance(item, Value):
            taken = item_weight(item.parcel)
            self._link.post(Kind.MORE, self.number, Parcel(taken.to_bytes(8, "little")))
        else:
            self._finish(item.kind)
        return item

    def _finish(self, how: int = End.kind) -> None:
        self._over = True
        self._link.forget(self.number)
        self._call.end_record(how)

    def close(self) -> None:
        if self._over:
            return
        self._finish()
        self._frames.clear()
        if self._error is None:
            self._link.post(Kind.CANCEL, self.number, NO_PARCEL)
        self.wake()

    def accept(self, frame: Frame) -> None:
        self._frames.append(frame)
        self.wake()

    def lose(self, error: CourierError) -> None:
        if self._error is None:
            self._error = type(error)(f"{self._call.where}: {error}")
        self.wake()

    def expire(self) -> None:
        if not self._over and self._error is None:
            self._error = self._call.timeout_error("not all items came")
            self._link.forget(self.number)
            self._link.post(Kind.CANCEL, self.number, NO_PARCEL)
            self.wake()
