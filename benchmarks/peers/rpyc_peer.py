"""rpyc: bytes travel by value, so arrays travel as bytes."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import rpyc
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.utils.server import ThreadedServer

# By default all above 3 kB is compressed, which costs far more than it spares on one machine.
Channel.COMPRESSION_THRESHOLD = sys.maxsize
# By default 64,000 bytes, before each of which all that is left of a message is copied.
SocketStream.MAX_IO_CHUNK = 1 << 22
_CONFIG = {"allow_public_attrs": True, "sync_request_timeout": None}


class RpycPeer(harness.BytesPeer):
    """A thread for each connection, over a Unix socket."""

    def serve(self, setup: harness.Setup) -> str:
        """Starts a server."""
        handlers = harness.BytesHandlers()

        class Service(rpyc.Service):
            """Gives out the handlers."""

            exposed_handlers = handlers

        address = f"{setup.scratch}/rpyc"
        server = ThreadedServer(Service, socket_path=address, protocol_config=_CONFIG)
        threading.Thread(target=server.start, daemon=True).start()
        return address

    def connect(self, setup: harness.Setup) -> None:
        """Connects."""
        connected = socket.socket(socket.AF_UNIX)
        # The server tells its address before it listens.
        while connected.connect_ex(setup.address):
            time.sleep(0.001)
        self._connection = rpyc.connect_stream(SocketStream(connected), config=_CONFIG)
        self._handlers = self._connection.root.handlers
        self._serving: rpyc.BgServingThread | None = None

    def bytes_method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the remote handlers."""
        return getattr(self._handlers, name)

    def later(self, name: str) -> Callable[..., Any]:
        """Returns the asynchronous method."""
        if self._serving is None:
            # Without it, neither end reads while many calls are sent, until both wait without end. By
            # default it sleeps after each answer.
            self._serving = rpyc.BgServingThread(
                self._connection, serve_interval=0.1, sleep_interval=0.0
            )
        return rpyc.async_(getattr(self._handlers, name))

    def collect(self, futures: list[Any]) -> None:
        """Waits for the results."""
        for future in futures:
            assert future.value == harness.PAYLOAD


if __name__ == "__main__":
    harness.main(RpycPeer())
