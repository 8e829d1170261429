"""The sum of arrays that processes of one machine have, in each of them: ours, and what else there is.

    python -m benchmarks.all_reduce --rounds=3 --write

All peers are started, then they take turns, in each round and for each size; those that wait sleep.
A time is that of the slowest process. With `--write` the tables go to docs/benchmarks.md.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
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
_KIB = 1 << 10
_TIMEOUT_S = 180.0
#: How long one measurement is to take, and how many calls it has at most and at least.
_BUDGET_S, _MOST, _LEAST = 0.3, 500, 3

#: By peer and size: seconds per call, of each round.
Results = dict[tuple[str, int], list[float]]


def start(installed: Sequence[Installed], folder: Path, workers: int) -> dict[str, Process]:
    """Starts what can be started, so that it waits."""
    processes = {}
    for one in installed:
        command = [str(one.interpreter), str(one.peer.script)]
        process = Process(command, one.variables, {}, folder / f"{one.peer.name}.log")
        try:
            process.ask("start", _TIMEOUT_S, workers=workers)
        except PeerError as error:
            print(f"{one.peer.title}, {workers} processes: {error}", flush=True)
            process.end()
        else:
            processes[one.peer.name] = process
    return processes


def measure(process: Process, size: int) -> float:
    """Returns seconds per call.

    Raises:
        PeerError: There is no result.
    """
    process.ask("prepare", _TIMEOUT_S, size=size)
    once: float = process.ask("measure", _TIMEOUT_S, calls=1)
    calls = max(_LEAST, min(_MOST, int(_BUDGET_S / max(once, 1e-6))))
    took: float = process.ask("measure", _TIMEOUT_S, calls=calls)
    process.ask("prepare", _TIMEOUT_S, size=0)
    return took


def run(installed: Sequence[Installed], workers: int, sizes: Sequence[int], rounds: int) -> Results:
    """Measures all peers with so many processes."""
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as folder:
        processes = start(installed, Path(folder), workers)
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


def _cell(own: Sequence[float], first: Sequence[float] | None) -> str:
    median = statistics.median(own)
    text = f"{median * 1e3:,.1f} ms" if median >= 0.01 else f"{median * 1e6:,.0f} µs"
    return text + (f" ({median / statistics.median(first):.2f})" if first else "")


def _title(size: int) -> str:
    return f"{size // _KIB} KiB" if size < _KIB**2 else f"{size // _KIB**2} MiB"


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=4)
    parser.set_defaults(workers=None)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    sizes = [4 * _KIB, 64 * _KIB, _KIB**2, 16 * _KIB**2, 64 * _KIB**2, 256 * _KIB**2]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="in bytes")
    chosen = parser.parse_args()
    adopt_orphans()
    peers = [peer for peer in PEERS if peer.name in chosen.peers]
    installed, absent = install_all(peers)
    caption = (
        "How long it takes until each process has the sum of all arrays of float32, medians of "
        f"{chosen.rounds} rounds. In brackets: times the first row. {machine()}."
    )
    parts = [caption, versions(installed).rstrip()]
    for workers in chosen.processes:
        results = run(installed, workers, chosen.sizes, chosen.rounds)
        parts.append(f"{workers} processes:\n\n{table(peers, absent, results, chosen.sizes)}")
        print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    print(text)
    if chosen.write:
        page.put("all_reduce", text)


if __name__ == "__main__":
    main()
