"""The lane within one process: the method runs without a socket, if it can in the caller's thread.

What is copied is packed and unpacked as on any other way, so that a program behaves the same when
its nodes move apart; sharing hands over the objects themselves.
"""

import enum
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from courier import _clock
from courier._context import CallContext
from courier._costs import FAST_S, MethodCosts
from courier._dispatch import Dispatcher
from courier._engine.lane import WireLane
from courier._lane import Lane, PendingCall
from courier._modules import loaded_module
from courier._options import ClientOptions
from courier._outcomes import BUSY, End, Given, Item, Items, Later, Outcome, Value
from courier._parcel import Parcel, pack, unpack, unshared
from courier._pool import HandlerPool
from courier._secret import Secret
from courier.errors import (
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ServerLostError,
)


class InProcess(enum.Enum):
    """What callers in the server's own process get."""

    COPY = "copy"
    SHARE = "share"
    WIRE = "wire"


class LocalServer(Protocol):
    """What this lane must know of a server."""

    secret: Secret | None
    in_process: InProcess
    dispatcher: Dispatcher
    handlers: HandlerPool
    costs: MethodCosts

    @property
    def takes_calls(self) -> bool: ...

    def begin(self, call: "LocalCall") -> bool: ...

    def end(self, call: "LocalCall") -> None: ...


_servers: dict[str, "weakref.ref[LocalServer]"] = {}


def announce(address: str, server: LocalServer) -> None:
    """Lets clients in this process find a server."""
    _servers[address] = weakref.ref(server)


def withdraw(address: str, server: LocalServer) -> None:
    """Undoes `announce`."""
    found = _servers.get(address)
    if found is not None and found() is server:
        del _servers[address]


def _find(address: str, secret: Secret | None) -> LocalServer | None:
    reference = _servers.get(address)
    if reference is None:
        return None
    server = reference()
    if server is None or server.secret != secret or not server.takes_calls:
        return None  # the other way finds the words for it
    return server


# A forked child does not serve what its parent serves.
os.register_at_fork(after_in_child=_servers.clear)


