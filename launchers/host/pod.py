"""The first process of a node's pod: calls the supervisor, and is the link of an agent to it.

Its text is mounted into the pod, where our packages need not be. It connects by mutual TLS, says
who it is, starts an interpreter that takes its program from there (`launchers.host.boot`), and
carries bytes both ways until either side ends. Standard library only.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

#: Exit code of a pod whose link broke, or that was asked to end: another one may replace it.
MAY_COME_BACK = 75
#: Exit code of a pod that is not needed any more.
_FOR_GOOD = 1
#: Seconds, and how many unanswered questions, as Linux calls them.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
#: The first line on the link is shorter.
MAX_GREETING_BYTES = 4096
_PIECE_BYTES = 1 << 16
#: Pieces that are carried before others have their turn, whose links the same thread carries.
_MOST_MOVES = 16
#: Seconds for one attempt to connect, and the pauses between two.
_CONNECT_S = 10.0
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
#: Seconds that the agent has, once its link is gone, to end all; its own limits are shorter.
_END_S = 15.0
#: Seconds in which the supervisor takes in what was said last.
_PART_S = 5.0
#: Runs the loader. What ends before it is the agent, because it was asked to, has nothing to report of its node.
_AGENT = f"""\
import sys
try:
    exec(sys.argv.pop())
except SystemExit as end:
    if isinstance(end.code, str):
        sys.stderr.write(end.code + chr(10))
except BaseException:
    sys.excepthook(*sys.exc_info())
