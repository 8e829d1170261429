"""Calls between hosts that do not reach each other, through the links of their agents.

At one end, a port of loopback stands for a port of another host. What comes there goes as frames to
the launcher, and from there to the other end, which connects to the real port. Each direction has a
window, so that a slow reader neither fills the memory nor delays other uses of the link.
"""

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Callable

from courier.lowlevel import bound, join_address, loopback
from launchers.host.link import LinkFrame

#: The messages between the two ends. After `relay_taken`, as many more bytes may follow.
RELAYED = ("relay_open", "relay_data", "relay_taken", "relay_end")
#: Most bytes of one direction of a connection that are on their way.
_WINDOW_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class _RelayedConnection:
    def __init__(self, key: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.key = key
        self.socket = sock
        self.undelivered = bytearray()
        self.credit = _WINDOW_BYTES
        #: Whether the other end has ended.
        self.ends = False


class Relay:
    """One end of all relayed connections of a process. For one thread, with its selector.

    The data of each key is a function without arguments, which the event loop calls when it is ready.
    """

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[LinkFrame], None]) -> None:
        """Relays nothing yet. `send` sends a frame to the other end."""
        self._selector = selector
        self._send = send
        self._loopback = loopback()
        self._listeners: list[socket.socket] = []
        self._connections: dict[str, _RelayedConnection] = {}

    def listen(self, host: str, port: int) -> str:
        """Opens a port of loopback for a port of another host; returns where, as `host:port`."""
        listener = bound(self._loopback, 0, backlog=256)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(
            listener, selectors.EVENT_READ, lambda: self._accept(listener, host, port)
        )
        return join_address(*listener.getsockname()[:2])

    def _accept(self, listener: socket.socket, host: str, port: int) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            key = os.urandom(8).hex()
            self._send(LinkFrame("relay_open", {"key": key, "host": host, "port": port}))
            self._add(key, sock)

    def _add(self, key: str, sock: socket.socket) -> None:
        connection = self._connections[key] = _RelayedConnection(key, sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._work_on(connection))

    def handle(self, frame: LinkFrame) -> None:
        key: str = frame["key"]
        if frame.op == "relay_open":
            try:
                self._connect(key, frame["port"])
            except OSError:  # too many files; or no server listens there, or not any more
                self._send(LinkFrame("relay_end", {"key": key}))
            return
        connection = self._connections.get(key)
        if connection is None:
            return  # it has ended at this end
        if frame.op == "relay_data":
            connection.undelivered += frame.body
        elif frame.op == "relay_taken":
            connection.credit += frame["bytes"]
        elif frame.op == "relay_end":
            connection.ends = True
        self._work_on(connection)

    def _connect(self, key: str, port: int) -> None:
        # This does not wait, because the server may be stuck with a full queue. A connection that
        # fails becomes ready to be read, and then ends.
        sock = socket.socket(socket.AF_INET6 if ":" in self._loopback else socket.AF_INET)
        sock.setblocking(False)
        error = sock.connect_ex((self._loopback, port))
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(error, os.strerror(error))
        self._add(key, sock)

    def _work_on(self, connection: _RelayedConnection) -> None:
        """Delivers and fetches what it can without waiting."""
        try:
            self._deliver(connection)
            self._fetch(connection)
        except Exception as error:
            self._end(connection, tell=True)
            if not isinstance(error, OSError):
                raise  # a mistake of ours, which would come again
            return
        if connection.ends and not connection.undelivered:
            self._end(connection, tell=False)
        elif connection.key in self._connections:
            self._watch(connection)

    def _deliver(self, connection: _RelayedConnection) -> None:
        delivered = 0
        with contextlib.suppress(BlockingIOError):
            while connection.undelivered:
                sent = connection.socket.send(connection.undelivered[:_READ_BYTES])
                del connection.undelivered[:sent]
                delivered += sent
        if delivered:
            self._send(LinkFrame("relay_taken", {"key": connection.key, "bytes": delivered}))

    def _fetch(self, connection: _RelayedConnection) -> None:
        if not connection.credit:
            return
        with contextlib.suppress(BlockingIOError):
            data = connection.socket.recv(min(connection.credit, _READ_BYTES))
            if not data:
                self._end(connection, tell=True)
                return
            connection.credit -= len(data)
            self._send(LinkFrame("relay_data", {"key": connection.key}, data))

    def _watch(self, connection: _RelayedConnection) -> None:
        events = selectors.EVENT_READ if connection.credit else 0
        events |= selectors.EVENT_WRITE if connection.undelivered else 0
        key = self._selector.get_map().get(connection.socket.fileno())
        if key is not None and key.events != events:
            self._selector.unregister(connection.socket)
        if events and (key is None or key.events != events):
            self._selector.register(connection.socket, events, lambda: self._work_on(connection))

    def _end(self, connection: _RelayedConnection, *, tell: bool) -> None:
        if self._connections.pop(connection.key, None) is None:
            return
        if connection.socket.fileno() in self._selector.get_map():
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if tell:
            self._send(LinkFrame("relay_end", {"key": connection.key}))

    def close(self) -> None:
        """Ends all connections without telling the other end, and closes the ports. May be repeated."""
        for sock in (*self._listeners, *(each.socket for each in self._connections.values())):
            sock.close()
        self._listeners.clear()
        self._connections.clear()
