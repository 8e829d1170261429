"""Where those come in who speak gRPC: other languages, proxies, health checks.

gRPC is loaded, and its server started, when the first of them connects: most servers never see one,
and would pay for it with start time and memory. All of it runs in one thread.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

from courier._dispatch import Dispatcher
from courier._engine.relay import Relay
from courier._pool import HandlerPool
from courier._secret import Secret
from courier._tls import TlsCredentials

if TYPE_CHECKING:
    from courier._engine.host import Host

#: Seconds that the end has for what is on its way, and for gRPC to let go.
_END_S = 5.0

_log = logging.getLogger(__name__)


class GrpcDoor:
    """Starts a gRPC server when one is needed. Thread-safe."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        handlers: HandlerPool,
        secret: Secret | None,
        tls: TlsCredentials | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._handlers = handlers
        self._secret = secret
        self._tls = tls
        #: Takes the streams of our own clients that came through gRPC.
        self.engine: Host | None = None
        self._lock = threading.Lock()
        self._relay = Relay(is_tls=tls is not None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: Set when one of those below has changed.
        self._changed = asyncio.Event()
        self._healthy = True
        self._stopping = False
        self._grace_s = 0.0
        #: Whether all calls have ended.
        self._answered = True

    def admit(self, sock: socket.socket, data: bytes, peer: str) -> None:
        """Hands a connection to gRPC; returns at once.

        Args:
            sock: The connection.
            data: What has been read from it already.
            peer: Who it is, for people to read.
        """
        with self._lock:
            if self._stopping:
                sock.close()
                return
            loop = self._loop or self._begin()
            loop.call_soon_threadsafe(self._relay.take, sock, data, peer)

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        loop.set_exception_handler(_report)
        self._answered = False
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="courier-grpc", daemon=True
        )
        self._thread.start()
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_until_complete(self._serve())
        except Exception:  # noqa: BLE001 - all others go on
            _log.exception("a courier server cannot speak gRPC any more")
        finally:
            with self._lock:
                self._stopping = True
                self._answered = True
            loop.run_until_complete(self._end_all())
            loop.close()

    async def _end_all(self) -> None:
        await self._relay.stop()
        # Of calls that were cancelled some may not have noticed yet.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> None:
        from courier._grpc.server import FrontDoor  # grpc loads when somebody speaks it

        assert self.engine is not None
        door = FrontDoor(
            self._dispatcher, self._handlers, self._secret, self._tls, self.engine, self._relay
        )
        await door.start()
        self._relay.open(door.connect)
        while not self._stopping:
            await door.set_healthy(self._healthy)
            await self._changed.wait()
            self._changed.clear()
        await door.stop(self._grace_s)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)

    def set_healthy(self, healthy: bool) -> None:
        """Sets what the standard health service answers."""
        with self._lock:
            self._healthy = healthy
        self._tell()

    @property
    def is_idle(self) -> bool:
        """Whether no call that came by gRPC is open, after `begin_stop`."""
        return self._answered

    def begin_stop(self, grace_s: float) -> None:
        """Takes no more calls; those that run have `grace_s`."""
        with self._lock:
            self._stopping = True
            self._grace_s = grace_s
        self._tell()

    def end(self) -> list[str]:
        """Hangs up on everybody; returns names of threads that still run."""
        thread = self._thread
        if thread is None:
            return []
        thread.join(_END_S)
        return [thread.name] if thread.is_alive() else []


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes all event loops of the process at once, and one of them takes what there is.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
