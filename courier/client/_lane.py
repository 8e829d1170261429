"""A client's lane to its server: inside this process, if it is here; else over connections.

Connects, reconnects, and sends calls again that may be.
"""

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from courier.calls import records
from courier.calls.dispatch import LIST_METHODS
from courier.calls.pending import PendingCall
from courier.client._background_reader import BACKGROUND_READER
from courier.client._calls import WireCall
from courier.client._dialing import SpeechlessError, dial
from courier.client._link import Counted, Link
from courier.client.local import SERVERS, InProcess, LocalCall, server_at
from courier.client.options import ClientOptions
from courier.errors import (
    CallCancelledError,
    CourierError,
    ProtocolError,
    ServerLostError,
    ServerUnreachableError,
)
from courier.threads.clock import expire_at, require_running_clock
from courier.threads.forks import survive
from courier.threads.locks import Event, RLock
from courier.values.parcel import Parcel, compressed, pack

#: Pauses between attempts to connect: short, because refused attempts are cheap and a node that
#: restarts is back in milliseconds; longer for a server that stays away.
_FIRST_PAUSE_S = 0.001
_PAUSE_S = 0.05
_LONG_PAUSE_S = 0.2
_STAYS_AWAY_S = 10.0
#: Of all lanes of a process together: hundreds of lanes would slow down the start of their servers.
_MAX_ATTEMPTS_PER_S = 500
#: Times that a server is called again that hangs up at once.
_MAX_SPEECHLESS = 5

#: The event that wakes each dialling thread.
_dialling: set[Event] = set()
os.register_at_fork(after_in_child=_dialling.clear)


