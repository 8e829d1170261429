"""Connections between hosts that do not reach each other: the launcher forwards what agents relay."""

import contextlib
import functools
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from courier.lowlevel import surviving
from launchers.host.link import LinkFrame
from launchers.host.relay import Relay
from launchers.hosts.reachability import LAUNCHER
from launchers.supervision.remote import AgentHost


class Tunnels:
    """Forwards relayed connections from host to host. Thread-safe."""

    def __init__(self, hosts: Mapping[str, AgentHost]) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        #: The two ends of each connection.
        self._ends: dict[str, tuple[str, str]] = {}
        #: The endpoint that stands for a port of a host, by caller, host and port.
        self._known: dict[tuple[str, str, int], str] = {}
        self._own: _OwnEnd | None = None
        for name, host in hosts.items():
            host.pass_relayed_to(functools.partial(self._pass_on, name))

    def endpoint(self, caller: str, host: str, port: int) -> str:
        """Returns `host:port` at which a caller reaches a port of a host."""
        way = (caller, host, port)
        if way not in self._known:
            self._known[way] = self._open(*way)
        return self._known[way]

    def _open(self, caller: str, host: str, port: int) -> str:
        if caller != LAUNCHER:
            answer = self._hosts[caller].ask_agent(LinkFrame("relay", {"host": host, "port": port}))
            return str(answer["endpoint"])
        if self._own is None:
            self._own = _OwnEnd(lambda frame: self._pass_on(LAUNCHER, frame))
        return self._own.listen(host, port)

    def _pass_on(self, source: str, frame: LinkFrame | None) -> None:
        if frame is None:
            self._end_all_of(source)
            return
        key: str = frame["key"]
        with self._lock:
            if frame.op == "relay_open":
                self._ends[key] = (source, frame["host"])
            ends = self._ends.get(key)
            if frame.op == "relay_end":
                self._ends.pop(key, None)
        if ends is not None:
            if not self._send(_other(ends, source), frame) and frame.op != "relay_end":
                with self._lock:
                    self._ends.pop(key, None)
                self._send(source, LinkFrame("relay_end", {"key": key}))

    def _send(self, target: str, frame: LinkFrame) -> bool:
        if target == LAUNCHER:
            assert self._own is not None
            self._own.take(frame)
            return True
        return self._hosts[target].relay(frame)

    def _end_all_of(self, lost: str) -> None:
        """Closes the connections of a lost host at their other ends."""
        with self._lock:
            broken = {key: ends for key, ends in self._ends.items() if lost in ends}
            for key in broken:
                del self._ends[key]
        for key, ends in broken.items():
            self._send(_other(ends, lost), LinkFrame("relay_end", {"key": key}))

    def close(self) -> None:
        """Stops forwarding. May be repeated."""
        if self._own is not None:
            self._own.close()


def _other(ends: tuple[str, str], one: str) -> str:
    return ends[1] if ends[0] == one else ends[0]


class _OwnEnd:
    """The end of relayed connections in this process, with a thread of its own."""

    def __init__(self, send: Callable[[LinkFrame], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._frames: SimpleQueue[LinkFrame] = SimpleQueue()
        self._lock = threading.Lock()
        self._relay = Relay(self._selector, send)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="launchpad-relay", daemon=True)
        self._thread.start()

    def listen(self, host: str, port: int) -> str:
        with self._lock:
            own = self._relay.listen(host, port)
        self._wake()
        return own

    def take(self, frame: LinkFrame) -> None:
        self._frames.put(frame)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a wake-up is pending already, or the socket is closed
            self._wake_write.send(b"\0")

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while not self._frames.empty():  # nothing else takes frames
            self._relay.handle(self._frames.get())

    def _run(self) -> None:
        while not self._closed:
            with surviving("the launcher's end of relayed connections"):
                for key, _ in self._selector.select():
                    with self._lock:
                        # An earlier callback of this round may have closed this socket.
                        if self._selector.get_map().get(key.fd) == key:
                            key.data()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._relay.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
