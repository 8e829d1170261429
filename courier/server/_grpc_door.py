"""The door for peers that speak gRPC: other languages, proxies, health checks.

gRPC is loaded, and its server started, when the first of them connects: most servers never need it,
and save start time and memory. All of it runs in one thread.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from courier.threads.forks import survive
from courier.threads.locks import Lock
from courier.wire.tls import TlsCredentials

if TYPE_CHECKING:
    import asyncio

    from courier.grpc.server import FrontDoor
    from courier.server.host import ConnectionServer
    from courier.server.relay import GrpcRelay

#: Connections that may wait for the event loop; more are closed.
_MAX_COMING = 64
_RETRY_S = 0.5
#: Seconds that calls have to notice that they were cancelled.
_LAST_S = 2.0
#: Seconds at the end for data in flight, and for gRPC to close.
_END_S = 5.0

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

_log = logging.getLogger(__name__)


class GrpcDoor:
    """Starts a gRPC server when one is needed. Thread-safe."""

    def __init__(self, host: "ConnectionServer", tls: TlsCredentials | None) -> None:
        self._host = host
        self._tls = tls
        self._lock = Lock()
        #: The loop, its thread and its server, from the first connection on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._relay: GrpcRelay
        #: Set when the host's health, or the next attribute, has changed.
        self._changed: asyncio.Event
        self._stopping = False
        self._grace_s = 0.0
        #: Connections that wait for the event loop to take them.
        self._coming = 0
        #: Whether all calls have ended, and no more are accepted.
        self._has_ended = False
        survive(self)

    def admit(self, sock: socket.socket, data: bytes, peer: str) -> None:
        with self._lock:
            if self._stopping or self._coming == _MAX_COMING:
                sock.close()
                return
            loop = self._loop or self._begin()
            self._coming += 1
            loop.call_soon_threadsafe(self._take, sock, data, peer)

    def _take(self, sock: socket.socket, data: bytes, peer: str) -> None:
        with self._lock:
            self._coming -= 1
        self._relay.take(sock, data, peer)

    def _begin(self) -> "asyncio.AbstractEventLoop":
        import asyncio

        from courier.server.relay import GrpcRelay

        self._relay = GrpcRelay(is_tls=self._tls is not None)
        self._changed = asyncio.Event()
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(_report)
        thread = threading.Thread(target=self._run, args=(loop,), name="courier-grpc", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _run(self, loop: "asyncio.AbstractEventLoop") -> None:
        try:
            loop.run_until_complete(self._serve())
        except Exception:  # noqa: BLE001 - all others go on
            _log.exception("a courier server cannot speak gRPC any more")
        finally:
            with self._lock:
                self._stopping = True
                self._has_ended = True
            loop.run_until_complete(self._end_all())
            loop.close()

    async def _end_all(self) -> None:
        import asyncio

        await self._relay.stop()
        # Some cancelled calls may not have noticed yet; gRPC tells them.
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(tasks, timeout=_LAST_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self) -> None:
        import asyncio

        while (door := self._make_door()) is None:
            await asyncio.sleep(_RETRY_S)  # new connections wait as well
            if self._stopping:
                return
        await door.start()
        self._relay.open(door.connect)
        while not self._stopping:
            await door.set_healthy(self._host.is_healthy)
            await self._changed.wait()
            self._changed.clear()
        await door.stop(self._grace_s)

    def _make_door(self) -> "FrontDoor | None":
        with _for_this_process_only():
            from courier.grpc.server import FrontDoor  # loads grpc for the first gRPC client

            try:
                return FrontDoor(self._host, self._relay, self._tls)
            except OSError as error:  # no descriptor is left, or no folder is writable
                _log.warning("a courier server cannot speak gRPC yet: %s", error)
                return None

    def notify(self) -> None:
        """Has the gRPC server look at the health of the host, and whether to stop."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)

    def _survive_fork(self) -> None:
        if self._loop is not None:
            self._relay.survive_fork()

    @property
    def is_idle(self) -> bool:
        """Whether no call that came by gRPC is open, after `begin_stop`."""
        return self._thread is None or self._has_ended

    def begin_stop(self, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
            self._grace_s = grace_s
        self.notify()

    def end(self) -> list[str]:
        thread = self._thread
        if thread is None:
            return []
        thread.join(_END_S)
        return [thread.name] if thread.is_alive() else []


@contextlib.contextmanager
def _for_this_process_only() -> Iterator[None]:
    """Keeps gRPC from starting its threads again in forked children, where they crash.

    Has no effect if other code has used gRPC before. Raises RuntimeError in such a child.
    """
    global _server_process
    if _server_process not in (0, os.getpid()):
        raise RuntimeError(
            "this process was forked from one that serves gRPC, and cannot serve it: start it by "
            "multiprocessing's methods spawn or forkserver"
        )
    _server_process = os.getpid()
    is_set = _FORK_SUPPORT in os.environ
    os.environ.setdefault(_FORK_SUPPORT, "0")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_FORK_SUPPORT]


#: The first of the processes forked from one another that served gRPC.
_server_process = 0


def _report(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
    # gRPC wakes all event loops of the process at once, and one of them takes all events.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
