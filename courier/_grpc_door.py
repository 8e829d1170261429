"""Where those come in who speak gRPC: other languages, proxies, health checks.

gRPC is loaded, and its server started, when the first of them connects: most servers never see one,
and would pay for it with start time and memory. gRPC cannot take over a connection, so that its
server listens inside of the process and the bytes are copied.
"""

import socket
import threading
from typing import TYPE_CHECKING

from courier._dispatch import Dispatcher
from courier._engine.place import ABSTRACT
from courier._engine.pump import Pump
from courier._pool import HandlerPool
from courier._secret import Secret, make_nonce
from courier._timing import Timing
from courier._tls import TlsCredentials

if TYPE_CHECKING:
    from courier._engine.host import Host
    from courier._grpc.server import FrontDoor


class GrpcDoor:
    """Starts a gRPC server when one is needed. Thread-safe."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        handlers: HandlerPool,
        secret: Secret | None,
        tls: TlsCredentials | None,
        timing: Timing,
    ) -> None:
        self._dispatcher = dispatcher
        self._handlers = handlers
        self._secret = secret
        self._tls = tls
        self._timing = timing
        #: Takes the streams of our own clients that came through gRPC.
        self.engine: Host | None = None
        self._pump = Pump()
        self._lock = threading.Lock()
        self._door: FrontDoor | None = None
        self._opening: set[threading.Thread] = set()
        self._healthy = True
        self._stopping = False
        self._stopper: threading.Thread | None = None
        self._alive: list[str] = []

    def admit(self, sock: socket.socket, data: bytes) -> None:
        """Hands a connection to gRPC; returns at once.

        Args:
            sock: The connection.
            data: What has been read from it already.
        """
        thread = threading.Thread(
            target=self._connect, args=(sock, data), name="courier-grpc", daemon=True
        )
        with self._lock:
            self._opening.add(thread)
        thread.start()

    def _connect(self, sock: socket.socket, data: bytes) -> None:
        inner: socket.socket | None = None
        try:
            inner = self._reach()
            inner.sendall(data)
        except OSError:
            for end in (sock, inner):
                if end is not None:
                    end.close()
        else:
            self._pump.connect(sock, inner)
        finally:
            with self._lock:
                self._opening.discard(threading.current_thread())

    def _reach(self) -> socket.socket:
        """Connects to the gRPC server, which is started if this is the first time."""
        with self._lock:
            if self._stopping:
                raise ConnectionRefusedError
            door = self._door or self._open()
        if ABSTRACT:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            inner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            inner.connect(door.inner_address)
        except BaseException:
            inner.close()
            raise
        return inner

    def _open(self) -> "FrontDoor":
        from courier._grpc.server import FrontDoor  # grpc loads when somebody speaks it

        name = f"courier/grpc/{make_nonce().hex()}" if ABSTRACT else None
        assert self.engine is not None
        self._door = FrontDoor(
            self._dispatcher,
            self._handlers,
            self._secret,
            self._tls,
            self.engine,
            name,
            self._timing,
        )
        self._door.start()
        self._door.set_healthy(self._healthy)
        return self._door

    def set_healthy(self, healthy: bool) -> None:
        """Sets what the standard health service answers."""
        with self._lock:
            self._healthy = healthy
            if self._door is not None:
                self._door.set_healthy(healthy)

    @property
    def is_idle(self) -> bool:
        """Whether no call that came by gRPC is open."""
        stopper = self._stopper
        return stopper is None or not stopper.is_alive()

    def begin_stop(self, grace_s: float) -> None:
        """Takes no more calls; those that run have `grace_s`."""
        with self._lock:
            self._stopping = True
            door = self._door
        if door is not None:
            self._stopper = threading.Thread(
                target=lambda: self._alive.extend(door.stop(grace_s)),
                name="courier-grpc-stop",
                daemon=True,
            )
            self._stopper.start()

    def end(self) -> list[str]:
        """Hangs up on everybody; returns names of threads that still run."""
        if self._stopper is not None:
            self._stopper.join(2.0)
        self._pump.stop()
        with self._lock:
            opening = list(self._opening)
        for thread in opening:
            thread.join(1.0)
        return self._alive
