"""What is measured. A case runs one peer for one round; all its processes are new."""

import functools
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import Installed
from benchmarks.namespaces import Namespaces
from benchmarks.peers.harness import Setup
from benchmarks.processes import MemoryWatch, PeerError, Process, cpu_seconds, memory_mib

_START_TIMEOUT_S = 60.0
_TIMEOUT_S = 120.0
_KIB, _MIB = 1 << 10, 1 << 20
_READERS = 8
_CALLERS = 8
#: Until processes that were told to begin at a moment are ready to.
_SOON_S = 0.1
#: Between calls to a server that is busy.
_PAUSE_S = 0.003


@dataclass(frozen=True)
class Metric:
    """One row of the tables."""

    name: str
    title: str
    unit: str
    more_is_better: bool = False


@dataclass(frozen=True)
class Effort:
    """How much is done per round."""

    calls: int = 10_000
    #: No calls, and no arrays of a size, begin after so long.
    calls_s: float = 3.0
    arrays_s: float = 0.5
    in_flight: int = 1000
    batches: int = 5
    window_s: float = 1.0
    paced_calls: int = 100
    #: Bytes of an array, and how often it is sent.
    arrays: tuple[tuple[int, int], ...] = (
        (_KIB, 1000),
        (64 * _KIB, 500),
        (_MIB, 100),
        (64 * _MIB, 5),
        (256 * _MIB, 5),
    )
    broadcast: int = 64 * _MIB
    nodes: tuple[int, ...] = (1, 50)
    idle_s: float = 0.5


FULL = Effort()
QUICK = Effort(
    calls=1000,
    batches=1,
    window_s=0.3,
    paced_calls=50,
    arrays=((_KIB, 50), (64 * _KIB, 30), (_MIB, 10), (64 * _MIB, 1)),
    nodes=(1, 5),
    idle_s=0.3,
)


