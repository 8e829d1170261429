"""Calls and streams of items, as a client waits for them."""

import collections
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from courier._engine.frames import COMPRESSED, Frame, call_meta, compressed, item_weight
from courier._engine.link import Link, open_gate
from courier._kinds import Kind
from courier._lane import PendingCall
from courier._options import ClientOptions
from courier._outcomes import BUSY, STOPPING, End, Item, Items, Outcome, Value, read
from courier._parcel import Parcel
from courier.errors import (
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ProtocolError,
    ServerLostError,
)

#: Times a call to an idempotent method is sent again when its connection broke. It may be what
#: killed its server, and must not do so to each one that comes after it.
_MAX_REPEATS = 3


class Sender(Protocol):
    """What a call must know of its lane; see `courier._engine.lane`."""

    options: ClientOptions
    compresses: bool

    def hurry(self, call: "WireCall") -> None: ...

    def resubmit(self, call: "WireCall", reason: str, *, unsent: bool = False) -> None: ...

    def wait_for_link(self, call: "WireCall", deadline: float | None) -> None: ...

    def forget(self, call: "WireCall") -> None: ...


class WireCall:
    """One call. Implements `courier._lane.PendingCall` and `courier._engine.link.Exchange`."""

    is_stream = False
    # Not set for each call, which takes longer.
    #: The connection it was sent over; None while there is none.
    link: Link | None = None
    number = 0
    #: Whether there is no more to wait for on its link.
    is_ready = True
    deadline: float | None = None
    #: Above 0 the call may have run.
    _repeats = 0
    _outcome: Outcome | Exception | None = None
    _callback: Callable[[PendingCall], None] | None = None

    def __init__(
        self,
        lane: Sender,
        method: str,
        arguments: Parcel,
        timeout_s: float | None,
        *,
        is_shared: bool,
    ) -> None:
        self._lane = lane
        self._method = method
        self._arguments: Parcel | None = arguments
        self._timeout_s = timeout_s
        if timeout_s is not None:
            self.deadline = time.monotonic() + timeout_s
        self.gates: list[threading.Lock] = []
        self.is_shared = is_shared

    @property
    def where(self) -> str:
        """Names the call, for messages."""
        return f"{self._lane.options.where}: {self._method}"

    # What a client sees

    def wait(self) -> Outcome:
        outcome = self._outcome
        if outcome is None:
            try:
                outcome = self._wait()
            except BaseException:
                link = self.link
                self.cancel()
                if link is not None:
                    link.hand_on()  # this thread may have been woken to lead
                raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _wait(self) -> Outcome | Exception:
        link = self.link
        if link is not None and self.deadline is None:
            link.wait(self, None)
        if self._outcome is None:
            self.wait_until(self.deadline)
        outcome = self._outcome
        if outcome is None:
            self.expire()
            outcome = self._outcome
            assert outcome is not None
        return outcome

    def wait_until(self, deadline: float | None) -> bool:
        """Waits at most until a monotonic time; returns whether the answer is here."""
        while self._outcome is None:
            link = self.link
            if link is None:
                self._lane.wait_for_link(self, deadline)
            else:
                link.wait(self, deadline)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._outcome is not None

    def hurry(self) -> None:
        self._lane.hurry(self)

    def when_done(self, callback: Callable[[PendingCall], None]) -> None:
        with _settling:  # no jump in it: Python 3.10 runs signal handlers there
            self._callback = callback
            is_settled = self._outcome is not None
        if is_settled:
            self._callback = None
            callback(self)

    def cancel(self) -> bool:
        return self._give_up(CallCancelledError(f"{self.where}: the call was cancelled"))

    # What its link tells it

    def send(self, link: Link, *, at_once: bool) -> None:
        """Goes out over a connection."""
        arguments = self._arguments
        if arguments is None or self._outcome is not None:
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
        if self._lane.compresses:
            kind, arguments = kind | COMPRESSED, compressed(arguments)
        link.begin(self, kind, meta, arguments, at_once=at_once)
        if self.was_given_up:
            # Given up in the meantime, perhaps before it was sent.
            link.forget(self.number)
            if not link.is_lost:
                link.post(Kind.CANCEL, self.number, Parcel(b""))

    def accept(self, frame: Frame) -> None:
        kind = frame.kind
        link = self.link
        if self.deadline is not None and time.monotonic() >= self.deadline:
            # The handler saw the end of its time, too, and may have answered because of that.
            self.expire()
            return
        if kind == Value.kind:
            self.settle(Value(frame.parcel))
            return
        try:
            if kind == Items.kind:
                assert link is not None
                stream = WireStream(self, link, self.number)
                if not self.settle(stream, keep_open=True):
                    stream.close()
            elif kind == STOPPING.kind:
                # It did not run, so that the next server may have it.
                if link is not None:
                    link.forget(self.number)
                self.take_back("the server stops")
            elif kind == BUSY.kind:
                self.settle(BUSY.error(self.where))
            else:
                self.settle(read(kind, frame.parcel))
        except CourierError as error:
            self.settle(type(error)(f"{self.where}: {error}"))

    def take_back(self, reason: str, *, unsent: bool = False) -> None:
        self._leave_link()
        self._lane.resubmit(self, reason, unsent=unsent)
        self.wake()

    def lose(self, error: ServerLostError) -> None:
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
        self._give_up(
            CallTimeoutError(
                f"{self.where}: no answer within {self._timeout_s:.3g} s"
                + ("" if self.link is not None else f"; {self.what_ran()}")
            )
        )

    def end(self, error: CourierError) -> None:
        self.settle(type(error)(f"{self.where}: {error}"))

    def what_ran(self) -> str:
        """Tells, of a call that is not on its way, what may have happened to it."""
        return "it was sent before and may have run" if self._repeats else "nothing was run"

    @property
    def is_settled(self) -> bool:
        """Whether it has ended."""
        return self._outcome is not None

    @property
    def was_given_up(self) -> bool:
        """Whether it has ended without an answer."""
        return isinstance(self._outcome, Exception)

    def wake(self) -> None:
        """Wakes those who wait."""
        for gate in tuple(self.gates):
            open_gate(gate)

    @property
    def may_have_run(self) -> bool:
        """Whether it was sent before."""
        return self._repeats > 0

    # Its end

    def _give_up(self, error: CourierError) -> bool:
        link, number = self.link, self.number
        if not self.settle(error):
            return False
        if link is not None:
            link.post(Kind.CANCEL, number, Parcel(b""))
        return True

    def settle(self, outcome: Outcome | Exception, *, keep_open: bool = False) -> bool:
        """Ends the call, if it has not ended; returns whether this did."""
        with _settling:
            was_settled = self._outcome is not None
            if not was_settled:
                self._outcome = outcome
                callback, self._callback = self._callback, None
        if was_settled:
            link = self.link
            if link is not None and not keep_open:
                link.forget(self.number)
            return False
        self.is_ready = True
        self._arguments = None
        link = self.link
        if link is None:
            self._lane.forget(self)
        elif not keep_open:
            link.forget(self.number)
        if self.gates:
            self.wake()
        if callback is not None:
            callback(self)
        return True


