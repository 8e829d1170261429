"""Calls within one process, without a socket; the method runs in the caller's thread if it can.

Copies are packed and unpacked as on any other way, so that a program behaves the same when its
nodes move apart; sharing hands over the objects themselves.
"""

import enum
import os
import threading
import time
import weakref
from typing import Any, Protocol

from courier.calls import records
from courier.calls.context import CallContext
from courier.calls.dispatch import FAST_S, Dispatcher, MethodCosts
from courier.calls.outcomes import BUSY, End, Given, Item, Items, Later, Outcome, Value
from courier.calls.pending import PendingCall
from courier.calls.records import MethodNumbers, how_ended
from courier.client.options import ClientOptions
from courier.errors import CourierError, ServerLostError
from courier.threads.clock import expire_at
from courier.threads.handler_pool import HandlerPool
from courier.threads.locks import Condition, Event
from courier.values.modules import loaded_module
from courier.values.parcel import Parcel, pack, unshared
from courier.wire.secret import Secret


class InProcess(enum.Enum):
    """How values reach callers in the server's own process."""

    COPY = "copy"
    SHARE = "share"
    WIRE = "wire"


class LocalServer(Protocol):
    """The server, as a call sees it."""

    secret: Secret | None
    in_process: InProcess
    dispatcher: Dispatcher
    handlers: HandlerPool
    costs: MethodCosts

    @property
    def takes_calls(self) -> bool: ...

    def begin(self, call: "LocalCall") -> bool: ...

    def end(self, call: "LocalCall") -> None: ...


#: The servers of this process, by their addresses.
SERVERS: dict[str, "weakref.ref[LocalServer]"] = {}


def announce(address: str, server: LocalServer) -> None:
    SERVERS[address] = weakref.ref(server)


def withdraw(address: str, server: LocalServer) -> None:
    found = SERVERS.get(address)
    if found is not None and found() is server:
        del SERVERS[address]


def server_at(options: ClientOptions) -> LocalServer | None:
    reference = SERVERS.get(options.address)
    server = None if reference is None else reference()
    if server is None or server.secret != options.secret or not server.takes_calls:
        return None  # the other way makes the error
    return server


# A forked child does not serve what its parent serves.
os.register_at_fork(after_in_child=SERVERS.clear)


class LocalCall(PendingCall):
    """One call within this process."""

    def __init__(
        self, server_name: str, server: LocalServer, method: str, timeout_s: float | None
    ) -> None:
        super().__init__(method, timeout_s, is_shared=False)
        self._server_name = server_name
        self._server = server
        self.context = CallContext(
            method, f"process {os.getpid()}, which is the server's own", timeout_s
        )
        self._done: Event | None = None
        self._stream: _LocalStream | None = None
        #: Whether the method has returned, but not its whole answer.
        self._is_open = False

    @property
    def server_name(self) -> str:
        return self._server_name

    def begin(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: MethodNumbers,
        *,
        blocking: bool,
    ) -> bool:
        """Runs the method, here or in the server's pool; False if the server has stopped."""
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
        self.numbers = numbers
        self.begin_record(records.own_tag)
        self.context.tag, self.context.number = records.own_tag, self.record & records.MASK
        may_stay = blocking and self.deadline is None and server.costs[self._method] < FAST_S
        if may_stay and _is_plain_thread() and server.handlers.enter():
            try:
                run()
            finally:
                server.handlers.leave()
            return True
        self._done = Event()
        self.context.came = time.perf_counter()
        if not server.handlers.try_submit(run):
            server.end(self)
            self.settle(BUSY.error(self.where))
        elif not blocking:
            self.is_shared = True
            self.hurry()
        return True

    def _run(self, arguments: Parcel | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_settled:
            return
        server, context = self._server, self.context
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
            stream = self._stream = _LocalStream(self, outcome)
            if not self.settle(stream):
                stream.close()
        elif isinstance(outcome, Later):
            self._is_open = True
            self._done = self._done or Event()
            outcome.then(self._take_late)
            if self.is_settled:
                # No caller waits for it: the server need not, either.
                self._server.end(self)
        else:
            self.context.end()
            self.settle(_own(outcome))

    def _take_late(self, outcome: Outcome) -> None:
        self._take(outcome)
        if self._stream is None:
            self._server.end(self)

    def wait_until(self, deadline: float | None) -> bool:
        if not self.is_settled and self._done is not None:
            self._done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.is_settled

    def expire(self) -> None:
        why = self._server.dispatcher.whereabouts(self.context)
        self._give_up(self.timeout_error(why=why))

    def hurry(self) -> None:
        if self.deadline is not None and not self.is_timed:
            expire_at(self.deadline, self)  # first: the system may refuse its thread
            self.is_timed = True

    def lose(self, reason: str = "the server stops") -> None:
        self._give_up(ServerLostError(f"{self.where}: {reason}; the call may have run"))

    def _give_up(self, error: CourierError) -> bool:
        settled = self.settle(error)
        # Afterwards: a handler that sees it may answer, and the caller must not get that answer.
        self.context.end()
        if self._stream is not None:
            if not settled:
                self._stream.give_up(error)
        elif self._is_open:
            self._server.end(self)
        return settled

    def _note_end(self) -> None:
        if self._done is not None:
            self._done.set()


class _LocalStream(Items):
    """The items of a generator within this process; each step runs when its reader asks."""

    def __init__(self, call: LocalCall, items: Items) -> None:
        self._server = call._server
        self.context = call.context
        self._call = call
        self._items = items
        self._changed = Condition()
        self._runs = False
        self._outcome: Any = None
        self._error: CourierError | None = None
        self._over = False

    def next_item(self) -> Item:
        with self._changed:
            if self._over:
                return End()
            self._runs, self._outcome = self._error is None, None
        if self._runs:
            self._items.begin(self._server.handlers, self._take)
        with self._changed:
            while self._outcome is None and self._error is None:
                deadline = self._call.deadline
                left = None if deadline is None else deadline - time.monotonic()
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
                self._error = self._error or ServerLostError(
                    f"{self._call.where}: the server stops"
                )
            else:
                self._outcome = step.result()
            if self._over:
                self._items.close()
            self._changed.notify_all()

    def give_up(self, error: CourierError) -> None:
        with self._changed:
            if not self._over and self._error is None:
                self._error = error
                self._call.end_record(how_ended(error))
                self.context.end()
                if not self._runs:
                    self._items.close()
                self._server.end(self._call)
                self._changed.notify_all()

    def close(self) -> None:
        self.context.end()
        with self._changed:
            if not self._over:
                self._end()

    def _end(self) -> None:
        self._over = True
        self._call.end_record(how_ended(self._error or self._outcome or End))
        self.context.end()
        # Not while a step runs: it closes when that has ended.
        if not self._runs:
            self._items.close()
        self._server.end(self._call)


def _own(outcome: Any) -> Any:
    """Returns an outcome that shares no memory with the method's result, unless it may."""
    return Value(unshared(outcome.parcel)) if isinstance(outcome, Value) else outcome


def _is_plain_thread() -> bool:
    """Returns whether a fast method may run in this thread, as in one of the server.

    Not in the main thread, where a Ctrl-C would hit the method; not below an event loop, where the
    method could not start another; not where the caller has set modes of its thread that the method
    would not have elsewhere.
    """
    if threading.current_thread() is threading.main_thread():
        return False
    # Without the import, no loop runs.
    running_loop = getattr(loaded_module("asyncio"), "_get_running_loop", None)
    if running_loop is not None and running_loop() is not None:
        return False
    torch = loaded_module("torch")
    return torch is None or (torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
