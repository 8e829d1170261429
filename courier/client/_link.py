"""The client's half of one connection: the waiting thread reads.

There is no thread between a caller and the socket. The first of the callers that wait becomes the
leader: it reads, and settles the calls of the others, until its own is answered; then it makes one
of the waiting threads the next leader. The background reader reads for calls without a waiting thread.
(Leader/followers: D. Schmidt et al., POSA 2. A hop to another thread costs as much as the whole
round trip through the socket.)

Three rules must hold:

- A follower first says that it waits, and then looks once more for a leader. A leader that leaves
  first gives up the lead, and then looks for followers. Otherwise a wake-up is missed.
- A leader never blocks on writing: both sides would wait for each other to read.
- A signal handler or a finaliser may run between any two steps, and call by this link. So a thread
  takes the lead together with the note of its owner, and gives it up, each in one step of the
  interpreter.
"""

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from courier.calls.outcomes import Kind, Value
from courier.calls.records import MethodNumbers, how_ended
from courier.errors import CallCancelledError, CourierError, ServerLostError
from courier.threads.abandoned import leave
from courier.threads.locks import Lock
from courier.values.parcel import Parcel
from courier.wire.channel import BrokenError, Channel, NothingSentError
from courier.wire.frames import Frame, SmallFrame, call_meta, whole
from courier.wire.watching import READ, WRITE, Spin, poll_of, poll_once

if TYPE_CHECKING:
    from courier.client._background_reader import BackgroundReader

#: Bytes that are sent at once, without waiting for more.
_ENOUGH_BYTES = 1 << 12
#: After a pause of so many seconds, a sender first checks that the server is still there.
_REST_S = 0.001
#: How often a leader checks whether another thread has ended its call.
_LOOK_S = 0.02
#: How often a follower looks whether there is a leader: a Ctrl-C may keep one from waking the next.
_LOOK_FOR_LEADER_S = 1.0
#: The longest wait that poll and locks take; waiting threads wait again.
_LONGEST_S = 1e6
#: How often a sender on a full connection tries again: the reading thread may leave, or sleep.
_FULL_S = 0.02
_INTERRUPTED = "a thread that used the connection was interrupted"
_LEADER = "leader"
_AS_LEADER = (_LEADER,)


class Exchange:
    """A call, or a stream of items: what frames of one number belong to."""

    #: One for each waiting thread that does not lead; opened to wake it.
    gates: "list[threading.Lock]"
    #: Of its frames, on its link.
    number: int
    #: Whether threads other than the waiting one may end it.
    is_shared: bool
    #: Monotonic time at which the caller gives up.
    deadline: float | None

    def take_number(self, number: int, tag: int) -> None:
        """Is called before its first frame is sent by the connection of this tag."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take, for the waiting thread."""
        raise NotImplementedError

    def accept(self, frame: Frame) -> None:
        """Takes a frame that came for it. Does not raise, block, or run code of users."""

    def take_back(self, reason: str, *, unsent: bool = False) -> None:
        """Is called if nothing of it was sent; only for calls."""

    def lose(self, error: CourierError) -> None:
        """Is called when no more frames will come here: its server was lost, or it was cancelled."""

    def expire(self) -> None:
        """Is called when its deadline has passed."""

    def wake(self) -> None:
        for gate in tuple(self.gates):
            open_gate(gate)


E = TypeVar("E", bound=Exchange)
#: A call as it is counted, its record, and when it began.
Counted = tuple[MethodNumbers, int, float]
#: Makes the exchange of a sent call that was not answered at once, from its link and number.
OpenCall = Callable[[str, Parcel, "Link", int, Counted], E]
P = ParamSpec("P")


