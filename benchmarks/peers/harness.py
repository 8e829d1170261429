"""What all peers share: the handlers they serve, and the roles of their processes.

A peer is a script beside this file. It runs in its own environment as a server, as a client, or as
a starter of many servers, and talks to the driver in JSON lines over stdin and stdout. Nothing here
may need more than Python and numpy. A server loads neither numpy before it is called nor what only
clients need: that would count as the peer's.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

PAYLOAD = b"sixteen bytes..."
#: How many handlers a server runs at a time.
THREADS = 16
_PAGE_BYTES = 4096
#: An array that takes longer is not sent again: there, what the first one has to do does not count.
_SLOW_S = 5.0


class UnsupportedError(Exception):
    """The peer has no such feature."""


@dataclass(frozen=True)
class Setup:
    """What the driver tells a process before it begins."""

    scratch: str
    secret: str
    host: str = "127.0.0.1"
    #: Folder of certificate.pem, key.pem and authority.pem; None means no TLS.
    tls: str | None = None
    #: Where the server is, for clients.
    address: Any = None
    #: How many servers a starter starts.
    nodes: int = 1

    def pem(self, name: str) -> bytes:
        """Returns one of the files for TLS."""
        assert self.tls is not None
        return (Path(self.tls) / f"{name}.pem").read_bytes()


def random_array(size: int) -> Any:
    """Returns `size` bytes that cannot be compressed."""
    import numpy as np

    return np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8).copy()


def touch(array: Any) -> int:
    """Reads a byte of every page, so that no peer is fast because it does not deliver."""
    return int(array[::_PAGE_BYTES].sum())


class Handlers:
    """What each peer serves."""

    def __init__(self, share: Callable[[Any], Any] | None = None) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._weights: Any = None
        self._version = -1
        self._shared: Any = None

    def echo(self, value: bytes) -> bytes:
        """Returns its argument."""
        return value

    def echo_array(self, array: Any) -> Any:
        """Returns its argument, which it has read."""
        touch(array)
        return array

    def prepare(self, size: int) -> None:
        """Makes what `snapshot` and `shared` return."""
        self._weights = random_array(size)

    def snapshot(self, version: int) -> Any:
        """Returns an array that many read."""
        with self._lock:
            self._change(version)
        return self._weights

    def shared(self, version: int) -> Any:
        """Returns the array so that it is serialised once per version."""
        assert self._share is not None
        with self._lock:
            if self._change(version):
                self._shared = self._share(self._weights)
            return self._shared

    def _change(self, version: int) -> bool:
        # Every version differs, so that what readers got for another one is seen to be wrong.
        if version == self._version:
            return False
        self._version = version
        self._weights[::_PAGE_BYTES] += 1
        return True

    def burn(self, seconds: float) -> None:
        """Computes in pure Python for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


class BytesHandlers(Handlers):
    """For peers that carry bytes, not arrays."""

    def echo_array(self, array: bytes) -> bytes:
        """Returns its argument, which it has read."""
        return bytes(super().echo_array(to_array(array)).tobytes())

    def snapshot(self, version: int) -> bytes:
        """Returns an array that many read."""
        return bytes(super().snapshot(version).tobytes())


def to_array(data: Any) -> Any:
    """Returns bytes as an array, without a copy."""
    import numpy as np

    return np.frombuffer(data, np.uint8)


class Peer:
    """One way of calling `Handlers` in another process."""

    handlers: type[Handlers] = Handlers
    can_share = False

    def serve(self, setup: Setup) -> Any:
        """Starts the server in this process; returns what `connect` needs."""
        raise NotImplementedError

    def connect(self, setup: Setup) -> None:
        """Connects this process to the server."""
        raise NotImplementedError

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a handler as a function that blocks."""
        raise NotImplementedError

    def later(self, _name: str) -> Callable[..., Any]:
        """Returns a handler as a function that returns a future."""
        raise UnsupportedError("no futures")

    def collect(self, futures: list[Any]) -> None:
        """Waits for the results of futures."""
        for future in futures:
            future.result()

    def pipeline(self, calls: int) -> None:
        """Makes so many calls at once and waits for all."""
        echo = self.later("echo")
        self.collect([echo(PAYLOAD) for _ in range(calls)])

    def open_shared(self, value: Any) -> Any:
        """Returns the array in what `shared` returned."""
        return value

    def close(self) -> None:
        """Ends what would outlive this process."""

    @contextlib.contextmanager
    def started(self, setup: Setup) -> Iterator[None]:
        """Starts `setup.nodes` servers, each in its own process, and calls each once."""
        import subprocess

        command = [sys.executable, sys.argv[0], "server"]
        servers = []
        for index in range(setup.nodes):
            scratch = Path(setup.scratch) / str(index)
            scratch.mkdir()
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            servers.append((server, replace(setup, scratch=str(scratch))))
            assert server.stdin is not None
            _write(server.stdin, asdict(servers[-1][1]))
        clients = []
        try:
            for server, its_setup in servers:
                assert server.stdout is not None
                address = json.loads(server.stdout.readline())["value"]
                client = type(self)()
                client.connect(replace(its_setup, address=address))
                assert client.method("echo")(PAYLOAD) == PAYLOAD
                clients.append(client)
            yield
        finally:
            for server, _ in servers:
                server.kill()
                server.wait()


class BytesPeer(Peer):
    """One that carries bytes: arrays are copied into them and looked at in them."""

    handlers = BytesHandlers

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a handler as a function that blocks."""
        call = self.bytes_method(name)
        if name == "echo_array":
            return lambda array: to_array(call(array.tobytes()))
        if name == "snapshot":
            return lambda version: to_array(call(version))
        return call

    def bytes_method(self, name: str) -> Callable[..., Any]:
        """Returns a handler that takes and returns bytes."""
        raise NotImplementedError


