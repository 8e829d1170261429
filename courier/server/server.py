"""Servers: an object whose public methods can be called from other processes."""

import contextlib
import enum
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal

from courier._timing import DEFAULT, Timing
from courier.calls.dispatch import Dispatcher, MethodCosts
from courier.calls.records import QUEUES
from courier.client.client import Client
from courier.client.local import InProcess, LocalCall, announce, withdraw
from courier.errors import AddressInUseError, ServerStateError, UnprotectedServerError
from courier.server.host import BACKLOG, ConnectionServer
from courier.threads.abandoned import clear_up
from courier.threads.forks import survive
from courier.threads.handler_pool import HandlerPool
from courier.threads.locks import Event, RLock
from courier.values.modules import loaded_module
from courier.wire.address import bound, is_loopback, join_address, loopback
from courier.wire.place import host_name
from courier.wire.secret import Secret
from courier.wire.tls import KEEPALIVE_S, TlsCredentials

#: Seconds that the event loop of async methods has to end.
_LOOP_END_S = 1.0
#: Seconds between two checks of a stopping server that its calls have ended.
_LOOK_S = 0.005


class _ServerStage(enum.Enum):
    NEW = "not started"
    STARTED = "started"
    STOPPED = "stopped"


class Server:
    """Serves the public methods of an object, or single methods, at one address.

    Methods of the object run in threads of the server, up to `thread_pool_size` (16) at the same
    time: protect what they share with a lock, or pass `serial=True`. They see the context
    variables of the thread that made the server. All methods of the server itself are thread-safe.

    `async def` methods and async generators run as tasks of one event loop, in a thread that starts
    with the first of them. They hold no other thread, so that any number may wait at the same
    time (up to `thread_pool_size` + `queue_size`; more are refused with ServerBusyError). One that
    blocks, as in `time.sleep`, holds up all others. When its caller cancels or is gone, the task is
    cancelled. Callers call an async method as any other.

    The address speaks courier's own protocol and gRPC (`courier.v1.Courier` and
    the standard health service), for clients in other languages and proxies. gRPC is loaded when
    the first of them connects.

    Example:
        with courier.Server(Counter(), secret=secret) as server:
            print(server.address)
            server.join()
    """

    def __init__(
        self,
        obj: object = None,
        *,
        host: str | None = None,
        port: int = 0,
        secret: Secret | None = None,
        thread_pool_size: int | None = None,
        serial: bool = False,
        queue_size: int = 10_000,
        hidden: Collection[str] = (),
        share_port: bool = False,
        advertised_host: str | None = None,
        tls: TlsCredentials | None = None,
        in_process: Literal["copy", "share", "wire"] = "copy",
        keepalive_s: float = KEEPALIVE_S,
        timing: Timing = DEFAULT,
    ) -> None:
        """Prepares a server; it binds its port and serves from `start` on.

        Args:
            obj: Its public methods are served; None serves only methods that are bound later, and
                so does a text: the name with which servers of the original Launchpad begin. A
                `courier.Cache` answers for another server instead.
            host: Where to listen: a name or number of this machine; `::` for all its interfaces, by IPv6
                and IPv4. None: on loopback, at 127.0.0.1 or, where there is no IPv4, at ::1.
            port: 0 takes a free one.
            secret: Clients must hold the same. Needed beyond loopback. Without secret and `tls`,
                only processes of the same user on this machine are served.
            thread_pool_size: Number of methods that run at the same time in threads; 16 by default.
            serial: Whether methods never run at the same time, as with `thread_pool_size=1`. An async
                method then runs to its end, awaits included, before the next begins. A generator
                does not hold up others while its reader takes its time: each step counts as
                a method. Functions of `batched_handler` run beside methods all the same.
            queue_size: Calls that may wait for a handler; more are refused with
                ServerBusyError.
            hidden: Names of methods of `obj` that are not served.
            share_port: Listen beside a socket of the same user that reserves the port
                (SO_REUSEPORT).
            advertised_host: Host in `address`, where it differs from `host`.
            tls: Certificates. With them, peers from other machines must have some of the same
                authority; on the same machine, a unix socket of the same user needs none.
            in_process: How calls in this process run: "copy" packs and unpacks arguments and
                results, as between processes; "share" hands over the objects themselves; both run
                the method in the thread of a waiting caller, where that is safe. "wire" goes
                through the socket.
            keepalive_s: Seconds until a connection to a silent machine is closed.
            timing: How long internals wait; for tests.

        Raises:
            UnprotectedServerError: There is no secret, and `host` is not loopback, or this system
                does not tell the user of a client.
            ValueError: A size is below 1, `serial` comes with another size, `in_process` is unknown,
                or `keepalive_s` not above 0.
        """
        host = loopback() if host is None else host
        if not is_loopback(host) and secret is None:
            raise UnprotectedServerError(
                f"a server at {host} can be reached from other machines and runs the code of "
                "any process that reaches it: pass secret=courier.Secret.generate(), or leave host= out"
            )
        if secret is None and tls is None and not host_name():
            raise UnprotectedServerError(
                "this system does not tell of which user a client is, so that a server would run the "
                "code of any user: pass secret=courier.Secret.generate(), and the same to clients"
            )
        if serial and thread_pool_size not in (None, 1):
            raise ValueError(
                f"serial=True runs one method at a time; thread_pool_size={thread_pool_size} is "
                "more. Give one of them"
            )
        thread_pool_size = 1 if serial else 16 if thread_pool_size is None else thread_pool_size
        if thread_pool_size < 1 or queue_size < 1:
            raise ValueError("thread_pool_size and queue_size are at least 1")
        if not keepalive_s > 0:
            raise ValueError(f"a connection cannot be kept alive for {keepalive_s} s")
        self._host_name = host
        self._advertised_host = advertised_host or host
        self._port = port
        self._share_port = share_port
        self._tls = tls
        self._keepalive_s = keepalive_s
        self._timing = timing
        self.secret = secret
        self.in_process = InProcess(in_process)
        caches = loaded_module("courier.server.cache")  # few processes need it
        is_cache = caches is not None and isinstance(obj, caches.Cache)
        self.dispatcher: Dispatcher = (
            caches.CacheDispatcher(obj) if is_cache else Dispatcher(serial=serial)
        )
        self.dispatcher.tasks.limit = thread_pool_size + queue_size
        if not (obj is None or isinstance(obj, str) or is_cache):
            for name, method in _exposed_methods(obj, hidden).items():
                self.dispatcher.bind(name, method)
        self.handlers = HandlerPool("courier-handler", thread_pool_size, queue_size)
        self.costs = MethodCosts()
        self._lock = RLock()
        self._stage = _ServerStage.NEW
        self._listener: socket.socket | None = None
        self._host: ConnectionServer | None = None
        #: Calls from this process, which use no socket.
        self._local_calls: set[LocalCall] = set()
        self._stopped = Event()
        survive(self)

    def bind(self, name: str, method: Callable[..., Any]) -> None:
        """Serves one more method, or replaces one; also while running.

        Raises:
            ValueError: The name is empty or private.
        """
        if not name or (name.startswith("_") and name != "__call__"):
            raise ValueError(f"not a public method name: {name!r}")
        self.dispatcher.bind(name, method)

    def unbind(self, name: str) -> None:
        """Stops serving a method; unknown names are ignored."""
        self.dispatcher.unbind(name)

    def methods(self) -> list[str]:
        """Returns the names of all served methods, sorted."""
        return self.dispatcher.names()

    @property
    def port(self) -> int:
        """The port at which it listens, or will: takes a free one if asked before the start.

        Raises:
            AddressInUseError: The host is not of this machine.
        """
        if not self._port:
            with self._lock:
                self._listen()
        return self._port

    @property
    def address(self) -> str:
        """`host:port` for clients; before the start as well: their first calls wait for it.

        Raises:
            AddressInUseError: The host is not of this machine.
        """
        return join_address(self._advertised_host, self.port)

    @property
    def has_started(self) -> bool:
        """Whether it serves now."""
        return self._stage is _ServerStage.STARTED

    def start(self) -> None:
        """Binds the port and serves.

        Raises:
            ServerStateError: It was started before.
            AddressInUseError: The port is taken.
        """
        with self._lock:
            if self._stage is not _ServerStage.NEW:
                raise ServerStateError(f"the server is already {self._stage.value}")
            listener = self._listen()
            self._host = ConnectionServer(
                self.dispatcher,
                self.handlers,
                self.costs,
                self.secret,
                self._tls,
                listener=listener,
                keepalive_s=self._keepalive_s,
                timing=self._timing,
            )
            self._grpc = self._host.grpc
            self._host.start()
            self._stage = _ServerStage.STARTED
        QUEUES.add(self)
        if self.in_process is not InProcess.WIRE:
            announce(self.address, self)

    def queued(self) -> Counter[str]:
        """Returns of each method how many calls wait for a thread. For the numbers of calls."""
        calls = [] if self._host is None else self._host.open_calls()
        with self._lock:
            calls += [call.context for call in self._local_calls]
        return Counter(call.method for call in calls if not call.began)

    @property
    def scope(self) -> object:
        """What calls are counted for. For the numbers of calls."""
        return self.dispatcher.scope

    def _listen(self) -> socket.socket:
        if self._listener is None:
            # Clients of an earlier server at this port may still hold its connections.
            options = [socket.SO_REUSEADDR]
            if self._share_port and hasattr(socket, "SO_REUSEPORT"):
                options.append(socket.SO_REUSEPORT)
            try:
                self._listener = bound(self._host_name, self._port, *options, backlog=BACKLOG)
            except (OSError, UnicodeError) as error:
                raise AddressInUseError(
                    f"cannot listen at {join_address(self._host_name, self._port)}: the port is taken, or the "
                    f"host is not of this machine ({error}). Use port 0 to get a free one"
                ) from error
            self._port = self._listener.getsockname()[1]
        return self._listener

    def stop(self, grace_s: float = 5.0) -> list[str]:
        """Refuses new calls, lets running ones end, then cancels them. Safe to call twice.

        Args:
            grace_s: Seconds that running handlers have. Their calls are then cancelled; a
                handler can see it in `current_call().cancelled`.

        Returns:
            Names of handler threads that still run; empty when all have ended.

        Raises:
            ServerStateError: It was never started.
        """
        first = False
        try:
            with self._lock:
                if self._stage is _ServerStage.NEW:
                    raise ServerStateError("the server was not started")
                first, self._stage = self._stage is _ServerStage.STARTED, _ServerStage.STOPPED
            if not first:
                self._stopped.wait()
                return []
            return self._stop(grace_s)
        except BaseException:
            # Also when this thread is ended by force here, no thread and no port is left.
            if first:
                self._stop(0.0)
            raise
        finally:
            if first:
                self._stopped.set()

    def _stop(self, grace_s: float) -> list[str]:
        assert self._host is not None
        withdraw(self.address, self)
        give_up_at = time.monotonic() + grace_s
        self._host.begin_stop()
        self._grpc.begin_stop(grace_s)
        clear_up()
        while not self._is_idle() and (left := give_up_at - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
        self._host.cancel_all()
        with self._lock:
            local = list(self._local_calls)
        for call in local:
            call.lose()
        give_up_at = max(give_up_at, time.monotonic() + self._timing.epilogue_s)
        alive = self._grpc.end()
        self.handlers.stop(0.0)
        alive += self.handlers.stop(max(0.0, give_up_at - time.monotonic()))
        alive += self.dispatcher.tasks.end(max(_LOOP_END_S, give_up_at - time.monotonic()))
        return alive + self._host.end()

    def _is_idle(self) -> bool:
        assert self._host is not None
        runs_none = self.handlers.is_idle and self._host.is_idle and not self._local_calls
        return runs_none and self._grpc.is_idle

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the server was stopped; returns whether it was.

        Raises:
            ServerStateError: It was never started.
        """
        if self._stage is _ServerStage.NEW:
            raise ServerStateError("the server was not started")
        return self._stopped.wait(timeout_s)

    def set_healthy(self, healthy: bool) -> None:
        """Sets the answer to health checks, those of the standard gRPC health service as well.

        Raises:
            ServerStateError: It does not serve.
        """
        if self._stage is not _ServerStage.STARTED or self._host is None:
            raise ServerStateError(f"the server is {self._stage.value}")
        self._host.is_healthy = healthy
        self._grpc.notify()

    def _survive_fork(self) -> None:
        # It counts as stopped: the parent serves.
        self._lock = RLock()
        self._stopped = Event()
        if self._stage is not _ServerStage.NEW:
            self._stage = _ServerStage.STOPPED
            self._stopped.set()

    # For callers in this process: `courier.client.local.LocalServer`

    @property
    def takes_calls(self) -> bool:
        """Whether calls may begin. For the transport."""
        return self._stage is _ServerStage.STARTED

    def begin(self, call: LocalCall) -> bool:
        """Notes a call from this process; returns False if none may begin. For the transport."""
        with self._lock:
            if self._stage is not _ServerStage.STARTED:
                return False
            self._local_calls.add(call)
            return True

    def end(self, call: LocalCall) -> None:
        """Notes that a call from this process has ended. For the transport."""
        with self._lock:
            self._local_calls.discard(call)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # Names of the original Launchpad, whose programs get servers by `set_courier_server` and start
    # and stop them.
    Bind, Unbind, Start, Stop, Join, SetIsHealthy = bind, unbind, start, stop, join, set_healthy


def _exposed_methods(obj: object, hidden: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of an object by name.

    Asks the object (`dir` and `getattr`), not its type, so that wrappers which
    forward attributes expose what they wrap. A callable object also has `__call__`.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(obj):
        if (name.startswith("_") and name != "__call__") or name in hidden:
            continue
        attribute = None
        with contextlib.suppress(Exception):  # a property that fails now is not a method
            attribute = getattr(obj, name)
        # Clients are callable, because a served object may be; one kept in an attribute is no method.
        if callable(attribute) and not isinstance(attribute, Client):
            answers_later = name == "__call__" and hasattr(obj, "__courier_call__")
            methods[name] = obj if answers_later else attribute  # type: ignore[assignment]
    if not callable(obj):
        methods.pop("__call__", None)
    return methods
