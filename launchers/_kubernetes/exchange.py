"""Where pods call: the supervisor's end of their links.

One thread carries the bytes of all links. To the rest of the supervisor a link is a `Line`, which
behaves as the process of `ssh` does that reaches a host.
"""

import contextlib
import errno
import json
import logging
import math
import os
import queue
import selectors
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from courier import TlsCredentials
from launchers._console import warn
from launchers._kubernetes.timing import DEFAULT, Timing
from launchers.host.pod import MAX_GREETING_BYTES, Pump

#: What `ssh` ends with when the connection is the trouble; so does a line.
_LINK_BROKE = 255
_BACKLOG = 1024
#: What says that there are too many files, and not that a caller has gone.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Callers that are let in before they have proved anything.
_MAX_STRANGERS = 4096

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """What a pod says of itself.

    Attributes:
        host: Its host name, which is that of the pod it replaces, too.
        pod: Its name.
        node: The machine it runs on, which Kubernetes calls a node.
    """

    host: str
    pod: str = ""
    node: str = ""

    @classmethod
    def read(cls, line: bytes) -> "Caller":
        """Reads a greeting.

        Raises:
            ValueError: It is none.
        """
        try:
            fields = json.loads(line)
        except RecursionError:
            raise ValueError("a greeting that is nested too deeply") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("host"), str):
            raise ValueError("a pod that does not say who it is")
        return cls(fields["host"], str(fields.get("pod", "")), str(fields.get("node", "")))


class Line:
    """The link to a pod that may come later. Implements `launchers.host.link.Reach`.

    What is written before waits for the pod. It ends for good with the connection.
    """

    def __init__(self, exchange: "Exchange", host: str) -> None:
        """Made by `Exchange.expect`."""
        self.host = host
        self._exchange = exchange
        self._ended = threading.Event()
        # Not pipes: of these the kernel gives a user many with little room only, and what is written
        # first waits here for the pod.
        ours, theirs = (each.detach() for each in socket.socketpair())
        self.source = ours
        self.stdin: IO[bytes] | None = os.fdopen(theirs, "wb", buffering=0)
        ours, theirs = (each.detach() for each in socket.socketpair())
        self.sink = theirs
        self.stdout: IO[bytes] | None = os.fdopen(ours, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(os.open(os.devnull, os.O_RDONLY), "rb")
        for descriptor in (self.source, self.sink):
            os.set_blocking(descriptor, False)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the link.

        Raises:
            subprocess.TimeoutExpired: It continues.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.host, timeout or 0.0)
        return _LINK_BROKE

    def terminate(self) -> None:
        """Ends the link."""
        self._exchange.drop(self)

    def kill(self) -> None:
        """Ends the link."""
        self._exchange.drop(self)

    def end(self) -> None:
        """Notes that nothing is carried any more; called by the exchange, once."""
        os.close(self.source)
        os.close(self.sink)
        self._ended.set()


@dataclass(eq=False)
class _Connection:
    """A pod that has called."""

    socket: ssl.SSLSocket
    #: When a greeting, or the end of a pod that was asked to end, comes too late.
    give_up_at: float
    greeting: bytes = b""
    is_proved: bool = False
    caller: Caller | None = None
    line: Line | None = None
    pump: Pump | None = None
    #: Descriptors that are waited for.
    waits: dict[int, int] = field(default_factory=dict)