def encode(argument: bytes | float) -> bytes:
    """Writes an argument of a handler, for peers that have no serialisation at all."""
    return argument if isinstance(argument, bytes) else json.dumps(argument).encode()


def handle_bytes(handlers: BytesHandlers, name: str, argument: Any) -> Any:
    """Calls a handler with an argument that `encode` wrote."""
    if not name.startswith("echo"):
        argument = json.loads(bytes(argument))
    result = getattr(handlers, name)(argument)
    return b"" if result is None else result


@dataclass
class Client:
    """What the driver may ask a client to do; each method is one command."""

    peer: Peer
    _held: Any = field(default=None)

    def warm(self, calls: int) -> None:
        """Calls."""
        echo = self.peer.method("echo")
        for _ in range(calls):
            assert echo(PAYLOAD) == PAYLOAD

    def latencies(self, calls: int, limit_s: float) -> tuple[float, float, int]:
        """Returns the median and the 99th percentile of blocking calls, in seconds, and their number.

        Once the limit is over, no further call begins.
        """
        import statistics

        echo = self.peer.method("echo")
        took = []
        until = time.perf_counter() + limit_s
        while len(took) < calls and (started_at := time.perf_counter()) < until:
            echo(PAYLOAD)
            took.append(time.perf_counter() - started_at)
        return statistics.median(took), statistics.quantiles(took, n=100)[98], len(took)

    def paced(self, calls: int, pause_s: float) -> float:
        """Returns the median of blocking calls with pauses between them, in seconds."""
        import statistics

        echo = self.peer.method("echo")
        took = []
        for _ in range(calls):
            time.sleep(pause_s)
            started_at = time.perf_counter()
            echo(PAYLOAD)
            took.append(time.perf_counter() - started_at)
        return statistics.median(took)

    def pipeline(self, calls: int, repetitions: int) -> float:
        """Returns how many calls a second are answered when so many are in flight."""
        self.peer.pipeline(calls)
        started_at = time.perf_counter()
        for _ in range(repetitions):
            self.peer.pipeline(calls)
        return calls * repetitions / (time.perf_counter() - started_at)

    def count(self, start_at: float, seconds: float) -> int:
        """Returns how many calls are answered one after the other from a moment on."""
        echo = self.peer.method("echo")
        time.sleep(max(0.0, start_at - time.monotonic()))
        calls = 0
        while time.monotonic() < start_at + seconds:
            echo(PAYLOAD)
            calls += 1
        return calls

    def arrays(self, size: int, repetitions: int, limit_s: float) -> float:
        """Returns the median seconds until an array is back.

        Once the limit is over, no further array is sent.
        """
        import statistics

        echo = self.peer.method("echo_array")
        array = random_array(size)
        started_at = time.perf_counter()
        returned = echo(array)
        first_s = time.perf_counter() - started_at
        assert returned.nbytes == size
        assert (returned == array).all()
        if first_s > _SLOW_S:
            return first_s
        took: list[float] = []
        while not took or (len(took) < repetitions and sum(took) < limit_s):
            # An answer must not find its memory still in use by the one before.
            del returned
            started_at = time.perf_counter()
            returned = echo(array)
            touch(returned)
            took.append(time.perf_counter() - started_at)
        return statistics.median(took)

    def prepare(self, size: int) -> None:
        """Makes the server make what is read by `read`."""
        self.peer.method("prepare")(size)

    def read(self, shared: bool, version: int, start_at: float) -> tuple[float, int]:
        """Reads the array of the server and keeps it; returns when it was there, and a checksum."""
        if shared and not self.peer.can_share:
            raise UnsupportedError("no values serialised once for all readers")
        self._held = None
        read = self.peer.method("shared" if shared else "snapshot")
        time.sleep(max(0.0, start_at - time.monotonic()))
        self._held = read(version)
        if shared:
            self._held = self.peer.open_shared(self._held)
        checksum = touch(self._held)
        return time.monotonic(), checksum

    def burn(self, seconds: float) -> None:
        """Makes a handler of the server burn CPU."""
        self.peer.method("burn")(seconds)


def main(peer: Peer, client_type: type[Client] = Client) -> None:
    """Plays the role that the command line names."""
    answers = open_answers()
    setup = Setup(**json.loads(sys.stdin.readline()))
    role = sys.argv[1]
    if role in {"server", "client"}:
        begin = peer.serve if role == "server" else peer.connect
        answer(answers, lambda: begin(setup))
        client = client_type(peer)
        for line in sys.stdin:
            command = json.loads(line)
            method = getattr(client, command.pop("do"))
            answer(answers, lambda method=method, command=command: method(**command))
    elif role == "starter":
        with contextlib.ExitStack() as stack:
            answer(answers, lambda: stack.enter_context(peer.started(setup)))
            sys.stdin.read()
    peer.close()
    # Threads of servers and connections of clients do not keep the process.
    os._exit(0)


def open_answers() -> TextIO:
    """Returns where answers go: libraries may print, and the driver must read nothing but answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, work: Callable[[], Any]) -> None:
    """Does some work, and tells the driver what came of it."""
    try:
        result = {"value": work()}
    except UnsupportedError as error:
        result = {"unsupported": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        result = {"error": f"{type(error).__name__}: {error}"}
    _write(answers, result)


def _write(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
