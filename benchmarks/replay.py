"""Replay buffers: transitions that actors insert and a learner samples, per second.

    python -m benchmarks.replay --rounds=3 --write

Transitions are two frames of 84x84x4 uint8 that cannot be compressed, an action and a reward. Peers
take turns. Each measures inserts, then samples, with its server in another process. With `--write`
the table goes to docs/benchmarks.md.
"""

import json
import secrets
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from operator import truediv
from pathlib import Path

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.processes import adopt_orphans, end_orphans
from benchmarks.report import versions

PEERS = (
    Peer("replay", "`rollouts.ReplayNode`", ("--editable", str(ROOT), "numpy"), "launchpad-lite"),
    Peer(
        "reverb_replay",
        "Reverb",
        ("dm-reverb[tensorflow]==0.14.0", "tensorflow==2.15.*", "numpy<2"),
        "dm-reverb",
        python="3.11",
    ),
    Peer("manager_replay", "list of a manager", ("numpy",)),
)
_CASES = (
    (
        "uniform",
        ("inserts, 32 at once", "inserts, singly", "samples", "samples, 2 ms of work each"),
    ),
    (
        "prioritized",
        (
            "prioritized: inserts, 32 at once",
            "prioritized: inserts, singly",
            "prioritized: samples",
            "prioritized: samples, 2 ms of work each",
        ),
    ),
)
_TIMEOUT_S = 180.0

#: What a round gave of a peer: items per second of each case, and µs of CPU of each item.
Round = list[tuple[float, float]]
#: By peer and sampler.
Results = dict[tuple[str, str], list[Round]]


def measure(installed: Installed, sampler: str, seconds: float) -> Round:
    """Runs a peer once."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        result = Path(folder, "result")
        command = [str(installed.interpreter), str(installed.peer.script)]
        try:
            subprocess.run(
                [*command, sampler, str(seconds), str(result)],
                check=True,
                timeout=_TIMEOUT_S,
                env={**installed.variables, "REPLAY_PEER": secrets.token_hex(8)},
                capture_output=True,
            )
        finally:
            end_orphans()
        return [(per_s, cpu_us) for per_s, cpu_us in json.loads(result.read_text())]


def table(peers: Sequence[Peer], results: Results, absent: Mapping[str, str]) -> str:
    """Returns medians as Markdown, each with the median of its ratios to the first peer."""
    here = [peer for peer in peers if peer.name not in absent]
    lines = [f"| | {' | '.join(peer.title for peer in here)} |", "| --- |" + " --: |" * len(here)]
    for sampler, titles in _CASES:
        for number, title in enumerate(titles):
            cells = []
            for peer in here:
                texts = []
                for place, unit in enumerate(("/s", " µs")):
                    values, first = (
                        [each[number][place] for each in results.get((name, sampler), [])]
                        for name in (peer.name, here[0].name)
                    )
                    if values:
                        ratio = statistics.median(map(truediv, values, first))
                        texts.append(f"{statistics.median(values):,.0f}{unit} ({ratio:.2f})")
                cells.append(", ".join(texts))
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{name} is absent: {why}" for name, why in absent.items())])


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    chosen = parser.parse_args()
    adopt_orphans()
    peers = [peer for peer in PEERS if peer.name in chosen.peers]
    installed, absent = install_all(peers)
    results: Results = {}
    for _ in range(chosen.rounds):
        for sampler, _ in _CASES:
            for one in installed:
                if (one.peer.name, sampler) != ("manager_replay", "prioritized"):
                    rates = measure(one, sampler, chosen.seconds)
                    print(one.peer.name, sampler, *rates, flush=True)
                    results.setdefault((one.peer.name, sampler), []).append(rates)
    text = (
        f"Transitions per second, and CPU of each in all processes; medians of {chosen.rounds} rounds of "
        f"{chosen.seconds:g} s. In brackets: times the first column. {machine()}.\n\n{versions(installed)}\n{table(peers, results, absent)}"
    )
    print(text)
    if chosen.write:
        page.put("replay", text)


if __name__ == "__main__":
    main()
