"""A server's half of the engine: listens, reads, and has calls answered.

One thread, the poller, reads from all connections. It runs the handlers of methods that have shown
to be fast itself, which saves two hops between threads; all others go to the pool. If a handler it
runs takes long after all, another thread takes the poller's place and the first one ends with its
call. All that the poller knows is in attributes, so that the next one can go on where it stopped.
"""

import collections
import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
import weakref
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from courier import _frozen
from courier._address import join_address
from courier._context import CallContext
from courier._costs import FAST_S, VERY_FAST_S, MethodCosts
from courier._dispatch import Dispatcher
from courier._engine.caller import Caller
from courier._engine.channel import Channel
from courier._engine.frames import decompressed
from courier._engine.handshake import NAME_BYTES, Introduction
from courier._engine.listening import BACKLOG
from courier._engine.place import ABSTRACT, host_name, is_own_user, keep_alive, peer_of
from courier._engine.spinning import Spin
from courier._engine.switch_interval import SWITCH_INTERVAL
from courier._engine.unproven import PATIENCE_S, UnprovenPeer, Way
from courier._engine.watching import READ, make_watcher
from courier._kinds import Kind
from courier._outcomes import BUSY, STOPPING, Answer, Items, Later, Refusal, Step
from courier._parcel import Parcel
from courier._pool import HandlerPool
from courier._secret import Secret
from courier._surviving import PAUSE_S, surviving
from courier._timing import Timing
from courier.errors import ProtocolError

if TYPE_CHECKING:
    import ssl

