"""Servers: an object whose public methods can be called from other processes."""

import enum
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from courier._address import is_loopback, join_address
from courier._dispatch import Dispatcher
from courier._exposure import exposed_methods
from courier._secret import Secret
from courier.errors import ServerStateError, UnprotectedServerError

if TYPE_CHECKING:
    from courier._grpc.server import FrontDoor


class _Stage(enum.Enum):
    NEW = "not started"
    STARTED = "started"
    STOPPED = "stopped"


class Server:
    """Serves the public methods of an object, or single methods, at one address.

    Handlers run in threads of the server, at most `thread_pool_size` at a time,
    and see the context variables of the thread that made the server. All
    methods are thread-safe.

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
        thread_pool_size: int = 16,
        queue_size: int = 10_000,
        hidden: Collection[str] = (),
        share_port: bool = False,
        advertised_host: str | None = None,
    ) -> None:
        """Prepares a server; it binds its port and serves from `start` on.

        Args:
            obj: Its public methods are served; None serves only what is bound later.
            host: Where to listen.
            port: 0 takes a free one.
            secret: Clients must hold the same. Needed beyond loopback.
            thread_pool_size: Number of handlers that run at the same time.
            queue_size: Calls that may wait for a handler; more are refused with
                ServerBusyError.
            hidden: Names of methods of `obj` that are not served.
            share_port: Listen beside a socket of the same user that reserves the port
                (SO_REUSEPORT).
            advertised_host: Host in `address`, where it differs from `host`.

        Raises:
            UnprotectedServerError: `host` is not loopback and there is no secret.
            ValueError: A size is below 1.
        """
        if not is_loopback(host) and secret is None:
            raise UnprotectedServerError(
                f"a server at {host} can be reached from other machines and runs the code of "
                "whoever reaches it: pass secret=courier.Secret.generate(), or listen at 127.0.0.1"
            )
        if thread_pool_size < 1 or queue_size < 1:
            raise ValueError("thread_pool_size and queue_size are at least 1")
        self._host = host
        self._advertised_host = advertised_host or host
        self._requested_port = port
        self._secret = secret
        self._threads = thread_pool_size
        self._queue_size = queue_size
        self._share_port = share_port
        self._dispatcher = Dispatcher()
        if obj is not None:
            for name, method in exposed_methods(obj, hidden).items():
                self._dispatcher.bind(name, method)
        self._lock = threading.Lock()
        self._stage = _Stage.NEW
        self._door: FrontDoor | None = None
        self._stopped = threading.Event()

    def bind(self, name: str, method: Callable[..., Any]) -> None:
        """Serves one more method, or replaces one; also while running.

        Raises:
            ValueError: The name is empty or private.
        """
        if not name or (name.startswith("_") and name != "__call__"):
            raise ValueError(f"not a public method name: {name!r}")
        self._dispatcher.bind(name, method)

    def unbind(self, name: str) -> None:
        """Serves a method no longer; unknown names are ignored."""
        self._dispatcher.unbind(name)

    def methods(self) -> list[str]:
        """Returns the names of all served methods, sorted."""
        return self._dispatcher.names()

    @property
    def port(self) -> int:
        """Where it listens.

        Raises:
            ServerStateError: Not started yet.
        """
        if self._door is None:
            if self._requested_port:
                return self._requested_port
            raise ServerStateError("the server has no port before start()")
        return self._door.port

    @property
    def address(self) -> str:
        """`host:port` for clients.

        Raises:
            ServerStateError: Not started yet, and no port was chosen.
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
        from courier._grpc.server import FrontDoor  # grpc loads when a server needs it

        with self._lock:
            if self._stage is not _Stage.NEW:
                raise ServerStateError(f"the server is already {self._stage.value}")
            self._door = FrontDoor(
                self._dispatcher,
                self._secret,
                listen=join_address(self._host, self._requested_port),
                share_port=self._share_port,
                threads=self._threads,
                queue_size=self._queue_size,
            )
            self._door.start()
            self._stage = _Stage.STARTED

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
        with self._lock:
            if self._stage is _Stage.NEW:
                raise ServerStateError("the server was not started")
            first, self._stage = self._stage is _Stage.STARTED, _Stage.STOPPED
        if not first:
            self._stopped.wait()
            return []
        try:
            assert self._door is not None
            return self._door.stop(grace_s)
        finally:
            self._stopped.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the server was stopped; returns whether it was.

        Raises:
            ServerStateError: It was never started.
        """
        if self._stage is _Stage.NEW:
            raise ServerStateError("the server was not started")
        return self._stopped.wait(timeout_s)

    def set_healthy(self, healthy: bool) -> None:
        """Sets what the standard gRPC health service answers.

        Raises:
            ServerStateError: It does not serve.
        """
        if self._stage is not _Stage.STARTED or self._door is None:
            raise ServerStateError(f"the server is {self._stage.value}")
        self._door.set_healthy(healthy)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