class LocalLane:
    """Implements `courier._lane.Lane`: here if the server is here, otherwise by the engine."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._wire: Lane | None = None
        self._closed = False
        self._stopped_waiting = False
        self._methods: frozenset[str] | None = None
        self._calls: weakref.WeakSet[LocalCall] = weakref.WeakSet()

    @property
    def methods(self) -> frozenset[str] | None:
        """As `Lane.methods`."""
        if self._wire is not None:
            return self._wire.methods
        if self._methods is None:
            server = _find(self._options.address, self._options.secret)
            if server is not None:
                self._methods = frozenset(server.dispatcher.listed_names()) or None
        return self._methods

    @methods.setter
    def methods(self, names: frozenset[str] | None) -> None:
        if self._wire is not None:
            self._wire.methods = names
        else:
            self._methods = names

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        while _servers:
            options = self._options
            server = _find(options.address, options.secret)
            if server is None or server.in_process is InProcess.WIRE or self._closed:
                break
            call = LocalCall(options.where, server, method, timeout_s)
            with self._lock:
                if self._options.address != options.address:
                    continue  # moved meanwhile
                self._calls.add(call)
            if call.begin(args, kwargs, blocking=blocking):
                return call
            break
        wire = self._wire or self._open_wire()
        return wire.submit(method, args, kwargs, timeout_s, blocking=blocking)

    def ask(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Parcel | PendingCall:
        wire = self._wire
        if wire is None or self._options.address in _servers:
            return self.submit(method, args, kwargs, None, blocking=True)
        return wire.ask(method, args, kwargs)

    def forward(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        if _find(self._options.address, self._options.secret) is not None:
            args, kwargs = unpack(unshared(arguments))
            return self.submit(method, args, kwargs, timeout_s, blocking=False)
        wire = self._wire or self._open_wire()
        return wire.forward(method, arguments, timeout_s)

    def _open_wire(self) -> Lane:
        with self._lock:
            if self._wire is None:
                self._wire = WireLane(self._options)
                if self._stopped_waiting:
                    self._wire.stop_waiting()
                if self._closed:
                    self._wire.close("the client was closed")
            return self._wire

    def open_futures(self) -> list[PendingCall]:
        with self._lock:
            wire = self._wire
            calls: list[PendingCall] = [
                call for call in self._calls if call.is_shared and not call.is_settled
            ]
        return calls + (wire.open_futures() if wire is not None else [])

    def stop_waiting(self) -> None:
        with self._lock:
            self._stopped_waiting = True
            wire = self._wire
        if wire is not None:
            wire.stop_waiting()

    def move(self, address: str) -> Callable[[], None]:
        with self._lock:
            self._options = self._options._replace(address=address)
            self._methods = None
            calls = list(self._calls)
            self._calls.clear()
            finish = self._wire.move(address) if self._wire is not None else None

        def finish_all() -> None:
            for call in calls:
                call.lose(f"the server moved to {address}")
            if finish is not None:
                finish()

        return finish_all

    def close(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            wire = self._wire
            calls = list(self._calls)
        for call in calls:
            call.cancel(reason)
        if wire is not None:
            wire.close(reason)

    def drop(self) -> None:
        if self._wire is not None:
            self._wire.drop()


class LocalCall:
    """One call within this process. Implements `courier._lane.PendingCall`."""

    def __init__(
        self, where: str, server: LocalServer, method: str, timeout_s: float | None
    ) -> None:
        self._server = server
        self._method = method
        self.where = f"{where}: {method}"
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._context = CallContext(
            method, f"process {os.getpid()}, which is the server's own", timeout_s
        )
        self._lock = threading.Lock()
        self._done: threading.Event | None = None
        self._is_timed = False
        #: Whether no thread was going to wait for it.
        self.is_shared = False
        self._stream: _LocalStream | None = None
        #: Whether the method has returned, but not all of its answer is there.
        self._is_open = False
        self._outcome: Outcome | Exception | None = None
        self._callback: Callable[[PendingCall], None] | None = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, blocking: bool) -> bool:
        """Runs the method, here or in the server's pool; returns False if the server has stopped.

        Raises:
            SerializationError: The arguments cannot be pickled.
        """
        server = self._server
        copies = server.in_process is InProcess.COPY
        arguments = unshared(pack((args, kwargs))) if copies else None

        def run() -> None:
            try:
                self._run(arguments, args, kwargs)
            finally:
                if not self._is_open:
                    server.end(self)

        if not server.begin(self):
            return False
        may_stay = blocking and self._deadline is None and server.costs.of(self._method) < FAST_S
        if may_stay and _is_plain_thread() and server.handlers.enter():
            try:
                run()
            finally:
                server.handlers.leave()
            return True
        self._done = threading.Event()
        if not server.handlers.try_submit(run):
            server.end(self)
            self._settle(BUSY.error(self.where))
        elif not blocking:
            self.is_shared = True
            self.hurry()
        return True

    def _run(self, arguments: Parcel | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._outcome is not None:
            return
        server, context = self._server, self._context
        began = time.perf_counter()
        outcome: Outcome | Later
        if arguments is not None:
            outcome = server.dispatcher.run(self._method, arguments, context)
        else:
            outcome = server.dispatcher.run_shared(self._method, args, kwargs, context)
        server.costs.learn(self._method, time.perf_counter() - began)
        self._take(outcome)

    def _take(self, outcome: Outcome | Later) -> None:
        if isinstance(outcome, Items):
            self._is_open = True
            self._context.continue_as_generator()
            stream = self._stream = _LocalStream(
                self._server, self, outcome, self._context, self.where, self._deadline
            )
            if not self._settle(stream):
                stream.close()
        elif isinstance(outcome, Later):
            self._is_open = True
            self._done = self._done or threading.Event()
            outcome.then(self._take_late)
            if self.is_settled:
                # No caller waits for it: the server need not, either.
                self._server.end(self)
        else:
            self._context.answered()
            self._settle(_own(outcome))

    def _take_late(self, outcome: Outcome) -> None:
        self._take(outcome)
        if self._stream is None:
            self._server.end(self)

    # What a client sees

    def wait(self) -> Outcome:
        try:
            done = self.wait_until(self._deadline)
        except BaseException:
            self.cancel()
            raise
        if not done:
            self.expire()
        outcome = self._outcome
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait_until(self, deadline: float | None) -> bool:
        if self._outcome is None and self._done is not None:
            self._done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._outcome is not None

    def when_done(self, callback: Callable[[PendingCall], None]) -> None:
        with self._lock:
            if self._outcome is None:
                self._callback = callback
                return
        callback(self)

    def hurry(self) -> None:
        if self._deadline is not None and not self._is_timed:
            _clock.expire_at(self._deadline, self)  # first: the system may have no thread for it
            self._is_timed = True

    @property
    def is_settled(self) -> bool:
        """Whether it has ended."""
        return self._outcome is not None

    def cancel(self, reason: str = "the call was cancelled") -> bool:
        return self._give_up(CallCancelledError(f"{self.where}: {reason}"))

    def lose(self, reason: str = "the server stops") -> None:
        """Fails the call because the server is gone."""
        self._give_up(ServerLostError(f"{self.where}: {reason}; the call may have run"))

    def expire(self) -> None:
        """Is called when its time is over."""
        self._give_up(self.timeout_error("no answer"))

    def timeout_error(self, what: str) -> CallTimeoutError:
        """Returns the error of a call whose time is over."""
        return CallTimeoutError(f"{self.where}: {what} within {self._timeout_s:.3g} s")

    def _give_up(self, error: CourierError) -> bool:
        settled = self._settle(error)
        # Afterwards: a handler that sees it may answer, and the caller is not to get that answer.
        self._context.end()
        if self._stream is not None:
            if not settled:
                self._stream.give_up(error)
        elif self._is_open:
            self._server.end(self)
        return settled

    def _settle(self, outcome: Outcome | Exception) -> bool:
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if late and not isinstance(outcome, Exception):
            # The method saw the end of its time, too, and may have answered because of that.
            outcome = self.timeout_error("no answer")
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            callback, self._callback = self._callback, None
        if self._done is not None:
            self._done.set()
        if self._is_timed:
            _clock.look()
        if callback is not None:
            callback(self)
        return True


class _LocalStream(Items):
    """The items of a generator within this process; each step runs when its reader asks."""

    def __init__(
        self,
        server: LocalServer,
        call: LocalCall,
        items: Items,
        context: CallContext,
        where: str,
        deadline: float | None,
    ) -> None:
        self._server = server
        self._call = call
        self._items = items
        self._context = context
        self._where = where
        self._deadline = deadline
        self._changed = threading.Condition()
        self._runs = False
        self._outcome: Any = None
        self._error: CourierError | None = None
        self._over = False

    def next_item(self) -> Item:
        with self._changed:
            if self._error is not None and not self._over:
                self._end()
                raise self._error
            if self._over:
                return End()
            self._runs, self._outcome = True, None
        self._items.begin(self._server.handlers, self._take)
        with self._changed:
            while self._outcome is None and self._error is None:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._error = self._call.timeout_error("not all items came")
                else:
                    self._changed.wait(left)
            if self._error is not None:
                self._end()
                raise self._error
            if not isinstance(self._outcome, Value | Given):
                self._end()
            item: Item = _own(self._outcome)
            return item

    def _take(self, step: Any) -> None:
        with self._changed:
            self._runs = False
            if step.cancelled():
                self._error = self._error or ServerLostError(f"{self._where}: the server stops")
            else:
                self._outcome = step.result()
            if self._over:
                self._items.close()
            self._changed.notify_all()

    def give_up(self, error: CourierError) -> None:
        """Ends the generator; its reader gets the error."""
        with self._changed:
            if not self._over and self._error is None:
                self._error = error
                self._context.end()
                if not self._runs:
                    self._items.close()
                self._server.end(self._call)
                self._changed.notify_all()

    def close(self) -> None:
        self._context.end()
        with self._changed:
            if not self._over:
                self._end()

    def _end(self) -> None:
        self._over = True
        self._context.end()
        # Not while a step runs: it closes when that has ended.
        if not self._runs:
            self._items.close()
        self._server.end(self._call)


def _own(outcome: Any) -> Any:
    """Returns an outcome that shares no memory with what the method returned, unless it was given."""
    return Value(unshared(outcome.parcel)) if isinstance(outcome, Value) else outcome


def _is_plain_thread() -> bool:
    """Returns whether a fast method may run in this thread as well as in one of the server's.

    Not in the main thread, where a Ctrl-C would hit the method; not below an event loop, which the
    method could not start another of; not where the caller has set modes of its thread that the
    method would not have elsewhere.
    """
    if threading.current_thread() is threading.main_thread():
        return False
    # What was never imported runs no loop.
    running_loop = getattr(loaded_module("asyncio"), "_get_running_loop", None)
    if running_loop is not None and running_loop() is not None:
        return False
    torch = loaded_module("torch")
    return torch is None or (torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