class Exchange:
    """Takes calls of pods, and connects each with the line that waits for it. Thread-safe.

    A pod belongs to the run if it has a certificate of the run's authority. If another pod calls
    under the host name of one that is connected, the earlier one is gone: its line ends.
    """

    def __init__(
        self,
        tls: TlsCredentials,
        port: int,
        timing: Timing = DEFAULT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to listen.

        Args:
            tls: Certificates of the run.
            port: On all interfaces; 0 takes a free one.
            timing: How long it waits for callers.
            clock: What it measures that with, in seconds.

        Raises:
            OSError: The port is taken.
        """
        self._timing = timing
        self._clock = clock
        self._context = tls.server_context()
        self._listener = _listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._asked: queue.SimpleQueue[tuple[str, Line | str | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._callers: dict[str, Caller] = {}
        self._is_open = True
        # Of the thread alone:
        self._strangers: set[_Connection] = set()
        self._waiting: dict[str, Line] = {}
        self._parked: dict[str, _Connection] = {}
        self._carried: dict[Line, _Connection] = {}
        self._parting: set[_Connection] = set()
        self._accepts_at = -math.inf
        self._thread = threading.Thread(target=self._serve, name="launchpad-exchange", daemon=True)
        self._thread.start()

    def expect(self, host: str) -> Line:
        """Returns the link to the pod of this host name: the one that has called, or will."""
        line = Line(self, host)
        self._ask("expect", line)
        return line

    def give_up(self, host: str) -> None:
        """Ends all lines of a host name, those that wait for a pod as well."""
        self._ask("give up", host)

    def drop(self, line: Line) -> None:
        """Ends a line, and the connection behind it. May be repeated."""
        self._ask("drop", line)

    def caller(self, host: str) -> Caller:
        """Returns what the pod said that called last under a host name."""
        with self._lock:
            return self._callers.get(host, Caller(host))

    @property
    def is_open(self) -> bool:
        """Whether pods can call: not any more once it was closed, or has failed."""
        with self._lock:
            return self._is_open

    def close(self) -> None:
        """Ends all lines. May be repeated."""
        self._ask("close", None)
        self._thread.join()

    def _ask(self, what: str, of: Line | str | None) -> None:
        with self._lock:
            if self._is_open:
                self._asked.put((what, of))
                with contextlib.suppress(BlockingIOError):  # it is awake, or about to be
                    os.write(self._wake_write, b"!")
            elif what == "expect":
                assert isinstance(of, Line)
                of.end()

    # Its thread

    def _serve(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # noqa: BLE001 - it is reported
            # All lines end: so the program does, rather than waiting for ever.
            warn(_LOGGER, "the exchange failed", error=error)
        with self._lock:
            self._is_open = False
        while not self._asked.empty():
            what, asked = self._asked.get()
            if what == "expect" and isinstance(asked, Line):
                asked.end()
        for line in [*self._waiting.values(), *self._carried]:
            line.end()
        for connection in [*self._strangers, *self._parked.values(), *self._carried.values()]:
            connection.socket.close()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _step(self) -> bool:
        now = self._clock()
        limits = [each.give_up_at for each in (*self._strangers, *self._parting)]
        if self._listener.fileno() not in self._selector.get_map():
            limits.append(self._accepts_at)
        timeout_s = min(limits, default=now + 3600) - now
        touched: dict[_Connection, None] = {}
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 1 << 16)
            else:
                touched[key.data] = None
        while not self._asked.empty():
            what, asked = self._asked.get()
            if asked is None:
                return False
            if isinstance(asked, Line):
                self._obey(what, asked)
            else:
                self._end_all(asked)
        for connection in touched:
            try:
                self._work(connection)
            except Exception:  # it ends, and the others go on
                _LOGGER.exception("the exchange gives up a connection")
                self._forget(connection)
        now = self._clock()
        for connection in [*self._strangers, *self._parting]:
            if connection.give_up_at < now:
                self._forget(connection)
        if self._listener.fileno() not in self._selector.get_map() and now >= self._accepts_at:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        return True

    def _obey(self, what: str, line: Line) -> None:
        if what == "expect":
            # One connection for each host: a host that connects again has given up the one before.
            if (before := self._waiting.pop(line.host, None)) is not None:
                before.end()
            self._waiting[line.host] = line
            if (parked := self._parked.pop(line.host, None)) is not None:
                self._connect(parked, line)
        elif (connection := self._carried.get(line)) is not None:
            self._forget(connection)
        elif self._waiting.get(line.host) is line:
            del self._waiting[line.host]
            line.end()

    def _end_all(self, host: str) -> None:
        if (waiting := self._waiting.pop(host, None)) is not None:
            waiting.end()
        for line in [each for each in self._carried if each.host == host]:
            self._forget(self._carried[line])

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except OSError as error:  # it has gone, or there are too many files
            if error.errno in _EXHAUSTED:
                # Otherwise it would be reported again and again that a host calls.
                self._selector.unregister(self._listener)
                self._accepts_at = self._clock() + self._timing.exhausted_s
                warn(_LOGGER, "no pod can call at the moment: %s", error)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            plain.close()
            return
        plain.setblocking(False)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = self._context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            plain.close()
            return
        connection = _Connection(secured, self._clock() + self._timing.greeting_s)
        self._strangers.add(connection)
        self._watch(connection, {secured.fileno(): selectors.EVENT_READ})

    def _work(self, connection: _Connection) -> None:
        if connection in self._strangers:
            self._greet(connection)
        elif (line := connection.line) is not None:
            # If it was ended a moment ago, its descriptors may belong to other files by now.
            if connection in self._parting:
                self._await_end(connection)
            elif self._carried.get(line) is connection:
                self._carry(connection)
        elif (caller := connection.caller) is not None:
            # A parked one says nothing, unless it goes. Its successor may have been faster.
            if self._parked.get(caller.host) is connection:
                del self._parked[caller.host]
            self._forget(connection)

    def _greet(self, connection: _Connection) -> None:
        """Goes on with a handshake, and then a greeting."""
        waits = {}
        try:
            if not connection.is_proved:
                connection.socket.do_handshake()
                connection.is_proved = True
            while not connection.greeting.endswith(b"\n"):
                # Byte by byte: what follows belongs to the link.
                piece = connection.socket.recv(1)
                connection.greeting += piece
                if not piece or len(connection.greeting) > MAX_GREETING_BYTES:
                    raise ValueError("no greeting")
            connection.caller = Caller.read(connection.greeting)
        except ssl.SSLWantReadError:
            waits = {connection.socket.fileno(): selectors.EVENT_READ}
        except ssl.SSLWantWriteError:
            waits = {connection.socket.fileno(): selectors.EVENT_WRITE}
        except (OSError, ValueError) as error:
            _LOGGER.debug("a caller was refused: %s", error)
            self._forget(connection)
            return
        if waits:
            self._watch(connection, waits)
        else:
            self._admit(connection)

    def _admit(self, connection: _Connection) -> None:
        caller = connection.caller
        assert caller is not None
        self._strangers.discard(connection)
        with self._lock:
            self._callers[caller.host] = caller
        for line in [each for each in self._carried if each.host == caller.host]:
            self._forget(self._carried[line])
        if (before := self._parked.pop(caller.host, None)) is not None:
            self._forget(before)
        if (line_waiting := self._waiting.get(caller.host)) is not None:
            self._connect(connection, line_waiting)
        else:
            self._parked[caller.host] = connection
            self._watch(connection, {connection.socket.fileno(): selectors.EVENT_READ})

    def _connect(self, connection: _Connection, line: Line) -> None:
        del self._waiting[line.host]
        connection.line = line
        connection.pump = Pump(connection.socket, line.source, line.sink)
        self._carried[line] = connection
        self._carry(connection)

    def _carry(self, connection: _Connection) -> None:
        assert connection.pump is not None
        waits = connection.pump.move()
        if connection.pump.is_drained:
            self._part(connection)
        elif connection.pump.is_over:
            self._forget(connection)
        else:
            self._watch(connection, waits)

    def _watch(self, connection: _Connection, waits: dict[int, int]) -> None:
        if waits == connection.waits:
            return
        for descriptor in connection.waits:
            self._selector.unregister(descriptor)
        for descriptor, events in waits.items():
            self._selector.register(descriptor, events, connection)
        connection.waits = dict(waits)

    def _part(self, connection: _Connection) -> None:
        """Makes a pod end its side when it has received all that was sent.

        A connection that is closed while there is something to read takes back what is still on its
        way.
        """
        try:
            connection.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._forget(connection)
            return
        connection.give_up_at = self._clock() + self._timing.part_s
        self._parting.add(connection)
        self._watch(connection, {connection.socket.fileno(): selectors.EVENT_READ})

    def _await_end(self, connection: _Connection) -> None:
        """Passes over what a pod still says."""
        try:
            if connection.socket.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        self._watch(connection, {})
        self._strangers.discard(connection)
        self._parting.discard(connection)
        line = connection.line
        if line is not None and self._carried.pop(line, None) is not None:
            line.end()
        with contextlib.suppress(OSError):
            connection.socket.close()


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is known, and switched off
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)