class Lane:
    """Carries the calls of a client, and of its copies with other timeouts. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        #: Methods that the server listed last, if it has listed any.
        self.methods = frozenset[str]()
        #: Whether calls fail, instead of waiting, where no server answers, as `stop_waiting` asks.
        self.stopped_waiting = False
        self._closed = False
        #: What its calls are counted for.
        self._scope = records.SCOPE.get()
        self._numbers: dict[str, records.MethodNumbers] = {}
        records.USERS.add(self)
        self._start_anew()
        survive(self)

    def _start_anew(self) -> None:
        self._lock = RLock()
        #: Those inside this process.
        self._calls: weakref.WeakSet[LocalCall] = weakref.WeakSet()
        self._link: Link | None = None
        #: That one, and closing ones with calls that are still open.
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        #: Calls that wait for a connection.
        self._unsent: list[WireCall] = []
        #: Wakes the dialling thread from its pause. A thread that finds another's event here dials
        #: an old address; it may not know for seconds, and is not awaited.
        self._dialler: Event | None = None

    def listed_methods(self) -> frozenset[str]:
        """Returns the methods that the server listed last; empty if none. They may have changed."""
        if not self.methods and (server := server_at(self.options)) is not None:
            self.methods = frozenset(server.dispatcher.listed_names())
        return self.methods

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
        waits: bool | None = None,
    ) -> PendingCall:
        """Sends a call; as `Connection.submit`. May raise SerializationError."""
        while SERVERS and not self._closed:
            options = self.options
            server = server_at(options)
            if server is None or server.in_process is InProcess.WIRE:
                break
            call = LocalCall(options.where, server, method, timeout_s)
            with self._lock:
                if self.options.address != options.address:
                    continue  # moved meanwhile
                self._calls.add(call)
            if call.begin(args, kwargs, self._numbers_of(method), blocking=blocking):
                return call
            break
        arguments = pack((args, kwargs))
        return self.send(method, arguments, timeout_s, blocking=blocking, waits=waits)

    def ask(self, method: str, arguments: Parcel) -> Parcel | PendingCall:
        """As `send` for a caller that waits; the result if it came at once, in this thread."""
        link = self._link
        if link is not None:
            numbers = self._numbers.get(method) or self._numbers_of(method)
            answer = link.ask(method, arguments, numbers, self._open_call)
            if answer is not None:
                return answer
        return self.send(method, arguments, None, blocking=True)

    def _numbers_of(self, method: str) -> records.MethodNumbers:
        numbers = self._numbers.get(method)
        if numbers is None:
            server = self.options.name or self.options.address
            numbers = self._numbers[method] = records.numbers_of(self._scope, server, method)
        return numbers

    def _open_call(
        self, method: str, arguments: Parcel, link: Link, number: int, counted: Counted
    ) -> WireCall:
        call = WireCall(self, method, arguments, None, counted[0], is_shared=False)
        _, call.record, call.began = counted
        call.link, call.number, call.is_ready = link, number, False
        return call

    def send(
        self,
        method: str,
        arguments: Parcel,
        timeout_s: float | None,
        *,
        blocking: bool,
        waits: bool | None = None,
    ) -> PendingCall:
        """Sends a call, or has it wait for a connection; as `submit`."""
        if self.options.compress:
            arguments = compressed(arguments)
        numbers = self._numbers.get(method) or self._numbers_of(method)
        call = WireCall(self, method, arguments, timeout_s, numbers, is_shared=not blocking)
        if waits is not None:
            call.waits = waits
        link = self._link
        try:
            if link is not None and link.refresh():
                call.send(link, at_once=blocking)
                if not blocking:
                    BACKGROUND_READER.attend(link, soon=False)
            else:
                require_running_clock()
                self._wait_in_line(call)
        except BaseException:  # a Ctrl-C: the caller does not wait any more
            call.cancel()
            raise
        return call

    def resubmit(self, call: WireCall, reason: str, *, unsent: bool = False) -> None:
        """Sends again what did not run, or may run twice; `unsent`: the server had left before."""
        if self._waits(call) or (unsent and not call.may_have_run):
            self._wait_in_line(call)
        else:
            kind = ServerLostError if call.may_have_run else ServerUnreachableError
            call.settle(kind(f"{call.where}: {reason}; {call.what_ran()}"))

    def _waits(self, call: WireCall) -> bool:
        wanted = self.options.wait_for_ready if call.waits is None else call.waits
        return wanted and not self.stopped_waiting

    def _wait_in_line(self, call: WireCall) -> None:
        if not call.record:
            call.begin_record()
        with self._lock:
            closed = self._closed
            if not closed:
                self._unsent.append(call)
                if self._dialler is not None and not self._waits(call):
                    self._dialler.set()  # it learns at once whether a server answers
        if closed:
            call.settle(CallCancelledError(f"{call.where}: the client was closed"))
        else:
            self._have_dialled()
            if call.is_shared and call.deadline is not None:
                # No thread waits for it, and the attempt of calls with more time may take longer.
                call.is_timed = True
                with contextlib.suppress(RuntimeError):  # without a thread: after that attempt
                    expire_at(call.deadline, call)

    def _have_dialled(self) -> None:
        """Starts a thread that connects, if a call waits."""
        dialler = Event()
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
        except RuntimeError as error:  # not raised: this thread may read answers of others
            reason = ServerUnreachableError(f"{self.options.where}: {error}")
            self._fail(reason, dialler, resigns=True)
        except BaseException:
            with self._lock:
                if self._dialler is dialler:
                    self._dialler = None
            raise

    def forget(self, call: WireCall) -> None:
        if self._unsent:
            with self._lock:
                if call in self._unsent:
                    self._unsent.remove(call)

    # The dialling thread

    def _dial(self, own: Event) -> None:
        _dialling.add(own)
        began_at = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        speechless = 0
        while True:
            try:
                if not self._goes_on(own):
                    _dialling.discard(own)
                    return
                options = self.options
                dialled = dial(options, self._time_left(), over_grpc=speechless > 0)
                self.methods = frozenset(dialled.introduction.methods)
                self._use(
                    Link(
                        dialled.channel,
                        frozenset((LIST_METHODS, *dialled.introduction.idempotent)),
                        # Not the lane itself: it must be freed, with its connection, when its
                        # client is.
                        functools.partial(_note_end, weakref.ref(self)),
                        BACKGROUND_READER,
                    ),
                    own,
                )
            except SpeechlessError as error:
                speechless += 1
                self._fail(error, own, spares=speechless < _MAX_SPEECHLESS)
            except ServerUnreachableError as error:
                self._fail(error, own, spares=True)
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

    def _goes_on(self, own: Event) -> bool:
        """Returns whether a call waits for a connection; ends those that have waited too long."""
        now = time.monotonic()
        with self._lock:
            late = [c for c in self._unsent if c.deadline is not None and c.deadline <= now]
        for call in late:
            call.expire()
        with self._lock:
            if self._dialler is None:
                self._dialler = own  # as after `_use`; or who started this thread was interrupted
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

    def _pause(self, pause_s: float, own: Event) -> None:
        left = self._time_left()
        own.wait(pause_s if left is None else min(pause_s, left))
        own.clear()

    def _use(self, link: Link, own: Event) -> None:
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
                # A signal handler may interrupt a thread that holds a lock of this link, and call:
                # another thread must dial for it, as this one may wait for that lock.
                self._dialler = None
        if not is_wanted:
            link.close(CallCancelledError("the client was closed, or has moved"))
            return
        for call in waiting:
            try:
                if not link.is_lost:
                    call.send(link, at_once=False)
                elif not call.is_settled:  # cancelled by now; nothing of the call went out
                    call.take_back("the connection broke")
            except Exception as error:  # noqa: BLE001 - the call gets it, and the others are sent
                call.settle(CourierError(f"{call.where}: {type(error).__name__}: {error}"))
        link.send_out()
        if waiting:
            BACKGROUND_READER.attend(link, soon=False)
        for call in waiting:
            call.wake()

    def _fail(
        self, error: CourierError, own: Event, *, resigns: bool = False, spares: bool = False
    ) -> None:
        """Fails waiting calls, unless they wait for another address.

        `spares` those that go on waiting; `resigns`: all in one step.
        """
        with self._lock:
            if self._dialler is not own:
                return
            spared = [call for call in self._unsent if spares and self._waits(call)]
            failed = [call for call in self._unsent if not (spares and self._waits(call))]
            self._unsent = spared
            if resigns:
                self._dialler = None
        self._fail_all(failed, error)

    def _fail_all(self, waiting: Sequence[WireCall], error: CourierError) -> None:
        # Not those below them, which users do not know.
        kinds = (ServerUnreachableError, ProtocolError)
        kind = next((each for each in kinds if isinstance(error, each)), type(error))
        for call in waiting:
            if call.may_have_run and kind is ServerUnreachableError:
                call.settle(ServerLostError(f"{call.where}: {call.what_ran()} ({error})"))
            else:
                call.settle(kind(str(error)))

    # Called by clients

    def open_calls(self) -> list[PendingCall]:
        with self._lock:
            calls: list[PendingCall] = [*self._unsent, *self._calls]
            links = list(self._links)
        for link in links:
            calls += [each for each in link.exchanges() if isinstance(each, WireCall)]
        return calls

    def stop_waiting(self) -> None:
        """Makes calls fail from now on with ServerUnreachableError where no server answers."""
        with self._lock:
            self.stopped_waiting = True
            self.options = self.options._replace(wait_for_ready=False)
            waiting, self._unsent = self._unsent, []
            if self._dialler is not None:
                self._dialler.set()
        error = ServerUnreachableError(f"{self.options.where}: no server answers any more")
        self._fail_all(waiting, error)

    def move(self, address: str | None) -> None:
        """Closes the connection, whose calls raise ServerLostError; None: stays at the address.

        Otherwise calls go to another address from now on, also waiting ones.
        """
        with self._lock:
            left = self.options.address
            if address == left:
                return
            target = address or left
            self.options = self.options._replace(address=target)
            self.methods = frozenset()
            links, calls = self._take_links(), list(self._calls)
            self._calls.clear()
            if self._dialler is not None:
                self._dialler.set()
                self._dialler = None
        # Without the lock, because callers whose calls end here may call again.
        for call in calls:
            call.lose(f"the server moved to {target}")
        for link in links:
            link.fail(
                f"the server moved from {left} to {address}"
                if address
                else f"the server at {left} is lost"
            )
        self._have_dialled()

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
            local = list(self._calls)
        for each in local:
            each.cancel(reason)
        error = CallCancelledError(reason)
        for call in waiting:
            call.lose(error)
        for link in links:
            link.close(error)

    def _survive_fork(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._start_anew()


def _note_end(reference: "weakref.ref[Lane]", link: Link) -> None:
    if (lane := reference()) is not None:
        with lane._lock:
            if lane._link is link:
                lane._link = None
