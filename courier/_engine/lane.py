"""A client's way to one address: connects, reconnects, and knows what may be sent again."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from courier._clock import require_running_clock
from courier._engine.background_reader import BACKGROUND_READER
from courier._engine.calls import WireCall
from courier._engine.dialing import SpeechlessError, dial
from courier._engine.link import Link, seconds_until
from courier._lane import PendingCall
from courier._options import ClientOptions
from courier._parcel import Parcel, pack
from courier.errors import (
    CallCancelledError,
    CourierError,
    ProtocolError,
    ServerLostError,
    ServerUnreachableError,
)

#: Pauses between attempts to connect: short, because refused attempts are cheap and a node that
#: restarts is back in milliseconds; longer for a server that stays away.
_FIRST_PAUSE_S = 0.001
_PAUSE_S = 0.05
_LONG_PAUSE_S = 0.2
_STAYS_AWAY_S = 10.0
#: All lanes of a process together. Hundreds whose servers are still to start would take the time
#: that these need for it.
_MAX_ATTEMPTS_PER_S = 500
#: Times that one that hangs up at once is called again.
_MAX_SPEECHLESS = 5

#: Of each thread that dials, what wakes it.
_dialling: set[threading.Event] = set()
os.register_at_fork(after_in_child=_dialling.clear)


class WireLane:
    """Implements `courier._lane.Lane` with connections to another process. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        require_running_clock()
        self.options = options
        self.methods: frozenset[str] | None = None
        #: Whether what is sent is compressed.
        self.compresses = options.compress
        self._lock = threading.Lock()
        self._link: Link | None = None
        #: That one, and those where no new calls begin but old ones may still be open.
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        #: Calls that wait for a connection.
        self._unsent: list[WireCall] = []
        #: Of the thread that dials for them: wakes it from its pause. One that finds another's
        #: here dials an address that has been left; it may not know for seconds, and is not awaited.
        self._dialler: threading.Event | None = None
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

    def ask(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Parcel | PendingCall:
        arguments = pack((args, kwargs))
        link = self._link
        if link is not None and not self.compresses:
            answer = link.ask(self, method, arguments)
            if answer is not None:
                return answer
        return self._send(method, arguments, None, blocking=True)

    def open_call(self, method: str, arguments: Parcel, link: Link, number: int) -> WireCall:
        """Returns a call that a link has sent and that was not answered at once."""
        call = WireCall(self, method, arguments, None, is_shared=False)
        call.link, call.number, call.is_ready = link, number, False
        return call

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
            except BaseException:  # a Ctrl-C: no caller is going to wait
                call.cancel()
                raise
            if not blocking:
                BACKGROUND_READER.attend(link, soon=False)
        else:
            try:
                self._wait_in_line(call)
            except BaseException:  # as above
                call.cancel()
                raise
        return call

    def hurry(self, call: WireCall) -> None:
        """Notes that no thread will wait for this call, but its end must be reported."""
        link = call.link
        if link is not None:
            link.flush()
            BACKGROUND_READER.attend(link, soon=True)

    def resubmit(self, call: WireCall, reason: str, *, unsent: bool = False) -> None:
        """Sends a call again that did not run, or may run twice.

        Args:
            call: The call.
            reason: Why it did not go well.
            unsent: Whether it was not sent: the server left while the client was idle.
        """
        with self._lock:
            waits = self._waits
        if call.may_have_run and not waits:
            call.settle(ServerLostError(f"{call.where}: {reason}; {call.what_ran()}"))
        elif not waits and not unsent:
            call.settle(ServerUnreachableError(f"{call.where}: {reason}; nothing was run"))
        else:
            self._wait_in_line(call)

    def _wait_in_line(self, call: WireCall) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._unsent.append(call)
        if closed:
            call.settle(CallCancelledError(f"{call.where}: the client was closed"))
        else:
            self._have_dialled()

    def _have_dialled(self) -> None:
        """Starts a thread that connects, if a call waits."""
        dialler = threading.Event()
        try:
            with self._lock:
                if self._dialler is not None or not self._unsent or self._closed:
                    return
                self._dialler = dialler
            # A separate thread: a Ctrl-C cannot interrupt a handshake, and calls without a
            # waiting thread need none.
            threading.Thread(
                target=self._dial, args=(dialler,), name="courier-dial", daemon=True
            ).start()
        except (
            RuntimeError
        ) as error:  # not raised: this thread may be reading the answers of others
            reason = ServerUnreachableError(f"{self.options.where}: {error}")
            self._fail(reason, dialler, resigns=True)
        except BaseException:
            with self._lock:
                if self._dialler is dialler:
                    self._dialler = None
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

    def _dial(self, own: threading.Event) -> None:
        _dialling.add(own)
        try:
            self._dial_until_done(own)
        finally:
            _dialling.discard(own)

    def _dial_until_done(self, own: threading.Event) -> None:
        began_at = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        speechless = 0
        while True:
            try:
                if not self._goes_on(own):
                    return
                options = self.options
                dialled = dial(options, self._time_left(), over_grpc=speechless > 0)
                self.methods = frozenset(dialled.introduction.methods) or None
                self._use(
                    Link(
                        dialled.channel,
                        frozenset(dialled.introduction.idempotent),
                        _weakly(self),
                        BACKGROUND_READER,
                    ),
                    own,
                )
            except SpeechlessError as error:
                speechless += 1
                if not self._waits or speechless >= _MAX_SPEECHLESS:
                    self._fail(error, own)
            except ServerUnreachableError as error:
                if not self._waits:
                    self._fail(error, own)
            except CourierError as error:
                self._fail(error, own)
            except Exception as error:  # noqa: BLE001 - the callers must get it
                where = self.options.where
                self._fail(CourierError(f"{where}: {type(error).__name__}: {error}"), own)
            else:
                continue
            away_s = time.monotonic() - began_at
            pause_s = min(pause_s * 1.5, _PAUSE_S if away_s < _STAYS_AWAY_S else _LONG_PAUSE_S)
            self._pause(max(pause_s, len(_dialling) / _MAX_ATTEMPTS_PER_S), own)

    def _goes_on(self, own: threading.Event) -> bool:
        """Returns whether anybody waits for a connection; ends those that have waited too long."""
        now = time.monotonic()
        with self._lock:
            late = [c for c in self._unsent if c.deadline is not None and c.deadline <= now]
        for call in late:
            call.expire()
        with self._lock:
            if self._dialler is None:
                self._dialler = own  # the thread that started this one was interrupted
            if self._dialler is not own:
                return False
            goes_on = bool(self._unsent) and not self._closed
            if not goes_on:
                self._dialler = None
            return goes_on

    def _time_left(self) -> float | None:
        with self._lock:
            deadlines = [c.deadline for c in self._unsent if c.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _pause(self, pause_s: float, own: threading.Event) -> None:
        left = self._time_left()
        own.wait(pause_s if left is None else min(pause_s, left))
        own.clear()

    def _use(self, link: Link, own: threading.Event) -> None:
        try:
            BACKGROUND_READER.admit(link)
        except BaseException:
            link.close(CallCancelledError("no thread could read the connection"))
            raise
        with self._lock:
            is_wanted = self._dialler is own and not self._closed
            if is_wanted:
                waiting, self._unsent = self._unsent, []
                self._link = link
                self._links.add(link)
        if not is_wanted:
            link.close(CallCancelledError("the client was closed, or has moved"))
            return
        for call in waiting:
            try:
                if not link.is_lost:
                    call.send(link, at_once=False)
                elif not call.is_settled:  # given up by now; nothing of the call went out
                    call.take_back("the connection broke")
            except Exception as error:  # noqa: BLE001 - the call gets it, and the others go out
                call.settle(CourierError(f"{call.where}: {type(error).__name__}: {error}"))
        link.send_out()
        if waiting:
            BACKGROUND_READER.attend(link, soon=False)
        for call in waiting:
            call.wake()

    def _fail(self, error: CourierError, own: threading.Event, *, resigns: bool = False) -> None:
        """Fails all calls that wait, unless they wait for another address by now.

        Args:
            error: What they fail with.
            own: Of who dials.
            resigns: Whether connecting ends with it. In one step, so that a later call starts it again.
        """
        with self._lock:
            if self._dialler is not own:
                return
            waiting, self._unsent = self._unsent, []
            if resigns:
                self._dialler = None
        self._fail_all(waiting, error)

    def _fail_all(self, waiting: Sequence[WireCall], error: CourierError) -> None:
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

    def open_futures(self) -> list[PendingCall]:
        with self._lock:
            calls = list(self._unsent)
            links = list(self._links)
        for link in links:
            calls += [each for each in link.exchanges() if isinstance(each, WireCall)]
        return [call for call in calls if call.is_shared and not call.is_settled]

    def stop_waiting(self) -> None:
        with self._lock:
            self._waits = False
            waiting, self._unsent = self._unsent, []
            if self._dialler is not None:
                self._dialler.set()
        error = ServerUnreachableError(f"{self.options.where}: no server answers any more")
        self._fail_all(waiting, error)

    def move(self, address: str) -> Callable[[], None]:
        with self._lock:
            left = self.options.address
            self.options = self.options._replace(address=address)
            links = self._take_links()
            if self._dialler is not None:
                self._dialler.set()
                self._dialler = None

        def finish() -> None:
            reason = (
                f"the server at {address} is lost"
                if left == address
                else f"the server moved from {left} to {address}"
            )
            for link in links:
                link.fail(reason)
            self._have_dialled()

        return finish

    def _take_links(self) -> list[Link]:
        links = list(self._links)
        self._links.clear()
        self._link = None
        return links

    def close(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            links = self._take_links()
            waiting, self._unsent = self._unsent, []
            if self._dialler is not None:
                self._dialler.set()
        error = CallCancelledError(reason)
        for call in waiting:
            call.end(error)
        for link in links:
            link.close(error)

    def drop(self) -> None:
        """Forgets its connection in a forked child; the parent continues with it."""
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
