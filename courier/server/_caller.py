"""A client that has proved itself, as its server sees it: its calls and its streams."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from courier.calls.context import CallContext
from courier.calls.outcomes import Answer, Failure, Item, Items, Kind, Later, Refusal, Step, Value
from courier.calls.records import note_peer
from courier.errors import CourierError, ProtocolError, ServerLostError
from courier.threads.locks import Lock
from courier.values.parcel import Parcel
from courier.wire.carrier import SocketCarrier
from courier.wire.channel import Channel
from courier.wire.frames import Frame, item_weight, method_of, whole
from courier.wire.watching import READ, WRITE

if TYPE_CHECKING:
    from courier.server.host import ConnectionServer

#: The weight of items by which a generator runs ahead of its reader; at least one item.
_AHEAD_BYTES = 1 << 20
#: Bytes of unread answers after which no more calls of a client are read.
_MAX_UNSENT_BYTES = 16 << 20
_SEND_SOON_BYTES = 1 << 16
# Plain numbers: comparing with a member of an enumeration takes longer.
_CALL = int(Kind.CALL)
_CALLS = (_CALL, int(Kind.TIMED_CALL))

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReceivedCall:
    """A call that waits for its turn, or runs."""

    caller: "ServedConnection"
    number: int
    call: CallContext
    arguments: Parcel


class ServedConnection:
    """One connection with its calls. The poller reads; any thread answers."""

    def __init__(self, host: "ConnectionServer", channel: Channel) -> None:
        self._host = host
        self._channel = channel
        self.peer = channel.carrier.peer
        note_peer(channel.tag, self.peer)
        #: Calls that run, wait or are being answered, and generators that are open.
        self._calls: dict[int, CallContext] = {}
        self._streams: dict[int, _Stream] = {}
        self._lock = Lock()
        self._watched = READ
        self._gone = False

    def fileno(self) -> int:
        return self._channel.carrier.fileno()

    def open_calls(self) -> list[CallContext]:
        return list(self._calls.values())

    @property
    def is_busy(self) -> bool:
        return not self._gone and bool(self._calls or self._channel.is_pending)

    # Reading, by the poller only

    def on_event(self, events: int) -> None:
        try:
            if events & WRITE:
                self.flush()
            channel = self._channel
            carrier = channel.carrier
            while events & ~WRITE:
                came = channel.receive(wait=False)
                if isinstance(came, tuple) and came[0] == _CALL and not carrier.hides_arrivals:
                    _, number, meta, arguments = came
                    call = self._calls[number] = CallContext(method_of(meta), self.peer, None)
                    call.tag, call.number, call.connection = channel.tag, number, self
                    received = ReceivedCall(self, number, call, Parcel(arguments))
                    self._host.run(received, is_alone=True)
                    return  # if the method took long, another thread reads by now
                if came is None:
                    self.hang_up()
                    return
                for frame in [whole(came)] if isinstance(came, tuple) else came:
                    self._take(frame)
                channel.check()
                if not carrier.hides_arrivals:
                    return
        except BlockingIOError:
            return
        except (OSError, CourierError):
            self.hang_up()

    def _take(self, frame: Frame) -> None:
        kind, number = frame.kind, frame.call
        if kind in _CALLS:
            method, timeout_s = frame.method()
            call = self._calls[number] = CallContext(method, self.peer, timeout_s)
            call.tag, call.number, call.connection = self._channel.tag, number, self
            self._host.run(ReceivedCall(self, number, call, frame.parcel))
        elif kind == Kind.CANCEL:
            with self._lock:
                cancelled = self._calls.pop(number, None)
                stream = self._streams.get(number)
            if cancelled is not None:
                cancelled.end()
            if stream is not None:
                stream.cancel()
        elif kind == Kind.MORE:
            stream = self._streams.get(number)
            if stream is not None:
                stream.grant(int.from_bytes(frame.parcel.pickle[:8], "little"))
        elif kind == Kind.ASK:
            asked = self._calls.get(number)  # None: it was answered just now
            text = "" if asked is None else self._host.dispatcher.whereabouts(asked)
            self.send_item(number, Kind.TOLD, Parcel(text.encode(errors="replace")))
        else:
            raise ProtocolError(f"a frame of unknown kind {kind}")

    def answer(
        self, number: int, call: CallContext, outcome: Answer | Later, *, at_once: bool
    ) -> None:
        """Sends the outcome of a call; unless `at_once`, a later call flushes it soon."""
        if type(outcome) is Value:
            self._finish(number, call, outcome, at_once)
        elif isinstance(outcome, Later):
            outcome.then(lambda settled: self._settle(number, call, settled))
        elif isinstance(outcome, Items):
            stream = _Stream(self, number, call, outcome, self._host)
            with self._lock:
                gone = self._gone or number not in self._calls
                if not gone:
                    self._streams[number] = stream
            if gone:
                outcome.close()
                return
            self.send_item(number, outcome.kind, outcome.parcel)
            stream.grant(0)
        else:
            self._finish(number, call, outcome, at_once)

    def _finish(
        self, number: int, call: CallContext, outcome: Value | Failure | Refusal, at_once: bool
    ) -> None:
        call.end()
        if number not in self._calls or self._gone:
            return  # the caller has cancelled
        channel = self._channel
        if at_once:
            try:
                done = channel.send(outcome.kind, number, outcome.parcel, b"")
            except OSError:
                channel.shut()  # the poller sees that and clears up
                return
            self._calls.pop(number, None)
            if not done or self._watched != READ:
                self.flush()
            return
        channel.post(outcome.kind, number, outcome.parcel)
        self._calls.pop(number, None)
        if channel.unsent_bytes >= _SEND_SOON_BYTES:
            self.flush()

    def _settle(self, number: int, call: CallContext, outcome: Answer) -> None:
        try:
            self.answer(number, call, outcome, at_once=True)
        except BaseException:  # noqa: BLE001 - the waiting caller gets the error
            self.give_up()

    def send_item(self, number: int, kind: int, parcel: Parcel) -> None:
        """Sends a frame of a generator: that it is one, an item, or its end."""
        self._channel.post(kind, number, parcel)
        self.flush()

    def end_stream(self, number: int) -> None:
        self._streams.pop(number, None)
        call = self._calls.pop(number, None)
        if call is not None:
            call.end()

    def say_goodbye(self) -> None:
        self._channel.post(Kind.GOODBYE, 0)
        self.flush()

    def flush(self) -> None:
        """Sends as much as goes now; the poller sends the rest when that is possible."""
        channel = self._channel
        try:
            done = channel.flush()
        except OSError:
            # The poller sees that and clears up.
            channel.shut()
            return
        if done and self._watched == READ:
            return
        with self._lock:
            # Checked under the lock: another thread may have sent, or posted, meanwhile.
            wanted = WRITE if channel.is_pending else READ
            if channel.unsent_bytes < _MAX_UNSENT_BYTES:
                wanted |= READ
            if wanted != self._watched and not self._gone:
                self._watched = wanted
                self._host.watch(self, wanted)

    def cancel_all(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end()
        for stream in list(self._streams.values()):
            stream.cancel()

    def _leave(self) -> bool:
        """Ends all calls; returns whether it had not been done before."""
        with self._lock:
            if self._gone:
                return False
            self._gone = True
        self._host.forget(self)
        self.cancel_all()
        return True

    def hang_up(self) -> None:
        """Hangs up. Safe to call twice; by the poller, or when there is none any more."""
        if self._leave():
            self._channel.shut()
            self._channel.close()

    def take_over(self) -> SocketCarrier:
        """Returns the carrier, whose owner is the caller from now on: nothing is served there.

        For a method whose client has sent nothing after its call. Raises ServerLostError.
        """
        if not self._leave():
            raise ServerLostError(f"{self.peer} has left")
        return self._channel.carrier

    def give_up(self) -> None:
        """Ends the connection after the present error, from any thread; the poller clears up."""
        _log.exception("a courier server cannot answer %s and hangs up", self.peer)
        self._channel.shut()

    def drop(self) -> None:
        self._channel.carrier.close()

    def tidy(self) -> bool:
        return self._channel.tidy() or self.is_busy


class _Stream:
    """A generator whose items are sent as fast as their reader takes them.

    One step is one task of the handlers' pool, so that an open stream holds no thread while its
    reader is busy.
    """

    def __init__(
        self,
        caller: ServedConnection,
        number: int,
        call: CallContext,
        items: Items,
        host: "ConnectionServer",
    ) -> None:
        self._caller = caller
        self._number = number
        self._call = call
        self._items = items
        self._host = host
        self._lock = Lock()
        #: The weight of the items that were sent and not yet taken.
        self._ahead = 0
        self._steps = False
        self._over = False

    def grant(self, taken: int) -> None:
        """Goes on after the reader has taken items of this weight."""
        with self._lock:
            self._ahead -= taken
            if self._steps or self._over or self._ahead > _AHEAD_BYTES:
                return
            self._steps = True
        self._host.run_step(self._advance)

    def cancel(self) -> None:
        self._call.end()
        with self._lock:
            closes = not (self._steps or self._over)
            self._over = True
        if closes:
            self._host.run_step(self._close)

    def _close(self) -> None:
        self._items.close()
        self._caller.end_stream(self._number)

    def _advance(self, step: "Step[Item] | None" = None) -> None:
        """Sends items, the first of a step that has ended, until others are to go on."""
        try:
            while not self._over:
                if step is not None:
                    item, step = step.result(), None
                elif self._items.is_async:
                    # No thread of the pool waits for its item.
                    self._items.begin(self._host.handlers, self._advance)
                    return
                else:
                    item = self._items.next_item()
                if not self._take(item):
                    self.grant(0)
                    return
            self._close()
        except BaseException:  # noqa: BLE001 - the reader gets the error
            with self._lock:
                self._over = True
            self._close()
            self._caller.give_up()

    def _take(self, item: Item) -> bool:
        """Sends an item; returns whether the same thread is to take the next step."""
        parcel = item.parcel
        self._caller.send_item(self._number, item.kind, parcel)
        # Calls may wait for this thread, which is busy with something longer.
        yields = self._host.handlers.has_waiting
        with self._lock:
            self._ahead += item_weight(parcel)
            if not isinstance(item, Value):
                self._over = True
            if not self._over and (self._ahead > _AHEAD_BYTES or yields):
                # From here on another thread may go on, or close.
                self._steps = False
                return False
        return True
