"""A server's half of the engine: listens, reads, and dispatches calls.

One thread, the poller, reads from all connections. It runs the handlers of methods that were fast
before itself, which saves two hops between threads; all others go to the pool. If such a handler
takes long after all, another thread takes the poller's place, and the first one ends with its call.
The state of the poller is in attributes, so that the next one can go on from there.
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
from collections.abc import Callable
from time import monotonic, perf_counter

from courier._timing import Timing
from courier.calls.context import CallContext
from courier.calls.dispatch import FAST_S, VERY_FAST_S, Dispatcher, MethodCosts
from courier.calls.outcomes import BUSY, STOPPING, Kind, Refusal
from courier.server._caller import ReceivedCall, ServedConnection
from courier.server._grpc_door import GrpcDoor
from courier.server._switch_interval import SWITCH_INTERVAL
from courier.server.unproven import PATIENCE_S, UnprovenPeer, Way
from courier.threads.forks import survive
from courier.threads.handler_pool import HandlerPool
from courier.threads.locks import Event, Lock
from courier.threads.surviving import PAUSE_S, surviving
from courier.values import frozen, reused
from courier.values.parcel import NO_PARCEL
from courier.wire.address import join_address
from courier.wire.channel import Channel
from courier.wire.handshake import NAME_BYTES, Introduction
from courier.wire.place import ABSTRACT, host_name, is_own_user, keep_alive, peer_of
from courier.wire.secret import Secret
from courier.wire.tls import TlsCredentials
from courier.wire.watching import READ, Spin, make_watcher

#: The poller is replaced if a handler runs longer in it.
_OVERDUE_S = 0.002
#: The longest time between two checks for that. A check delays the running call, so they are as
#: frequent as `_OVERDUE_S` only after a slow handler; each one that finds none makes the pause
#: longer.
_RAREST_LOOK_S = 0.01
_EASE = 1.05
#: The watch sleeps when the poller has run no handler for so long.
_CALM_S = 0.05
#: Connections that wait to be accepted.
BACKLOG = 1024
#: A quarter of the descriptors that a process has by default on some systems.
_MAX_UNPROVEN = min(1024, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
#: Seconds that the poller has at the end for a call that it runs.
_BUSY_S = 1.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FULL_PAUSE_S = 0.01

_log = logging.getLogger(__name__)


class ConnectionServer:
    """Serves a dispatcher to all peers that prove themselves. Started and stopped once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        handlers: HandlerPool,
        costs: MethodCosts,
        secret: Secret | None,
        tls: TlsCredentials | None,
        *,
        listener: socket.socket,
        keepalive_s: float,
        timing: Timing,
    ) -> None:
        self.dispatcher = dispatcher
        self.handlers = handlers
        self.secret = secret
        self.tls_context = tls.server_context() if tls is not None else None
        #: Takes over connections that do not speak our protocol.
        self.grpc = GrpcDoor(self, tls)
        self._keepalive_s = keepalive_s
        self.timing = timing
        self.is_healthy = False
        self._name = os.urandom(NAME_BYTES).hex()
        self._local, self._local_name = _listen_locally(self._name)
        self._listener = listener
        self._lock = Lock()
        self._unproven: collections.OrderedDict[int, UnprovenPeer] = collections.OrderedDict()
        self._callers: dict[int, ServedConnection] = {}
        self._costs = costs
        #: Calls that come by gRPC.
        self.foreign: set[CallContext] = set()
        self._stopping = False
        self._over = False
        #: Whether its watcher is closed, whose descriptors may belong to other files by now.
        self._is_closed = False
        # State of the poller:
        self._watcher = make_watcher(Spin())
        self._watched: dict[int, ServedConnection | UnprovenPeer | _Listener] = {}
        self._ready: collections.deque[tuple[int, int]] = collections.deque()
        self._work: collections.deque[ReceivedCall] = collections.deque()
        self._dirty: dict[ServedConnection, None] = {}
        self._poller: threading.Thread | None = None
        #: When the call that the poller runs began; 0.0 while it runs none.
        self._busy_since = 0.0
        self._watch_sleeps = True
        self._watch_wakes = Event()
        self._watch_ends = Event()
        self._watch_thread: threading.Thread | None = None
        self._turn = Lock()
        #: Whether the poller may wait for ever.
        self._sleeps = False
        survive(self)

    def start(self) -> None:
        SWITCH_INTERVAL.begin()
        reused.begin(self, self._wake_to_tidy)
        self.is_healthy = True
        self._add(_Listener(self, self._listener, Way.PORT))
        if self._local is not None:
            self._add(_Listener(self, self._local, Way.LOCAL))
        self._new_poller()

    # New connections

    def introduction(self) -> Introduction:
        return Introduction(
            self._name,
            host_name() if self._local is not None else "",
            self._local_name,
            tuple(self.dispatcher.idempotent_names()),
            tuple(self.dispatcher.listed_names()),
        )

    def admit(
        self,
        sock: socket.socket,
        peer: str,
        way: Way,
        on_welcome: Callable[[], None] = lambda: None,
    ) -> None:
        """Accepts a new connection; `on_welcome`: the peer belongs to the program. Thread-safe."""
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
        if self._over:  # the ending thread may have looked just before
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
        self._forget_unproven(unproven)
        unproven.on_welcome()
        caller = ServedConnection(self, channel)
        self._callers[caller.fileno()] = caller
        self._watched[caller.fileno()] = caller
        if self._over:  # as in `admit`
            caller.hang_up()
            return
        if self._stopping:
            caller.say_goodbye()
        # Frames may have come with the proof; under TLS, poll would not show them.
        caller.on_event(READ)

    def redirect(self, unproven: UnprovenPeer, sock: socket.socket, data: bytes) -> None:
        self._forget_unproven(unproven)
        self._remove(unproven.fileno())
        if data and not self._stopping:
            self.grpc.admit(sock, data, unproven.peer)
        else:
            sock.close()

    def reject(self, unproven: UnprovenPeer) -> None:
        self._forget_unproven(unproven)
        self._remove(unproven.fileno())
        unproven.close()

    def _forget_unproven(self, unproven: UnprovenPeer) -> None:
        with self._lock:
            self._unproven.pop(unproven.fileno(), None)

    # The descriptors of the poller

    def _add(self, pollable: "UnprovenPeer | _Listener") -> None:
        descriptor = pollable.fileno()
        self._watched[descriptor] = pollable
        self._watcher.watch(descriptor, READ)

    def _remove(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._watcher.forget(descriptor)

    def watch(self, caller: ServedConnection, events: int) -> None:
        self._watcher.watch(caller.fileno(), events)

    def forget(self, caller: ServedConnection) -> None:
        """Drops a caller that has left; before its descriptor is closed."""
        descriptor = caller.fileno()
        self._callers.pop(descriptor, None)
        self._dirty.pop(caller, None)
        self._remove(descriptor)

    # Calls

    def run(self, received: ReceivedCall, *, is_alone: bool = False) -> None:
        """Runs a call and sends its answer; `is_alone`: the poller has nothing more to do now."""
        call = received.call
        if self._stopping:
            received.caller.answer(received.number, call, STOPPING, at_once=True)
        elif self._costs[call.method] >= FAST_S:
            self._run_aside(received)
        elif is_alone and not self._work:
            self._run_here(received)
        else:
            call.came = perf_counter()
            self._work.append(received)

    def _run_aside(self, work: ReceivedCall) -> None:
        work.call.came = perf_counter()
        if self.handlers.try_submit(lambda: self._run_in_pool(work)) is None:
            work.caller.answer(work.number, work.call, BUSY, at_once=True)

    def _run_in_pool(self, work: ReceivedCall) -> None:
        call, caller = work.call, work.caller
        try:
            if call.cancelled:
                cancelled = Refusal(Kind.BAD_ARGUMENTS, "cancelled")
                caller.answer(work.number, call, cancelled, at_once=True)
                return
            began = perf_counter()
            outcome = self.dispatcher.run(call.method, work.arguments, call)
            # Freed before the answer is sent: the client may then reuse memory that it lent us.
            work.arguments = NO_PARCEL
            caller.answer(work.number, call, outcome, at_once=True)
            self._costs.learn(call.method, perf_counter() - began)
        except BaseException:  # noqa: BLE001 - the waiting caller gets the error
            caller.give_up()

    def run_step(self, step: Callable[[], None]) -> None:
        if self.handlers.submit(step).cancelled():
            step()

    # The poller

    def _new_poller(self) -> None:
        thread = threading.Thread(target=self._poll, name="courier-poller", daemon=True)
        before, self._poller = self._poller, thread
        try:
            thread.start()
        except BaseException:
            self._poller = before  # which continues after its present call
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
                    wait_s, self._sleeps = tidy_s, False
                if self._ready and not self._over:
                    self._react(*self._ready.popleft())
                    if self._ready or self._work:
                        continue
            except Exception:  # noqa: BLE001 - as `surviving`, which takes 1 µs per call
                _log.exception("a courier server met an error of its own")
                time.sleep(PAUSE_S)
            if self._stopping or monotonic() > tidies_at:
                with surviving("the poller of a courier server"):
                    if self._stopping:
                        self._reject_all()
                    if monotonic() > tidies_at:
                        tidies_at = monotonic() + tidy_s
                        self._sleeps = True  # before it looks: what comes then wakes it
                        if not self._tidy() and not self._ready:
                            wait_s = None  # a server without calls costs nothing

    def _react(self, descriptor: int, events: int) -> None:
        pollable = self._watched.get(descriptor)
        if pollable is None:
            return
        try:
            pollable.on_event(events)
        except Exception:  # noqa: BLE001 - one bad connection must neither end nor delay all others
            _log.exception("a courier server met an error of its own, on one connection")
            # The error would come again and again.
            pollable.hang_up()

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for caller in dirty:
            caller.flush()

    def _run_here(self, work: ReceivedCall) -> None:
        """Runs a method by the poller itself, unless the threads of the pool are all taken."""
        handlers = self.handlers
        if not handlers.enter():
            self._run_aside(work)
            return
        call, caller = work.call, work.caller
        me = self._poller
        self._busy_since = call.began = began = perf_counter()
        if self._watch_sleeps:
            self._wake_watch()
        try:
            outcome = self.dispatcher.run(call.method, work.arguments, call)
            work.arguments = NO_PARCEL  # as in `_run_in_pool`
            with self._turn:
                mine = self._poller is me
                if mine:
                    self._busy_since = 0.0
            # Answers to calls that came together are sent together.
            at_once = not (mine and self._work)
            caller.answer(work.number, call, outcome, at_once=at_once)
            if not at_once:
                self._dirty[caller] = None
            took_s = perf_counter() - began
            if took_s > VERY_FAST_S or self._costs[call.method] > VERY_FAST_S:
                self._costs.learn(call.method, took_s)
        except BaseException:  # noqa: BLE001 - the waiting caller gets the error
            caller.give_up()
        finally:
            handlers.leave()

    def _wake_to_tidy(self) -> None:
        if self._sleeps:
            self._watcher.wake()

    def _tidy(self) -> bool:
        now = monotonic()
        with self._lock:
            unproven = list(self._unproven.values())
        for each in unproven:
            if now - each.came_at > PATIENCE_S:
                self.reject(each)
        left = [caller.tidy() for caller in list(self._callers.values())]
        return any((unproven, frozen.tidy(), reused.tidy(), *left))

    # The watch

    def _wake_watch(self) -> None:
        self._watch_sleeps = False
        if self._watch_thread is None:
            thread = threading.Thread(target=self._watch_poller, name="courier-watch", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # There is no thread to watch, nor one to take the poller's place.
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
                # A call, or the end, may have begun just before.
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
        """Refuses new connections and calls; running ones go on. May be repeated."""
        if self._is_closed:
            return
        self.is_healthy = False
        # First: a refused client tries again at once, and must not find an open port.
        for listener in (self._listener, self._local):
            if listener is not None:
                self._remove(listener.fileno())
                listener.close()
        self._stopping = True
        self._watcher.wake()  # the poller rejects unproven peers
        for caller in list(self._callers.values()):
            caller.say_goodbye()

    def open_calls(self) -> list[CallContext]:
        """Returns calls that run or wait, and streams that are open."""
        callers = list(self._callers.values())
        return [*self.foreign, *(call for caller in callers for call in caller.open_calls())]

    @property
    def is_idle(self) -> bool:
        return not self._work and not any(c.is_busy for c in list(self._callers.values()))

    def cancel_all(self) -> None:
        for caller in list(self._callers.values()):
            caller.cancel_all()

    def end(self) -> list[str]:
        """Closes all connections; returns names of threads that still run. May be repeated."""
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
        frozen.tidy(0.0)
        self._sleeps = False
        reused.end(self)
        if not alive:
            self._is_closed = True
            self._watcher.close()
        return alive

    def _survive_fork(self) -> None:
        # The port of the parent must not outlive it.
        for sock in (self._listener, self._local):
            if sock is not None:
                sock.close()
        for unproven in list(self._unproven.values()):
            unproven.close()
        for caller in list(self._callers.values()):
            caller.drop()


class _Listener:
    def __init__(self, host: ConnectionServer, sock: socket.socket, way: Way) -> None:
        sock.setblocking(False)
        self._host = host
        self._socket = sock
        self._way = way

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_event(self, events: int) -> None:  # noqa: ARG002 - there is one kind to expect
        # Several at once, but a limited number: others wait.
        for _ in range(64):
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                # No descriptor is left: close the connection of an unproven peer. Without one,
                # pause: the listener would be ready again at once.
                if error.errno in _NO_DESCRIPTORS and not self._host.reject_oldest():
                    time.sleep(_FULL_PAUSE_S)
                return
            self._host.admit(sock, _describe_peer(sock, address), self._way)

    def hang_up(self) -> None:
        """Goes on listening: else the server would be dead."""


def _describe_peer(sock: socket.socket, address: object) -> str:
    if isinstance(address, tuple):
        # At a socket for both, this is what an IPv4 address looks like.
        return join_address(address[0].removeprefix("::ffff:"), address[1])
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