sys.exit({MAY_COME_BACK})
"""


class Pump:
    """Carries bytes between a TLS connection and two descriptors, both ways, and never blocks.

    All three are non-blocking. For one thread.
    """

    def __init__(self, connection: ssl.SSLSocket, source: int, sink: int) -> None:
        """Takes over the connection, not the descriptors.

        Args:
            connection: Its handshake is done.
            source: What is read there is sent.
            sink: What is received is written there.
        """
        self.connection = connection
        self._source = source
        self._sink = sink
        self._to_send = b""
        self._to_write = b""
        #: Whether nothing more comes from the source.
        self.is_drained = False
        #: Whether either side has ended: nothing more can be carried.
        self.is_over = False

    def move(self) -> "dict[int, int]":
        """Carries what can be carried; returns which events to wait for, by descriptor."""
        waits: dict[int, int] = {}
        try:
            for _ in range(_MOST_MOVES):
                waits.clear()
                sends, receives = self._send(waits), self._receive(waits)
                if self.is_over or not (sends or receives):
                    break
            else:
                # What is already decrypted shows on no descriptor but this one, which can take it.
                _add(waits, self._sink, selectors.EVENT_WRITE)
                if self._to_send:
                    _add(waits, self.connection.fileno(), selectors.EVENT_WRITE)
                else:
                    _add(waits, self._source, selectors.EVENT_READ)
        except OSError:  # of the connection, or of a sink without a reader
            self.is_over = True
        return {} if self.is_over else waits

    def _send(self, waits: "dict[int, int]") -> bool:
        """Moves a piece from the source to the connection; returns whether there may be more."""
        if not self._to_send:
            if self.is_drained:
                return False
            try:
                self._to_send = os.read(self._source, _PIECE_BYTES)
            except BlockingIOError:
                _add(waits, self._source, selectors.EVENT_READ)
                return False
            except OSError:
                self._to_send = b""
            if not self._to_send:
                self.is_drained = self.is_over = True
                return False
        try:
            sent = self.connection.send(self._to_send)
        except ssl.SSLWantReadError:
            _add(waits, self.connection.fileno(), selectors.EVENT_READ)
            return False
        except ssl.SSLWantWriteError:
            _add(waits, self.connection.fileno(), selectors.EVENT_WRITE)
            return False
        self._to_send = self._to_send[sent:]
        return True

    def _receive(self, waits: "dict[int, int]") -> bool:
        """Moves a piece from the connection to the sink; returns whether there may be more."""
        if not self._to_write:
            try:
                self._to_write = self.connection.recv(_PIECE_BYTES)
            except ssl.SSLWantReadError:
                _add(waits, self.connection.fileno(), selectors.EVENT_READ)
                return False
            except ssl.SSLWantWriteError:
                _add(waits, self.connection.fileno(), selectors.EVENT_WRITE)
                return False
            if not self._to_write:
                self.is_over = True
                return False
        try:
            written = os.write(self._sink, self._to_write)
        except BlockingIOError:
            _add(waits, self._sink, selectors.EVENT_WRITE)
            return False
        self._to_write = self._to_write[written:]
        return True


def _add(waits: "dict[int, int]", descriptor: int, event: int) -> None:
    waits[descriptor] = waits.get(descriptor, 0) | event


def _wait_for(waits: "dict[int, int]") -> None:
    """Waits until one of the events has come."""
    with selectors.DefaultSelector() as selector:
        for descriptor, events in waits.items():
            selector.register(descriptor, events)
        selector.select()


def main(loader: str) -> None:
    """Runs in the pod; the process ends with it.

    Args:
        loader: Program for an interpreter that reads its true program from its input.
    """
    signal.signal(signal.SIGTERM, _leave)
    context = _context(Path(__file__).parent)
    give_up_at = time.monotonic() + float(os.environ["LAUNCHPAD_WAIT_S"])
    connection = _dial(os.environ["LAUNCHPAD_SUPERVISOR"], context, give_up_at)
    greeting = {
        # A pod that shares the network of its machine has that one's name.
        "host": os.environ.get("LAUNCHPAD_HOST") or socket.gethostname(),
        "pod": os.environ.get("LAUNCHPAD_POD", ""),
        "node": os.environ.get("LAUNCHPAD_NODE", ""),
    }
    try:
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        agent = subprocess.Popen(
            [sys.executable, "-c", _AGENT, loader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
    except OSError as error:  # the supervisor has just gone, or the machine has no room
        sys.stderr.write(f"launchpad: the pod cannot begin its work: {error}\n")
        sys.exit(MAY_COME_BACK)
    sys.exit(_carry(connection, agent))


def _leave(signum: int, frame: "FrameType | None") -> None:  # noqa: ARG001 - as Python calls it
    # As process 1 it would ignore signals without a handler.
    sys.exit(MAY_COME_BACK)


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority is the run's own: who has a certificate of it belongs to the run.
    context.check_hostname = False
    context.load_verify_locations(str(folder / "authority.pem"))
    context.load_cert_chain(str(folder / "certificate.pem"), str(folder / "key.pem"))
    return context


def _dial(address: str, context: ssl.SSLContext, give_up_at: float) -> ssl.SSLSocket:
    """Connects as soon as the supervisor is there."""
    host, _, port = address.rpartition(":")
    pauses = list(_PAUSES_S)
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as plain:
                connection = context.wrap_socket(plain)
        except OSError as error:
            if time.monotonic() > give_up_at:
                sys.stderr.write(f"launchpad: the supervisor, {address}, is not there: {error}\n")
                sys.exit(_FOR_GOOD)
            time.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Nothing is said until all pods have come: a supervisor whose machine is lost meanwhile
            # would be waited for without end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return connection


def _carry(connection: ssl.SSLSocket, agent: "subprocess.Popen[bytes]") -> int:
    """Is the link of the agent, until either ends; returns the exit code of the pod."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    connection.setblocking(False)
    source, sink = agent.stdout.fileno(), agent.stdin.fileno()
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    # The agent passes it on to its nodes, as a notice.
    signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
    pump = Pump(connection, source, sink)
    while not pump.is_over:
        waits = pump.move()
        if waits:
            _wait_for(waits)
    with contextlib.suppress(OSError):
        if pump.is_drained:
            _part(connection)
        connection.close()
    # To the agent, the end of its input is the end of all.
    agent.stdin.close()
    try:
        code = agent.wait(_END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
        return MAY_COME_BACK
    return code if code >= 0 else 128 - code


def _part(connection: ssl.SSLSocket, within_s: float = _PART_S) -> None:
    """Ends a connection once the other end has taken in all that was sent.

    One that is closed while there is something to read takes back what is still on its way.
    """
    give_up_at = time.monotonic() + within_s
    with socket.socket(fileno=connection.detach()) as plain:
        plain.shutdown(socket.SHUT_WR)
        while (left_s := give_up_at - time.monotonic()) > 0:
            plain.settimeout(left_s)
            if not plain.recv(_PIECE_BYTES):
                break
