"""The sum of arrays that processes have, in each of them: ours, and what else there is.

    python -m benchmarks.all_reduce --rounds=3 --write
    python -m benchmarks.all_reduce --rounds=3 --hosts --write

The processes are on one machine; or two, each in a network namespace of its own, as on hosts.

All peers are started, then they take turns, in each round and for each size; those that wait sleep.
A time is that of the slowest process. With `--write` the tables go to docs/benchmarks.md.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.namespaces import Namespaces
from benchmarks.processes import PeerError, Process, adopt_orphans, end_orphans
from benchmarks.report import versions

_OURS = ("--editable", str(ROOT), "numpy")
PEERS = (
    Peer("carrier_reductions", "replicas, in buffers", _OURS, "launchpad-lite"),
    Peer("plain_reductions", "replicas, other arrays", _OURS, "launchpad-lite"),
    Peer("apart_reductions", "replicas, no shared memory", _OURS, "launchpad-lite"),
    Peer("gloo_reductions", "PyTorch, gloo", ("torch", "numpy"), "torch"),
    Peer("mpi_reductions", "mpi4py, Open MPI", ("mpi4py", "openmpi", "numpy"), "mpi4py"),
    Peer(
        "ray_reductions",
        "Ray's collective",
        ("ray", "torch", "numpy"),
        "ray",
        environment={"RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Peer("copy_reductions", "a copy in each process", ("numpy",)),
)
#: Between hosts: the peers, and of those with TLS.
HOST_PEERS = (PEERS[3], PEERS[2], Peer("ring_reductions", "a ring of bare sockets", ("numpy",)))
_KIB = 1 << 10
_TIMEOUT_S = 180.0
#: How long one measurement is to take, and how many calls it has at most and at least.
_BUDGET_S, _MOST, _LEAST = 0.3, 500, 3

#: The command and the variables of the process on each host.
Hosts = Sequence[tuple[Sequence[str], dict[str, str]]]
#: By peer and size: seconds and page faults per call, of each round.
Results = dict[tuple[str, int], list[tuple[float, float]]]


def start(
    installed: Sequence[Installed], folder: Path, workers: int, hosts: Hosts = ()
) -> dict[str, Process]:
    """Starts what can be started, so that it waits."""
    processes = {}
    for one in installed:
        command = [str(one.interpreter), str(one.peer.script)]
        process = Process(command, one.variables, {"hosts": hosts}, folder / f"{one.peer.name}.log")
        try:
            process.ask("start", _TIMEOUT_S, workers=workers)
        except PeerError as error:
            print(f"{one.peer.title}, {workers} processes: {error}", flush=True)
            process.end()
        else:
            processes[one.peer.name] = process
    return processes


def measure(process: Process, size: int) -> tuple[float, float]:
    """Returns seconds and page faults per call.

    Raises:
        PeerError: There is no result.
    """
    process.ask("prepare", _TIMEOUT_S, size=size)
    once, _ = process.ask("measure", _TIMEOUT_S, calls=1)
    calls = max(_LEAST, min(_MOST, int(_BUDGET_S / max(once, 1e-6))))
    took, faults = process.ask("measure", _TIMEOUT_S, calls=calls)
    process.ask("prepare", _TIMEOUT_S, size=0)
    return took, faults


def run(
    installed: Sequence[Installed],
    workers: int,
    sizes: Sequence[int],
    rounds: int,
    hosts: Hosts = (),
) -> Results:
    """Measures all peers with so many processes."""
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as folder:
        processes = start(installed, Path(folder), workers, hosts)
        try:
            for size in sizes:
                for _ in range(rounds):
                    for name, process in processes.items():
                        try:
                            results.setdefault((name, size), []).append(measure(process, size))
                        except PeerError as error:
                            print(f"{name}, {workers} processes, {size} bytes: {error}", flush=True)
        finally:
            for process in processes.values():
                process.end()
            end_orphans()
    return results


def table(
    peers: Sequence[Peer], absent: dict[str, str], results: Results, sizes: Sequence[int]
) -> str:
    """Returns medians as Markdown, each with its ratio to the first peer."""
    lines = [f"| | {' | '.join(map(_title, sizes))} |", "| --- |" + " --: |" * len(sizes)]
    for peer in peers:
        if peer.name in absent:
            lines.append(f"| {peer.title} | absent: {absent[peer.name]} |" + " |" * len(sizes[1:]))
            continue
        cells = []
        for size in sizes:
            own, first = results.get((peer.name, size)), results.get((peers[0].name, size))
            cells.append(_cell(own, first) if own else "none")
        lines.append(f"| {peer.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(own: Sequence[tuple[float, float]], first: Sequence[tuple[float, float]] | None) -> str:
    median, faults = map(statistics.median, zip(*own, strict=True))
    text = f"{median * 1e3:,.1f} ms" if median >= 0.01 else f"{median * 1e6:,.0f} µs"
    ratio = f" ({median / statistics.median([each for each, _ in first]):.2f})" if first else ""
    return f"{text}{ratio}, {faults:,.0f}"


def _title(size: int) -> str:
    return f"{size // _KIB} KiB" if size < _KIB**2 else f"{size // _KIB**2} MiB"


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=4)
    parser.set_defaults(workers=None)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    sizes = [4 * _KIB, 64 * _KIB, _KIB**2, 16 * _KIB**2, 64 * _KIB**2, 256 * _KIB**2]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="in bytes")
    parser.add_argument("--hosts", action="store_true", help="two, as root, instead of one machine")
    chosen = parser.parse_args()
    adopt_orphans()
    peers = HOST_PEERS if chosen.hosts else [each for each in PEERS if each.name in chosen.peers]
    installed, absent = install_all(peers)
    caption = (
        "How long it takes until each process has the sum of all arrays of float32, medians of "
        f"{chosen.rounds} rounds. In brackets: times the first row. Behind it: page faults per sum "
        f"in one process. {machine()}."
    )
    parts = [caption, versions(installed).rstrip()]
    with contextlib.ExitStack() as stack:
        if chosen.hosts:
            namespaces = stack.enter_context(contextlib.closing(Namespaces()))
            ways = {
                "Two hosts": (2, _hosts(namespaces)),
                "Two hosts with TLS; gloo has none": (
                    2,
                    _hosts(namespaces, RANK_TLS=str(namespaces.certificates)),
                ),
            }
        else:
            ways = {f"{count} processes": (count, ()) for count in chosen.processes}
        for title, (workers, hosts) in ways.items():
            results = run(installed, workers, chosen.sizes, chosen.rounds, hosts)
            parts.append(f"{title}:\n\n{table(peers, absent, results, chosen.sizes)}")
            print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    print(text)
    if chosen.write:
        page.put("all_reduce_of_hosts" if chosen.hosts else "all_reduce", text)


def _hosts(namespaces: Namespaces, **variables: str) -> Hosts:
    return [
        (command, {"RANK_HOST": host, "RANK_INTERFACE": "wire", **variables})
        for host, command in namespaces.hosts
    ]


if __name__ == "__main__":
    main()
