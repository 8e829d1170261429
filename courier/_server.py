"""Servers: an object whose public methods can be called from other processes."""

import enum
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, Literal

from courier._abandoned import clear_up
from courier._address import is_loopback, join_address
from courier._cache import Cache, CacheDispatcher
from courier._costs import MethodCosts
from courier._dispatch import Dispatcher
from courier._engine.host import Host
from courier._engine.listening import listen
from courier._engine.place import host_name
from courier._exposure import exposed_methods
from courier._grpc_door import GrpcDoor
from courier._local import InProcess, LocalCall, announce, withdraw
from courier._pool import HandlerPool
from courier._secret import Secret
from courier._timing import DEFAULT, Timing
from courier._tls import KEEPALIVE_S, TlsCredentials
from courier.errors import ServerStateError, UnprotectedServerError

#: Seconds that the event loop of async methods has to end.
_LOOP_END_S = 1.0
#: How often a server that stops looks whether its calls have ended.
_LOOK_S = 0.005


class _Stage(enum.Enum):
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
    cancelled. Callers need not know: they call an async method as any other.

    The address speaks courier's own protocol and gRPC (`courier.v1.Courier` and
    the standard health service), so that clients in other languages and proxies
    find what they know. gRPC is loaded when the first of them comes.

    Example:
        with courier.Server(Counter(), secret=secret) as server:
            print(server.address)
            server.join()
    """

    def __init__(
        self,
        obj: object = None,
        *,
        host: str = "127.0.0.1",
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
            obj: Its public methods are served; None serves only what is bound later, and so does a
                text: a name, which servers of the original Launchpad begin with. A `courier.Cache`
                answers for another server instead.
            host: Where to listen.
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
                authority; on the same machine a unix socket of the same user does without.
            in_process: What callers in this process get: "copy" packs and unpacks arguments and
                results, as between processes; "share" hands over the objects themselves; both
                run the method in the thread of a caller who waits, where that is safe. "wire"
                goes through the socket.
            keepalive_s: Seconds until a connection is given up whose other machine is silent.
            timing: How long internals wait; for tests.

        Raises:
            UnprotectedServerError: There is no secret, and `host` is not loopback, or this system
                does not tell of which user a client is.
            ValueError: A size is below 1, `serial` comes with another size, `in_process` is unknown,
                or `keepalive_s` not above 0.
        """
        if not is_loopback(host) and secret is None:
            raise UnprotectedServerError(
                f"a server at {host} can be reached from other machines and runs the code of "
                "any process that reaches it: pass secret=courier.Secret.generate(), or listen at 127.0.0.1"
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
        self.dispatcher = (
            CacheDispatcher(obj) if isinstance(obj, Cache) else Dispatcher(serial=serial)
        )
        self.dispatcher.tasks.limit = thread_pool_size + queue_size
        if obj is not None and not isinstance(obj, str | Cache):
            for name, method in exposed_methods(obj, hidden).items():
                self.dispatcher.bind(name, method)
        self.handlers = HandlerPool("courier-handler", thread_pool_size, queue_size)
        self.costs = MethodCosts()
        self._lock = threading.Lock()
        self._stage = _Stage.NEW
        self._listener: socket.socket | None = None
        self._host: Host | None = None
        self._grpc: GrpcDoor | None = None
        #: Calls from this process, which pass no socket.
        self._local_calls: set[LocalCall] = set()
        self._stopped = threading.Event()
        _servers.add(self)

    def bind(self, name: str, method: Callable[..., Any]) -> None:
        """Serves one more method, or replaces one; also while running.

        Raises:
            ValueError: The name is empty or private.
        """
        if not name or (name.startswith("_") and name != "__call__"):
            raise ValueError(f"not a public method name: {name!r}")
        self.dispatcher.bind(name, method)

    def unbind(self, name: str) -> None:
        """Serves a method no longer; unknown names are ignored."""
        self.dispatcher.unbind(name)

    def methods(self) -> list[str]:
        """Returns the names of all served methods, sorted."""
        return self.dispatcher.names()

    @property
    def port(self) -> int:
        """Where it listens, or will: a free port is taken when it is asked for, or at the start.

        Raises:
            AddressInUseError: The host is not of this machine.
        """
        if not self._port:
            with self._lock:
                self._listen()
        return self._port

    @property
    def address(self) -> str:
        """`host:port` for clients; before the start as well, which their first calls wait for.

        Raises:
            AddressInUseError: The host is not of this machine.
        """
        return join_address(self._advertised_host, self.port)

    @property
    def has_started(self) -> bool:
        """Whether it serves now."""
        return self._stage is _Stage.STARTED

    def start(self) -> None:
        """Binds the port and serves.

        Raises:
            ServerStateError: It was started before.
            AddressInUseError: The port is taken.
        """
        with self._lock:
            if self._stage is not _Stage.NEW:
                raise ServerStateError(f"the server is already {self._stage.value}")
            listener = self._listen()
            self._grpc = GrpcDoor(self.dispatcher, self.handlers, self.secret, self._tls)
            self._host = Host(
                self.dispatcher,
                self.handlers,
                self.costs,
                self.secret,
                self._tls.server_context() if self._tls is not None else None,
                listener=listener,
                redirect=self._grpc.admit,
                keepalive_s=self._keepalive_s,
                timing=self._timing,
            )
            self._grpc.engine = self._host
            self._host.start()
            self._stage = _Stage.STARTED
        if self.in_process is not InProcess.WIRE:
            announce(self.address, self)

    def _listen(self) -> socket.socket:
        if self._listener is None:
            self._listener = listen(self._host_name, self._port, share_port=self._share_port)
            self._port = self._listener.getsockname()[1]
        return self._listener

    def stop(self, grace_s: float = 5.0) -> list[str]:
        """Takes no more calls, lets running ones end, then cancels them. Safe to call twice.

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
                if self._stage is _Stage.NEW:
                    raise ServerStateError("the server was not started")
                first, self._stage = self._stage is _Stage.STARTED, _Stage.STOPPED
            if not first:
                self._stopped.wait()
                return []
            return self._stop(grace_s)
        except BaseException:
            # A thread that is ended by force in here leaves no threads and no port either.
            if first:
                self._stop(0.0)
            raise
        finally:
            if first:
                self._stopped.set()

    def _stop(self, grace_s: float) -> list[str]:
        assert self._host is not None
        assert self._grpc is not None
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
        assert self._grpc is not None
        return (
            self.handlers.is_idle
            and self._host.is_idle
            and not self._local_calls
            and self._grpc.is_idle
        )

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the server was stopped; returns whether it was.

        Raises:
            ServerStateError: It was never started.
        """
        if self._stage is _Stage.NEW:
            raise ServerStateError("the server was not started")
        return self._stopped.wait(timeout_s)

    def set_healthy(self, healthy: bool) -> None:
        """Sets the answer to health checks, those of the standard gRPC health service as well.

        Raises:
            ServerStateError: It does not serve.
        """
        if self._stage is not _Stage.STARTED or self._host is None or self._grpc is None:
            raise ServerStateError(f"the server is {self._stage.value}")
        self._host.is_healthy = healthy
        self._grpc.set_healthy(healthy)

    def survive_fork(self) -> None:
        """Counts as stopped in a forked child: the parent serves, and its threads hold its locks."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        if self._grpc is not None:
            self._grpc.survive_fork()
        if self._stage is not _Stage.NEW:
            self._stage = _Stage.STOPPED
            self._stopped.set()

    # For callers in this process: `courier._local.LocalServer`

    @property
    def takes_calls(self) -> bool:
        """Whether calls may begin. For the transport."""
        return self._stage is _Stage.STARTED

    def begin(self, call: LocalCall) -> bool:
        """Notes a call from this process; returns False if none may begin. For the transport."""
        with self._lock:
            if self._stage is not _Stage.STARTED:
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

    # The same as the original Launchpad spells it, whose programs get servers by
    # `set_courier_server` and start and stop them.
    Bind, Unbind, Start, Stop, Join, SetIsHealthy = bind, unbind, start, stop, join, set_healthy


_servers: "weakref.WeakSet[Server]" = weakref.WeakSet()


def _survive_fork() -> None:
    for server in list(_servers):
        server.survive_fork()


os.register_at_fork(after_in_child=_survive_fork)