#: A handler that runs longer in the poller loses it its place.
_OVERDUE_S = 0.002
#: How often the watch looks whether one does. A look delays the call that runs, so that it looks as
#: often as `_OVERDUE_S` only after it found one; each time that it finds none it waits longer.
_RAREST_LOOK_S = 0.01
_EASE = 1.05
#: The watch sleeps when the poller has run nothing by itself for so long.
_CALM_S = 0.05
#: A quarter of the descriptors that a process has by default, if they are so few.
_MAX_UNPROVEN = min(1024, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
#: Seconds that the poller has to end with a call that it runs by itself.
_BUSY_S = 1.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FULL_PAUSE_S = 0.01

_log = logging.getLogger(__name__)

Redirect = Callable[[socket.socket, bytes, str], None]


class Pollable(Protocol):
    """What the poller watches."""

    def fileno(self) -> int: ...

    def on_event(self, events: int) -> None: ...

    def hang_up(self) -> None: ...


class _Work:
    __slots__ = ("arguments", "call", "caller", "is_compressed", "number")

    def __init__(
        self,
        caller: Caller,
        number: int,
        call: CallContext,
        arguments: Parcel,
        is_compressed: bool,
    ) -> None:
        self.caller = caller
        self.number = number
        self.call = call
        self.arguments = arguments
        self.is_compressed = is_compressed


class Host:
    """Serves a dispatcher to all who connect and prove themselves. Started and stopped once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        handlers: HandlerPool,
        costs: MethodCosts,
        secret: Secret | None,
        tls_context: "ssl.SSLContext | None",
        *,
        listener: socket.socket,
        redirect: Redirect,
        keepalive_s: float,
        timing: Timing,
    ) -> None:
        """Prepares to serve.

        Args:
            dispatcher: Runs methods.
            handlers: Where methods run that are not known to be fast.
            costs: Knows which are.
            secret: What clients must prove.
            tls_context: For connections from elsewhere; None means none.
            listener: Bound and listening; becomes the host's.
            redirect: Takes over connections that do not speak our protocol.
            keepalive_s: Seconds until a client is given up whose machine is silent.
            timing: How long to wait.
        """
        self._dispatcher = dispatcher
        self._handlers = handlers
        self.secret = secret
        self.tls_context = tls_context
        self._redirect = redirect
        self._keepalive_s = keepalive_s
        self.timing = timing
        self.is_healthy = False
        self._name = os.urandom(NAME_BYTES).hex()
        self._local, self._local_name = _listen_locally(self._name)
        self._listener = listener
        self._lock = threading.Lock()
        self._unproven: collections.OrderedDict[int, UnprovenPeer] = collections.OrderedDict()
        self._callers: dict[int, Caller] = {}
        self._costs = costs
        self._stopping = False
        self._over = False
        #: Its watcher is closed, and its descriptors may belong to other files.
        self._is_closed = False
        # The poller's:
        self._watcher = make_watcher(Spin())
        self._watched: dict[int, Pollable] = {}
        self._ready: collections.deque[tuple[int, int]] = collections.deque()
        self._work: collections.deque[_Work] = collections.deque()
        self._dirty: dict[Caller, None] = {}
        self._poller: threading.Thread | None = None
        #: When the call began that the poller runs by itself; 0.0 while it runs none.
        self._busy_since = 0.0
        self._watch_sleeps = True
        self._watch_wakes = threading.Event()
        self._watch_ends = threading.Event()
        self._watch_thread: threading.Thread | None = None
        self._turn = threading.Lock()
        _hosts.add(self)

    def start(self) -> None:
        """Begins to serve."""
        SWITCH_INTERVAL.begin()
        self.is_healthy = True
        self._add(_Listener(self, self._listener, Way.PORT))
        if self._local is not None:
            self._add(_Listener(self, self._local, Way.LOCAL))
        self._new_poller()

    # Who comes

    def introduction(self) -> Introduction:
        """Returns what a client gets to know; part of `Reception`."""
        return Introduction(
            self._name,
            host_name() if self._local is not None else "",
            self._local_name,
            tuple(self._dispatcher.idempotent_names()),
            tuple(self._dispatcher.listed_names()),
        )

    def admit(
        self,
        sock: socket.socket,
        peer: str,
        way: Way,
        on_welcome: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes a new connection, which may be anybody's. Thread-safe.

        Args:
            sock: The connection.
            peer: Who it is, for people to read.
            way: How he came.
            on_welcome: Called when he has proved that he belongs to the program.
        """
        if way is Way.LOCAL and not is_own_user(sock):
            sock.close()
            return
        if way is Way.PORT:
            with contextlib.suppress(OSError):
                keep_alive(sock, self._keepalive_s)
        if self._stopping:
            sock.close()
            return
        unproven = UnprovenPeer(self, sock, peer, way, on_welcome)
        with self._lock:
            self._unproven[unproven.fileno()] = unproven
            is_crowded = len(self._unproven) > _MAX_UNPROVEN
        self._add(unproven)
        if way is Way.GRPC:
            self._watcher.wake()  # from another thread: the poller may wait for ever
        if is_crowded:
            self.reject_oldest()
        if self._over:  # who ends may have looked just before
            self.reject(unproven)

    def reject_oldest(self) -> bool:
        """Rejects the unproven peer that has waited longest; returns whether there was one."""
        with self._lock:
            oldest = next(iter(self._unproven.values()), None)
        if oldest is not None:
            self.reject(oldest)
        return oldest is not None

    def _reject_all(self) -> None:
        while self.reject_oldest():
            pass

    def welcome(self, unproven: UnprovenPeer, channel: Channel) -> None:
        """Makes a caller of a peer that has proved itself; part of `Reception`."""
        self._forget_unproven(unproven)
        unproven.on_welcome()
        caller = Caller(self, channel)
        self._callers[caller.fileno()] = caller
        self._watched[caller.fileno()] = caller
        if self._over:  # as in `admit`
            caller.hang_up()
            return
        if self._stopping:
            caller.say_goodbye()
        # Frames may have come with the proof; under TLS no poll would tell.
        caller.on_event(READ)

    def redirect(self, unproven: UnprovenPeer, sock: socket.socket, data: bytes) -> None:
        """Hands over a peer that speaks another protocol; part of `Reception`."""
        self._forget_unproven(unproven)
        self._remove(unproven.fileno())
        if data and not self._stopping:
            self._redirect(sock, data, unproven.peer)
        else:
            sock.close()

    def reject(self, unproven: UnprovenPeer) -> None:
        """Closes the connection of an unproven peer; part of `Reception`."""
        self._forget_unproven(unproven)
        self._remove(unproven.fileno())
        unproven.close()

    def _forget_unproven(self, unproven: UnprovenPeer) -> None:
        with self._lock:
            self._unproven.pop(unproven.fileno(), None)

    # What the poller watches

    def _add(self, pollable: Pollable) -> None:
        descriptor = pollable.fileno()
        self._watched[descriptor] = pollable
        self._watcher.watch(descriptor, READ)

    def _remove(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._watcher.forget(descriptor)

    def watch(self, caller: Caller, events: int) -> None:
        """Changes what is to be noticed of a caller: readable, writable, or both."""
        self._watcher.watch(caller.fileno(), events)

    def forget(self, caller: Caller) -> None:
        """Drops a caller who left; before its descriptor is closed."""
        descriptor = caller.fileno()
        self._callers.pop(descriptor, None)
        self._dirty.pop(caller, None)
        self._remove(descriptor)

    # Calls

    def run(
        self,
        caller: Caller,
        number: int,
        call: CallContext,
        arguments: Parcel,
        *,
        is_compressed: bool = False,
        is_alone: bool = False,
    ) -> None:
        """Runs a call and sends its answer. For the poller.

        Args:
            caller: Who calls.
            number: Of the call.
            call: The call.
            arguments: Its arguments.
            is_compressed: Whether they are.
            is_alone: Whether the poller has nothing more to do before it looks again who it is.
        """
        if self._stopping:
            caller.answer(number, call, STOPPING, at_once=True)
            return
        work = _Work(caller, number, call, arguments, is_compressed)
        if is_compressed or self._costs.of(call.method) >= FAST_S:
            self._run_aside(work)
        elif is_alone and not self._work:
            self._run_here(work)
        else:
            self._work.append(work)

    def _run_aside(self, work: _Work) -> None:
        if self._handlers.try_submit(lambda: self._run_in_pool(work)) is None:
            work.caller.answer(work.number, work.call, BUSY, at_once=True)

    def _run_in_pool(self, work: _Work) -> None:
        call, caller = work.call, work.caller
        try:
            if call.cancelled:
                cancelled = Refusal(Kind.BAD_ARGUMENTS, "cancelled")
                caller.answer(work.number, call, cancelled, at_once=True)
                return
            began = perf_counter()
            outcome: Answer | Later
            try:
                arguments = decompressed(work.arguments) if work.is_compressed else work.arguments
            except ProtocolError as error:
                outcome = Refusal(Kind.BAD_ARGUMENTS, f"{call.method}: {error}")
            else:
                outcome = self._dispatcher.run(call.method, arguments, call)
            # Gone before the answer goes: memory that the client lent us is its own again.
            arguments = work.arguments = _NOTHING
            caller.answer(work.number, call, outcome, at_once=True)
            self._costs.learn(call.method, perf_counter() - began)
        except BaseException:  # noqa: BLE001 - the waiting caller gets the error
            caller.give_up()

    def run_step(self, step: Callable[[], None]) -> None:
        """Runs the next step of what was let in before."""
        if self._handlers.submit(step).cancelled():
            step()

    def begin_step(self, items: Items, then: Callable[[Step[Any]], object]) -> None:
        """Makes a generator take a step that may hold no thread of the pool."""
        items.begin(self._handlers, then)

    @property
    def is_wanted(self) -> bool:
        """Whether calls wait for a thread that is busy with something longer."""
        return self._handlers.has_waiting

    # The poller

    def _new_poller(self) -> None:
        thread = threading.Thread(target=self._poll, name="courier-poller", daemon=True)
        before, self._poller = self._poller, thread
        try:
            thread.start()
        except BaseException:
            self._poller = before  # which continues when it has ended what it runs
            raise

    def _poll(self) -> None:
        me = threading.current_thread()
        tidy_s = self.timing.tidy_s
        tidies_at = monotonic() + tidy_s
        wait_s: float | None = tidy_s
        while self._poller is me and not self._over:
            try:
                if self._work:
                    self._run_here(self._work.popleft())
                    continue
                if self._dirty:
                    self._flush()
                if not self._ready:
                    self._ready.extend(self._watcher.poll(wait_s))
                    wait_s = tidy_s
                if self._ready and not self._over:
                    self._react(*self._ready.popleft())
                    if self._ready or self._work:
                        continue
            except Exception:  # noqa: BLE001 - as by `surviving`, which would take 1 µs of each call
                _log.exception("a courier server met an error of its own")
                time.sleep(PAUSE_S)
            if self._stopping or monotonic() > tidies_at:
                with surviving("the poller of a courier server"):
                    if self._stopping:
                        self._reject_all()
                    if monotonic() > tidies_at:
                        tidies_at = monotonic() + tidy_s
                        if not self._tidy() and not self._ready:
                            wait_s = None  # a server that nobody calls costs nothing

    def _react(self, descriptor: int, events: int) -> None:
        pollable = self._watched.get(descriptor)
        if pollable is None:
            return
        try:
            pollable.on_event(events)
        except Exception:  # noqa: BLE001 - one bad connection must neither end nor delay all others
            _log.exception("a courier server met an error of its own, on one connection")
            # Whatever it was, it would come again and again.
            pollable.hang_up()

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for caller in dirty:
            caller.flush()

    def _run_here(self, work: _Work) -> None:
        """Runs a method by the poller itself, unless the threads of the pool are all taken."""
        handlers = self._handlers
        if not handlers.enter():
            self._run_aside(work)
            return
        call, caller = work.call, work.caller
        me = self._poller
        self._busy_since = began = perf_counter()
        if self._watch_sleeps:
            self._wake_watch()
        try:
            outcome = self._dispatcher.run(call.method, work.arguments, call)
            work.arguments = _NOTHING  # as in `_run_in_pool`
            with self._turn:
                mine = self._poller is me
                if mine:
                    self._busy_since = 0.0
            # The answers of calls that came together go together.
            at_once = not (mine and self._work)
            caller.answer(work.number, call, outcome, at_once=at_once)
            if not at_once:
                self._dirty[caller] = None
            took_s = perf_counter() - began
            if took_s > VERY_FAST_S or self._costs.of(call.method) > VERY_FAST_S:
                self._costs.learn(call.method, took_s)
        except BaseException:  # noqa: BLE001 - the waiting caller gets the error
            caller.give_up()
        finally:
            handlers.leave()

    def _tidy(self) -> bool:
        """Gives back what was not used for long; returns whether there may be more to come."""
        now = monotonic()
        with self._lock:
            unproven = list(self._unproven.values())
        for each in unproven:
            if now - each.came_at > PATIENCE_S:
                self.reject(each)
        left = [caller.tidy() for caller in list(self._callers.values())]
        return any((unproven, _frozen.tidy(), *left))

    # The watch

    def _wake_watch(self) -> None:
        self._watch_sleeps = False
        if self._watch_thread is None:
            thread = threading.Thread(target=self._watch_poller, name="courier-watch", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # None to watch; nor would there be one to take the poller's place.
                self._watch_sleeps = True
                return
            self._watch_thread = thread
        self._watch_wakes.set()

    def _watch_poller(self) -> None:
        calm_since = perf_counter()
        pause = _RAREST_LOOK_S
        while not self._watch_ends.wait(pause):
            pause = min(pause * _EASE, _RAREST_LOOK_S)
            now = perf_counter()
            since = self._busy_since
            if since:
                calm_since = now
                if now - since > _OVERDUE_S:
                    pause = _OVERDUE_S
                    with surviving("the watch of a courier server"):
                        self._replace_poller(now)
            elif now - calm_since > _CALM_S:
                self._watch_wakes.clear()
                self._watch_sleeps = True
                # A call may have begun just before, or the end.
                if not self._busy_since and not self._over:
                    self._watch_wakes.wait()
                self._watch_sleeps = False
                calm_since = perf_counter()

    def _replace_poller(self, now: float) -> None:
        with self._turn:
            since = self._busy_since
            if not since or now - since <= _OVERDUE_S:
                return
            self._busy_since = 0.0
            try:
                self._new_poller()
            except BaseException:
                self._busy_since = since  # to try again
                raise

    # The end

    def begin_stop(self) -> None:
        """Takes no more connections and calls; those that run go on. May be repeated."""
        if self._is_closed:
            return
        self.is_healthy = False
        # First: a refused client tries again at once, and must not find us still listening.
        for listener in (self._listener, self._local):
            if listener is not None:
                self._remove(listener.fileno())
                listener.close()
        self._stopping = True
        self._watcher.wake()  # the poller rejects unproven peers
        for caller in list(self._callers.values()):
            caller.say_goodbye()

    @property
    def is_idle(self) -> bool:
        """Whether no call is open, and no answer on its way."""
        return not self._work and not any(c.is_busy for c in list(self._callers.values()))

    def cancel_all(self) -> None:
        """Cancels the calls of all connections."""
        for caller in list(self._callers.values()):
            caller.cancel_all()

    def end(self) -> list[str]:
        """Hangs up on everybody; returns names of threads that still run. May be repeated."""
        if self._is_closed:
            return []
        if not self._over:
            self._over = True
            self._watch_ends.set()
            SWITCH_INTERVAL.end()
        self._watch_wakes.set()
        self._watcher.wake()
        threads = [t for t in (self._poller, self._watch_thread) if t is not None]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_BUSY_S if self._busy_since else self.timing.poller_end_s)
        self._reject_all()  # the poller may have accepted a connection just as it ended
        for caller in list(self._callers.values()):
            caller.hang_up()
        for work in self._work:
            work.call.end()
        self._work.clear()
        alive = [thread.name for thread in threads if thread.is_alive()]
        _frozen.tidy(0.0)
        if not alive:
            self._is_closed = True
            self._watcher.close()
        return alive

    def survive_fork(self) -> None:
        """Closes, in a forked child, what belongs to the parent: its port must not outlive it."""
        for sock in (self._listener, self._local):
            if sock is not None:
                sock.close()
        for unproven in list(self._unproven.values()):
            unproven.close()
        for caller in list(self._callers.values()):
            caller.drop()


_NOTHING = Parcel(b"")
_hosts: "weakref.WeakSet[Host]" = weakref.WeakSet()


def _survive_fork() -> None:
    for host in list(_hosts):
        host.survive_fork()


os.register_at_fork(after_in_child=_survive_fork)


class _Listener:
    """A listening socket."""

    def __init__(self, host: Host, sock: socket.socket, way: Way) -> None:
        sock.setblocking(False)
        self._host = host
        self._socket = sock
        self._way = way

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_event(self, events: int) -> None:  # noqa: ARG002 - there is one kind to expect
        # Several at once, but not without end: others wait.
        for _ in range(64):
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                # No descriptor is left: a peer that has proved nothing loses its own. Without
                # anybody, a pause: the listener would be ready again at once.
                if error.errno in _NO_DESCRIPTORS and not self._host.reject_oldest():
                    time.sleep(_FULL_PAUSE_S)
                return
            self._host.admit(sock, _describe_peer(sock, address), self._way)

    def hang_up(self) -> None:
        """Goes on: to listen no more would end the server."""


def _describe_peer(sock: socket.socket, address: object) -> str:
    if isinstance(address, tuple):
        return join_address(*address[:2])
    with contextlib.suppress(OSError):
        return f"process {peer_of(sock)[0]} of this machine"
    return "this machine"


def _listen_locally(name: str) -> tuple[socket.socket | None, str]:
    """Listens at a unix socket whose name is no file, so that nothing can be left of it."""
    if not ABSTRACT or not host_name():
        return None, ""
    address = f"\0courier/{name}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        return None, ""
    return sock, address