class Link:
    """One connection to a server that has proved itself. Thread-safe."""

    def __init__(
        self,
        channel: Channel,
        idempotent: frozenset[str],
        on_end: Callable[["Link"], None],
        reader: "BackgroundReader",
    ) -> None:
        """Takes over a connection; `on_end` is called once, when no new calls can begin here."""
        self._channel = channel
        self.tag = channel.tag
        self.idempotent = idempotent
        self._on_end = on_end
        self._reader = reader
        self._numbers = itertools.count(1)
        self._open: dict[int, Exchange] = {}
        #: Numbers of those whose server is asked what became of them.
        self.asking: set[int] = set()
        #: By number of an open exchange whose first frame is being sent, the sending thread: only
        #: that knows whether it was sent.
        self._beginning: dict[int, int] = {}
        #: For the leader: decides whether it polls for a moment before it sleeps, and polls.
        self._spin = Spin()
        self._look = poll_of(channel.carrier.fileno())
        #: Ident of the leading thread; empty if there is none. Changed only by the thread that
        #: takes or gives up the lead.
        self._lead: dict[str, int] = {}
        #: Frames that the leader has read and not handed out.
        self._came: collections.deque[Frame] = collections.deque()
        #: Exchanges whose threads wait for another one to read, by their gates, in order of
        #: arrival.
        self._followers: dict[threading.Lock, Exchange] = {}
        #: How often a thread has led; tells the background reader whether one does.
        self.leads = 0
        #: Whether the background reader found that another one leads, and must be called again.
        self.passed_over = False
        self._ended = False
        self._used_at = monotonic()
        #: The error of calls after its end.
        self._lost: CourierError | None = None
        self._state = Lock()

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def needs_attention(self) -> bool:
        return not self.is_lost and bool(self._open or self._channel.is_pending)

    @property
    def has_unsent(self) -> bool:
        return self._channel.is_pending

    def fileno(self) -> int:
        return self._channel.carrier.fileno()

    def refresh(self) -> bool:
        """Checks, after a pause, whether the server has left; returns whether calls can begin."""
        me = get_ident()
        if not self._can_read(me) or me in self._beginning.values():
            return False  # what this thread interrupts must go on first: use another connection
        if self._channel.is_shut or self.is_lost:
            self.fail(_INTERRUPTED)
            return False
        if not self._open:
            now = monotonic()
            if now - self._used_at > _REST_S:
                self.read_now()
            self._used_at = now
        return not self._ended

    # Sending

    def ask(
        self, method: str, arguments: Parcel, numbers: MethodNumbers, open_call: "OpenCall[E]"
    ) -> Parcel | E | None:
        """Sends a call and reads its answer, if no other thread uses the connection.

        A call that is answered while its caller waits needs no entry in the shared table. Returns
        the result; if something else came, the exchange, open as after `begin`; None if nothing was
        sent.
        """
        channel = self._channel
        number = record = 0
        now = monotonic()
        exchange: E | None = None
        leads: list[int] = []
        me = get_ident()
        try:
            self._try_to_lead(me, leads)
            if me not in leads or self._open or channel.unsent_bytes or channel.busy:
                return None
            self.leads += 1
            if now - self._used_at > _REST_S:
                self._read_all()
            self._used_at = now
            if self._ended:
                return None
            kind, meta = call_meta(method, None)
            number = next(self._numbers)
            came: SmallFrame | list[Frame] | None = []
            is_sent = channel.send(kind, number, arguments, meta)
            record = numbers.begin(now, channel.tag, number, me)
            if is_sent:
                channel.carrier.arrived.clear()  # nothing has come yet: a Ctrl-C now does no harm
                self._spin.look(self._look)
                came = channel.receive(wait=True)
                if not channel.carrier.hides_arrivals:
                    if isinstance(came, tuple):
                        if came[0] == Value.kind and came[1] == number:
                            numbers.end(record, now)
                            return Parcel(came[3])
                    elif came and len(came) == 1:
                        (frame,) = came
                        if frame.kind == Value.kind and frame.call == number:
                            try:
                                channel.check()
                            except BrokenError as error:
                                self.fail(f"the connection broke: {error}")
                            numbers.end(record, now)
                            return frame.parcel
            counted = numbers, record, now
            exchange = self._open[number] = open_call(method, arguments, self, number, counted)
            self._take(came)
            if channel.carrier.hides_arrivals:
                self._read_all()
        except NothingSentError:
            return None  # `begin` finds out why
        except BrokenError as error:
            if exchange is None:
                record = record or numbers.begin(now, channel.tag, number, me)
                counted = numbers, record, now
                exchange = self._open[number] = open_call(method, arguments, self, number, counted)
            self.fail(f"the connection broke: {error}")
        except BaseException as error:
            if record and exchange is None:
                numbers.end(record, now, how=how_ended(error))
            if number:
                self._break_off()
                self.post(Kind.CANCEL, number, Parcel(b""))
            raise
        finally:
            if me in leads:
                del self._lead[_LEADER]
                self._pass_on()
        if self._lost is not None:  # perhaps by another thread, which did not know of the call
            self._settle_lost(number)
        return exchange

    def begin(
        self, exchange: Exchange, kind: int, meta: bytes, parcel: Parcel, *, at_once: bool
    ) -> None:
        """Sends the first frame of an exchange; unless `at_once`, a little later with others.

        Blocks while the connection is full. If it is lost, `lose` of the exchange is called.
        """
        number = next(self._numbers)
        is_first = not self._open
        exchange.take_number(number, self.tag)
        self._beginning[number] = get_ident()
        self._open[number] = exchange
        channel = self._channel
        try:
            if at_once or is_first:
                if not channel.send(kind, number, parcel, meta):
                    self.send_out()
            else:
                channel.post(kind, number, parcel, meta=meta)
                if channel.unsent_bytes >= _ENOUGH_BYTES:
                    self.send_out()
        except NothingSentError as error:
            if not isinstance(self._lost, CallCancelledError):  # the client was not closed
                self._open.pop(number, None)
                self._fail_to_send(error)
                exchange.take_back(str(error), unsent=True)
        except BrokenError as error:
            self._fail_to_send(error)
        finally:
            self._beginning.pop(number, None)
        if self._lost is not None:
            self._settle_lost(number)

    def post(self, kind: int, number: int, parcel: Parcel) -> None:
        """Sends a later frame of an exchange, as much as goes without blocking."""
        if get_ident() in self._channel.busy:
            leave(functools.partial(self.post, kind, number, parcel))
            return
        self._channel.post(kind, number, parcel)
        try:
            self._channel.flush()
        except BrokenError as error:
            self._fail_to_send(error)

    def send_out(self) -> None:
        """Sends all that waits to be sent; reads in the meantime if no other thread does."""
        try:
            while not self._channel.flush():
                # If another thread reads, it may leave at any time: look again soon.
                poll_once(self.fileno(), WRITE | READ if self.read_now() else WRITE, _FULL_S)
                if self._lost is not None:
                    return
        except BrokenError as error:
            self._fail_to_send(error)

    def flush(self) -> bool:
        """Sends as much as goes now; returns whether that was all."""
        if get_ident() in self._channel.busy:
            return True  # what this thread interrupts goes on soon
        try:
            return self._channel.flush()
        except BrokenError as error:
            self._fail_to_send(error)
            return True

    def _fail_to_send(self, error: BrokenError) -> None:
        # The last answers of the server may still be in flight. If another thread reads, it reads
        # to their end.
        if self.read_now():
            self.fail(f"the connection broke: {error}")

    # Waiting

    def wait(self, exchange: Exchange, deadline: float | None) -> None:
        """Waits for something to come, until a monotonic time at most; may return early."""
        if not self._can_read(get_ident()):
            raise RuntimeError(
                "a signal handler or finaliser cannot wait for a call that was made before: it "
                "interrupted the thread that uses the connection"
            )
        if not self._lead_to(self._read_until_ready, exchange, deadline):
            self._follow(exchange, deadline)

    def _can_read(self, me: int) -> bool:
        """Returns whether this thread is not reading or sending here already.

        It is where a signal handler or a finaliser interrupted it, which would wait for the
        interrupted code.
        """
        return self._lead.get(_LEADER) != me and me not in self._channel.busy

    def _try_to_lead(self, me: int, note: list[int]) -> None:
        """Takes the lead if no thread has it; the note is for the `finally` that gives it up."""
        if not self._lead:  # not even this thread, further up
            note.extend(map(self._lead.setdefault, _AS_LEADER, (me,)))  # see `try_to_take`

    def _lead_to(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Does something as the leader, if there is none; returns whether there was none."""
        leads: list[int] = []
        me = get_ident()
        try:
            self._try_to_lead(me, leads)
            if me in leads:
                act(*args, **kwargs)
        finally:
            if me in leads:
                del self._lead[_LEADER]
                self._pass_on()
        return me in leads

    def _read_until_ready(self, exchange: Exchange, deadline: float | None) -> None:
        self.leads += 1
        while not exchange.is_ready and self._lost is None:
            if self._has_rest():
                self._poll(READ | WRITE, deadline)
                self._read(wait=False)
            elif exchange.is_shared:
                # A leader cannot be woken, so it checks by itself whether its call was cancelled.
                soon = monotonic() + _LOOK_S
                if self._poll(READ, soon if deadline is None else min(soon, deadline)):
                    self._read(wait=False)
            elif self._spin.look(self._look):
                self._read(wait=False)
            elif deadline is None:
                self._read(wait=True)
            elif self._poll(READ, deadline):
                self._read(wait=False)
            if deadline is not None and monotonic() >= deadline:
                return

    def _has_rest(self) -> bool:
        """Sends as much as goes now; returns whether anything waits after that.

        Also if another thread sends: it may find the connection full, and leave the rest to us.
        """
        if self._channel.is_pending:
            self.flush()
        return self._channel.is_pending

    def _poll(self, events: int, deadline: float | None) -> bool:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        return poll_once(self.fileno(), events, left)

    def _follow(self, exchange: Exchange, deadline: float | None) -> None:
        gate = threading.Lock()
        gate.acquire()
        leaves = True
        try:
            exchange.gates.append(gate)
            self._followers[gate] = exchange
            if not exchange.is_ready and self._lost is None and self._lead:
                left = seconds_until(deadline)
                # The leader may sleep already, without knowing of the new data.
                longest = _FULL_S if self._has_rest() else _LOOK_FOR_LEADER_S
                gate.acquire(timeout=longest if left < 0 else min(left, longest))
            # Otherwise it tries to lead next.
            leaves = exchange.is_ready or seconds_until(deadline) == 0.0
        finally:
            self._followers.pop(gate, None)
            with contextlib.suppress(ValueError):
                exchange.gates.remove(gate)
            if leaves:
                # It may have been woken to lead.
                self.hand_on()

    def _pass_on(self) -> None:
        if self._lost is not None:
            if not self._channel.is_closed:
                self._finish()
        elif self.passed_over:
            self.passed_over = False
            self._reader.watch(self)
        if self._followers:
            self.hand_on()

    def hand_on(self) -> None:
        followers = self._followers
        while followers and not self._lead:
            try:
                gate = next(iter(followers))
                exchange = followers.pop(gate)
            except (StopIteration, KeyError, RuntimeError):
                continue  # another thread changed it
            if not exchange.is_ready:
                open_gate(gate)
                return

    # Reading, by the leader only

    def read_now(self) -> bool:
        """Reads received data if there is no leader; returns whether it did. For the background reader."""
        return self._lead_to(self._read_all)

    def _read_all(self) -> None:
        while self._lost is None and self._read(wait=False):
            pass

    def _read(self, *, wait: bool) -> bool:
        """Receives once and hands out the frames; returns whether something came."""
        channel = self._channel
        came = False
        try:
            while True:
                frames = channel.receive(wait=wait)
                came = True
                self._take(frames)
                if frames is None or not channel.carrier.hides_arrivals:
                    return frames is not None
                wait = False
        except BlockingIOError:
            return came
        except BrokenError as error:
            self.fail(f"the connection broke: {error}")
            return False
        except BaseException:
            self._break_off()
            raise

    def _take(self, came: SmallFrame | list[Frame] | None) -> None:
        """Hands out received frames; None is the end of the connection."""
        if came is None:
            self.fail(_INTERRUPTED if self._channel.is_shut else "the server closed the connection")
            return
        if isinstance(came, tuple):
            self._came.append(whole(came))
        else:
            self._came.extend(came)
        self._hand_out()
        self._channel.check()

    def _hand_out(self) -> None:
        came, exchanges = self._came, self._open
        while came:
            frame = came[0]
            exchange = exchanges.get(frame.call)
            if exchange is not None:
                exchange.accept(frame)
            elif frame.call == 0:
                self._end()
            came.popleft()  # not before, because of a Ctrl-C in between

    def _break_off(self) -> None:
        # A Ctrl-C before anything came does no harm; later, frames may be half taken, or half sent.
        if self._came or self._channel.carrier.arrived or self._channel.is_shut:
            self.fail(_INTERRUPTED)

    # The end

    def replace(self, number: int, exchange: Exchange) -> None:
        self._open[number] = exchange

    def exchanges(self) -> list[Exchange]:
        return list(self._open.values())

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def expire(self, now: float) -> float | None:
        """Ends exchanges whose deadline has passed; returns the next deadline."""
        deadlines = list[float]()
        for exchange in self.exchanges():
            if exchange.deadline is not None and exchange.deadline <= now:
                exchange.expire()
            if exchange.deadline is not None and exchange.deadline > now:  # or it has more time now
                deadlines.append(exchange.deadline)
        return min(deadlines, default=None)

    def _end(self) -> None:
        """Lets no more calls begin here; open ones go on."""
        with self._state:
            if self._ended:
                return
            self._ended = True
        self._on_end(self)

    def fail(self, reason: str) -> None:
        self.close(ServerLostError(reason))

    def close(self, error: CourierError) -> None:
        """Closes the connection; open exchanges end with an error. Safe to call twice."""
        with self._state:
            if self._lost is not None:
                return
            self._lost = error
        self._channel.shut()
        self._end()
        self._finish()

    def _finish(self) -> None:
        # The reading thread does this too, when it resigns: to close the connection, and because a
        # Ctrl-C may have interrupted the thread that began.
        for number in list(self._open):
            if number not in self._beginning:
                self._settle_lost(number)
        if get_ident() not in self._channel.busy:
            self._lead_to(self._close_channel)
        # Otherwise the background reader does it, which sees the end.

    def _close_channel(self) -> None:
        if not self._channel.is_closed:
            self._reader.dismiss(self, self.fileno())
            self._channel.close()

    def _settle_lost(self, number: int) -> None:
        assert self._lost is not None
        if (exchange := self._open.pop(number, None)) is not None:
            exchange.lose(self._lost)

    def drop(self) -> None:
        """Forgets the connection in a forked child; the parent goes on with it."""
        self._channel.carrier.close()

    def tidy(self) -> None:
        """Frees memory that was not used for long, unless a thread is reading."""
        self._lead_to(self._channel.tidy)


def seconds_until(deadline: float | None) -> float:
    """Returns the seconds until a monotonic time, for a lock; -1 is for ever."""
    if deadline is None:
        return -1
    return min(max(0.0, deadline - monotonic()), _LONGEST_S)


def open_gate(gate: threading.Lock) -> None:
    """Wakes the thread that waits at a gate; the gate may be open already."""
    try:
        gate.release()
    except RuntimeError:
        return