class Session:
    """The processes of one peer in one round of one case."""

    def __init__(
        self, installed: Installed, effort: Effort, namespaces: Namespaces | None = None
    ) -> None:
        self.effort = effort
        self._installed = installed
        self._namespaces = namespaces
        # Short: a path of a Unix socket has no more than 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="bench"))
        self._setup = Setup(str(self._scratch), secrets.token_hex(32))
        if namespaces is not None:
            self._setup = replace(
                self._setup, host=namespaces.server_host, tls=str(namespaces.certificates)
            )
        self._processes: list[Process] = []

    def start_server(self) -> Process:
        """Starts the server."""
        server = self._start("server", self._namespaces and self._namespaces.server)
        self._setup = replace(self._setup, address=server.answer(_START_TIMEOUT_S))
        return server

    def start_clients(self, count: int) -> list[Process]:
        """Starts clients, each a process that has called already."""
        where = self._namespaces and self._namespaces.client
        clients = [self._start("client", where) for _ in range(count)]
        for client in clients:
            client.answer(_START_TIMEOUT_S)
        for client in clients:
            client.begin("warm", calls=100)
        for client in clients:
            client.answer(_TIMEOUT_S)
        return clients

    def start_pair(self) -> tuple[Process, Process]:
        """Starts a server and one client."""
        server = self.start_server()
        (client,) = self.start_clients(1)
        return server, client

    def start_nodes(self, count: int) -> Process:
        """Starts a process that starts so many servers."""
        self._setup = replace(self._setup, nodes=count)
        return self._start("starter", None)

    def _start(self, role: str, prefix: Sequence[str] | None) -> Process:
        interpreter, script = self._installed.interpreter, self._installed.peer.script
        process = Process(
            [*(prefix or ()), str(interpreter), str(script), role],
            self._installed.variables,
            asdict(self._setup),
            self._scratch / "log",
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Ends all processes, clients first."""
        for process in reversed(self._processes):
            process.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Case:
    """Something to measure."""

    name: str
    metrics: tuple[Metric, ...]
    #: Yields values in the order of the metrics; all of them unless the effort is less than full.
    measure: Callable[[Session], Iterator[float]]
    tls: bool = False


def _echo(session: Session) -> Iterator[float]:
    pair = session.start_pair()
    effort = session.effort
    before_s = cpu_seconds(pair)
    median, slow, calls = pair[1].ask(
        "latencies", _TIMEOUT_S, calls=effort.calls, limit_s=effort.calls_s
    )
    yield median * 1e6
    yield slow * 1e6
    yield (cpu_seconds(pair) - before_s) * 10_000 / calls


def _pipelined(session: Session) -> Iterator[float]:
    _, client = session.start_pair()
    effort = session.effort
    yield client.ask("pipeline", _TIMEOUT_S, calls=effort.in_flight, repetitions=effort.batches)


def _fan_in(session: Session) -> Iterator[float]:
    session.start_server()
    clients = session.start_clients(_CALLERS)
    window_s = session.effort.window_s
    start_at = time.monotonic() + _SOON_S
    calls = _ask_all(clients, "count", start_at=start_at, seconds=window_s)
    yield sum(calls) / window_s


def _arrays(session: Session) -> Iterator[float]:
    _, client = session.start_pair()
    limit_s = session.effort.arrays_s
    for size, repetitions in session.effort.arrays:
        seconds = client.ask(
            "arrays", _TIMEOUT_S, size=size, repetitions=repetitions, limit_s=limit_s
        )
        yield size / _MIB / seconds


def _broadcast(session: Session, shared: bool) -> Iterator[float]:
    server = session.start_server()
    clients = session.start_clients(_READERS)
    clients[0].ask("prepare", _TIMEOUT_S, size=session.effort.broadcast)
    watch = MemoryWatch([server, *clients])
    before_mib = watch.sample()
    with watch.running():
        _, first = _read(clients, shared, version=0)
    watch.sample()
    # Looking at memory takes time, so it is not done while time is measured.
    took_s, second = _read(clients, shared, version=1)
    if len(first) > 1 or len(second) > 1 or first == second:
        raise PeerError("readers got a wrong array")
    yield took_s * 1e3
    yield watch.peak_mib
    yield watch.peak_mib - before_mib


def _read(clients: Sequence[Process], shared: bool, version: int) -> tuple[float, set[int]]:
    """Returns the seconds until the last reader has the array, and all checksums they found."""
    start_at = time.monotonic() + _SOON_S
    reads = _ask_all(clients, "read", shared=shared, version=version, start_at=start_at)
    return max(arrived_at for arrived_at, _ in reads) - start_at, {found for _, found in reads}


def _idle_memory(session: Session) -> Iterator[float]:
    server = session.start_server()
    time.sleep(session.effort.idle_s)
    yield memory_mib(server.family())


def _start(session: Session, index: int) -> Iterator[float]:
    started_at = time.monotonic()
    starter = session.start_nodes(session.effort.nodes[index])
    starter.answer(_TIMEOUT_S)
    yield time.monotonic() - started_at


def _burdened(session: Session) -> Iterator[float]:
    session.start_server()
    client, burner = session.start_clients(2)
    # Without pauses the fast calls of a lucky moment would outnumber all others.
    paced = {"calls": session.effort.paced_calls, "pause_s": _PAUSE_S}
    free_s = client.ask("paced", _TIMEOUT_S, **paced)
    burner.begin("burn", seconds=_TIMEOUT_S)
    time.sleep(_SOON_S)
    burdened_s = client.ask("paced", _TIMEOUT_S, **paced)
    yield (burdened_s - free_s) * 1e3


def _ask_all(clients: Sequence[Process], do: str, **arguments: Any) -> list[Any]:
    for client in clients:
        client.begin(do, **arguments)
    return [client.answer(_TIMEOUT_S) for client in clients]


_SIZES = ("1 KiB", "64 KiB", "1 MiB", "64 MiB", "256 MiB")


def _remote_cases(tls: bool) -> tuple[Case, ...]:
    """Returns the cases that make sense over a network, too."""
    prefix = "tls-" if tls else ""
    return (
        Case(
            f"{prefix}echo",
            (
                Metric(f"{prefix}echo-p50", "blocking echo, median", "µs"),
                Metric(f"{prefix}echo-p99", "blocking echo, 99th percentile", "µs"),
                Metric(f"{prefix}cpu", "CPU per 10,000 calls", "s"),
            ),
            _echo,
            tls,
        ),
        Case(
            f"{prefix}pipelined",
            (Metric(f"{prefix}pipelined", "futures, 1,000 in flight", "calls/s", True),),
            _pipelined,
            tls,
        ),
        Case(
            f"{prefix}arrays",
            tuple(
                Metric(f"{prefix}array-{size.replace(' ', '')}", f"array of {size}", "MiB/s", True)
                for size in _SIZES
            ),
            _arrays,
            tls,
        ),
    )


def _broadcast_case(shared: bool) -> Case:
    name, title = "broadcast", "64 MiB to 8 readers"
    if shared:
        name, title = "shared", "the same, shared"
    return Case(
        name,
        (
            Metric(f"{name}-time", f"{title}, time", "ms"),
            Metric(f"{name}-memory", f"{title}, peak memory", "MiB"),
            Metric(f"{name}-added", f"{title}, of it added", "MiB"),
        ),
        functools.partial(_broadcast, shared=shared),
    )


CASES = (
    *_remote_cases(tls=False),
    Case("fan-in", (Metric("fan-in", "8 clients, blocking", "calls/s", True),), _fan_in),
    _broadcast_case(shared=False),
    _broadcast_case(shared=True),
    Case("memory", (Metric("memory", "idle server, memory", "MiB"),), _idle_memory),
    Case(
        "start-1", (Metric("start-1", "start of 1 node", "s"),), functools.partial(_start, index=0)
    ),
    Case(
        "start-50",
        (Metric("start-50", "start of 50 nodes", "s"),),
        functools.partial(_start, index=1),
    ),
    Case("burdened", (Metric("burdened", "busy handler, median added", "ms"),), _burdened),
    *_remote_cases(tls=True),
)