#: One for all: it is held for an instant only, and a lock per call would cost more.
_settling = threading.Lock()


def _survive_fork() -> None:
    # Another thread of the parent may hold it, and will never open it here.
    global _settling
    _settling = threading.Lock()


os.register_at_fork(after_in_child=_survive_fork)


class WireStream(Items):
    """The items of a generator on a server. Implements `courier._engine.link.Exchange`."""

    is_stream = True
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
                self._over = True
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
            self._finish()
        return item

    def _finish(self) -> None:
        self._over = True
        self._link.forget(self.number)

    def close(self) -> None:
        if self._over:
            return
        self._over = True
        self._link.forget(self.number)
        self._frames.clear()
        if self._error is None:
            self._link.post(Kind.CANCEL, self.number, Parcel(b""))
        self._wake()

    def _wake(self) -> None:
        for gate in tuple(self.gates):
            open_gate(gate)

    def accept(self, frame: Frame) -> None:
        if frame.kind < Value.kind:
            self._error = ProtocolError(f"{self._call.where}: an item of unknown kind {frame.kind}")
        self._frames.append(frame)
        self._wake()

    def take_back(self, reason: str, *, unsent: bool = False) -> None:  # noqa: ARG002
        self.lose(ServerLostError(reason))  # a stream begins with an answer, so that this is idle

    def lose(self, error: ServerLostError) -> None:
        if self._error is None:
            self._error = ServerLostError(f"{self._call.where}: {error}")
        self._wake()

    def expire(self) -> None:
        if not self._over and self._error is None:
            limit = f"{self._call._timeout_s:.3g} s"
            self._error = CallTimeoutError(f"{self._call.where}: not all items came within {limit}")
            self._link.forget(self.number)
            self._link.post(Kind.CANCEL, self.number, Parcel(b""))
            self._wake()

    def end(self, error: CourierError) -> None:
        self._error = type(error)(f"{self._call.where}: {error}")
        self._wake()
