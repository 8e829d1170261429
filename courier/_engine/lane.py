"""A client's way to one address: connects, reconnects, and knows what may be sent again."""

import threading
import time
import weakref
from typing import Any

from courier._engine.attendant import ATTENDANT
from courier._engine.calls import WireCall
from courier._engine.dialing import SpeechlessError, dial
from courier._engine.link import Link, seconds_until
from courier._lane import LaneOptions, PendingCall
from courier._parcel import Parcel, pack
from courier.errors import (
    CallCancelledError,
    CourierError,
    ProtocolError,
    ServerLostError,
    ServerUnreachableError,
)

#: Pauses between attempts to connect: short, since refused attempts are cheap and a node that
#: starts anew is back in milliseconds; longer once somebody stays away.
_FIRST_PAUSE_S = 0.001
_PAUSE_S = 0.05
_LONG_PAUSE_S = 0.2
_STAYS_AWAY_S = 10.0
#: Times that one that hangs up at once is called again.
_MAX_SPEECHLESS = 5


class WireLane:
    """Implements `courier._lane.Lane` with connections to another process. Thread-safe."""

    def __init__(self, options: LaneOptions) -> None:
        self.options = options
        #: Whether what is sent is compressed.
        self.compresses = options.compress
        self._lock = threading.Lock()
        self._link: Link | None = None
        #: Calls that wait for a connection.
        self._unsent: list[WireCall] = []
        self._dials = False
        #: Wakes the thread that dials from its pause.
        self._changed = threading.Event()
        self._waits = options.wait_for_ready
        self._closed = False

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        return self._send(method, pack((args, kwargs)), timeout_s, blocking=blocking)

    def forward(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        return self._send(method, arguments, timeout_s, blocking=False)

    def _send(
        self, method: str, arguments: Parcel, timeout_s: float | None, *, blocking: bool
    ) -> PendingCall:
        call = WireCall(self, method, arguments, timeout_s, is_shared=not blocking)
        link = self._link
        if link is not None and link.refresh():
            try:
                call.send(link, at_once=blocking)
            except BaseException:  # a Ctrl-C: nobody is going to wait
                call.cancel()
                raise
            if not blocking:
                ATTENDANT.attend(link, soon=False)
        else:
            self._wait_in_line(call)
        return call

    def hurry(self, call: WireCall) -> None:
        """Nobody is going to wait for this call, but somebody wants to hear of its end."""
        link = call.link
        if link is not None:
            link.flush()
            ATTENDANT.attend(link, soon=True)

    def resubmit(self, call: WireCall, reason: str) -> None:
        """Sends a call again that did not run, or may run twice."""
        with self._lock:
            waits = self._waits
        if call.may_have_run and not waits:
            call.settle(ServerLostError(f"{call.where}: {reason}; {call.what_ran()}"))
        elif not waits:
            call.settle(ServerUnreachableError(f"{call.where}: {reason}; nothing was run"))
        else:
            self._wait_in_line(call)

    def _wait_in_line(self, call: WireCall) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._unsent.append(call)
                starts, self._dials = not self._dials, True
        if closed:
            call.settle(CallCancelledError(f"{call.where}: the client was closed"))
        elif starts:
            # A thread of its own: a Ctrl-C cannot break off a handshake, and calls that nobody
            # waits for need none.
            try:
                threading.Thread(target=self._dial, name="courier-dial", daemon=True).start()
            except BaseException:
                with self._lock:
                    self._dials = False
                raise

    def wait_for_link(self, call: WireCall, deadline: float | None) -> None:
        """Waits until a call has been sent, was settled, or a monotonic time has come."""
        gate = threading.Lock()
        gate.acquire()
        call.gates.append(gate)
        try:
            if not call.is_settled and call.link is None:
                gate.acquire(timeout=seconds_until(deadline))
        finally:
            call.gates.remove(gate)

    def forget(self, call: WireCall) -> None:
        """Drops a call that has ended without a connection."""
        if self._unsent:
            with self._lock:
                if call in self._unsent:
                    self._unsent.remove(call)

    # The thread that dials

    def _dial(self) -> None:
        began_at = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        speechless = 0
        while self._goes_on():
            try:
                dialled = dial(self.options, self._time_left(), over_grpc=speechless > 0)
                self._use(
                    Link(
                        dialled.channel,
                        frozenset(dialled.introduction.idempotent),
                        _weakly(self),
                    )
                )
            except SpeechlessError as error:
                speechless += 1
                if not self._waits or speechless >= _MAX_SPEECHLESS:
                    self._fail(error)
            except ServerUnreachableError as error:
                if not self._waits:
                    self._fail(error)
            except CourierError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - those who wait must hear of it
                self._fail(CourierError(f"{self.options.address}: {type(error).__name__}: {error}"))
            else:
                continue
            away_s = time.monotonic() - began_at
            pause_s = min(pause_s * 1.5, _PAUSE_S if away_s < _STAYS_AWAY_S else _LONG_PAUSE_S)
            self._pause(pause_s)

    def _goes_on(self) -> bool:
        """Tells whether anybody waits for a connection; ends those that have waited too long."""
        now = time.monotonic()
        with self._lock:
            late = [c for c in self._unsent if c.deadline is not None and c.deadline <= now]
        for call in late:
            call.expire()
        with self._lock:
            goes_on = bool(self._unsent) and not self._closed
            self._dials = goes_on
            return goes_on

    def _time_left(self) -> float | None:
        with self._lock:
            deadlines = [c.deadline for c in self._unsent if c.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _pause(self, pause_s: float) -> None:
        left = self._time_left()
        self._changed.wait(pause_s if left is None else min(pause_s, left))
        self._changed.clear()

    def _use(self, link: Link) -> None:
        ATTENDANT.admit(link)
        with self._lock:
            waiting, self._unsent = self._unsent, []
            if not self._closed:
                self._link = link
            closed = self._closed
        if closed:
            link.close(CallCancelledError("the client was closed"))
        for call in waiting:
            call.send(link, at_once=False)
        link.send_out()
        if waiting:
            ATTENDANT.attend(link, soon=False)
        for call in waiting:
            call.wake()

    def _fail(self, error: CourierError) -> None:
        with self._lock:
            waiting, self._unsent = self._unsent, []
        for call in waiting:
            if call.may_have_run and isinstance(error, ServerUnreachableError):
                call.settle(ServerLostError(f"{call.where}: {call.what_ran()} ({error})"))
            else:
                call.settle(_copy(error))

    def link_ended(self, link: Link) -> None:
        """Begins no more calls on this link."""
        with self._lock:
            if self._link is link:
                self._link = None

    # What a client asks for

    def stop_waiting(self) -> None:
        with self._lock:
            self._waits = False
        self._changed.set()
        self._fail(ServerUnreachableError(f"{self.options.address}: no server answers any more"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
            waiting, self._unsent = self._unsent, []
        self._changed.set()
        error = CallCancelledError("the client was closed")
        for call in waiting:
            call.end(error)
        if link is not None:
            link.close(error)

    def drop(self) -> None:
        """Forgets its connection in a forked child; the parent goes on with it."""
        if self._link is not None:
            self._link.drop()


def _weakly(lane: WireLane) -> Any:
    # Not the lane itself: it shall go, and its connection with it, when its client does.
    reference = weakref.ref(lane)

    def link_ended(link: Link) -> None:
        found = reference()
        if found is not None:
            found.link_ended(link)

    return link_ended


def _copy(error: CourierError) -> CourierError:
    """Returns an error of a kind that users know, for one of those who wait."""
    kinds = (ServerUnreachableError, ProtocolError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), type(error))
    return kind(str(error))
