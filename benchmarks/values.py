"""Updates of one value by many workers: the parameter server, and what else one might take.

    python -m benchmarks.values --rounds=3 --write

Peers take turns. Each is a process that starts a server and workers, which update one value without
a barrier, as fast as they can. With `--write` the table goes to docs/benchmarks.md.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.processes import PeerError, Process, adopt_orphans, end_orphans
from benchmarks.report import versions

PEERS = (
    Peer(
        "parameter_server",
        "`engines.ParameterServer`",
        ("--editable", str(ROOT), "numpy"),
        "launchpad-lite",
    ),
    Peer(
        "ray_values", "Ray", ("ray", "numpy"), "ray", environment={"RAY_USAGE_STATS_ENABLED": "0"}
    ),
    Peer("torch_rpc", "`torch.distributed.rpc`", ("torch", "numpy"), "torch"),
)
_SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
_WARM_S = 2.0
_TIMEOUT_S = 120.0

#: Of a peer and a size: updates per second of each round, or why there are none.
Results = dict[tuple[str, str], list[float | str]]


def measure(installed: Installed, folder: Path, workers: int, size: int, seconds: float) -> float:
    """Returns how many updates a peer applies per second.

    Raises:
        PeerError: None.
    """
    command = [str(installed.interpreter), str(installed.peer.script)]
    process = Process(command, installed.variables, {}, folder / f"{installed.peer.name}.log")
    try:
        process.ask("start", _TIMEOUT_S, workers=workers, size=size)
        process.ask("warm", _TIMEOUT_S, seconds=_WARM_S)
        rate: float = process.ask("measure", _TIMEOUT_S, seconds=seconds)
        return rate
    finally:
        process.end()
        end_orphans()


def table(peers: Sequence[Peer], results: Results, absent: Mapping[str, str]) -> str:
    """Returns medians as Markdown, each with its ratio to the first peer."""
    titles = list(_SIZES)
    lines = [f"| | {' | '.join(titles)} |", "| --- |" + " --: |" * len(titles)]
    first: dict[str, float] = {}
    for peer in peers:
        if peer.name in absent:
            lines.append(f"| {peer.title} | absent: {absent[peer.name]} |" + " |" * len(titles[1:]))
            continue
        cells = []
        for title, size in _SIZES.items():
            values = results[peer.name, title]
            rates = [value for value in values if isinstance(value, float)]
            if not rates:
                cells.append(str(values[-1]))
                continue
            median = statistics.median(rates)
            ratio = median / first.setdefault(title, median)
            cells.append(f"{median:,.0f}/s, {median * size / 2**20:,.1f} MiB/s ({ratio:.2f})")
        lines.append(f"| {peer.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args()
    adopt_orphans()
    peers = [peer for peer in PEERS if peer.name in chosen.peers]
    installed, absent = install_all(peers)
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="values-") as folder:
        for _ in range(chosen.rounds):
            for title, size in _SIZES.items():
                for one in installed:
                    result: float | str
                    try:
                        result = measure(one, Path(folder), chosen.workers, size, chosen.seconds)
                    except PeerError as error:
                        result = str(error)
                    print(one.peer.name, title, result, flush=True)
                    results.setdefault((one.peer.name, title), []).append(result)
    text = (
        f"One value, {chosen.workers} workers: updates per second, and MiB of updates, medians of "
        f"{chosen.rounds} rounds of {chosen.seconds:g} s. In brackets: times the first row. "
        f"{machine()}.\n\n{versions(installed)}\n{table(peers, results, absent)}"
    )
    print(text)
    if chosen.write:
        page.put("values", text)


if __name__ == "__main__":
    main()
