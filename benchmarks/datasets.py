"""Word count and sorts on the map-reduce engine, and on what else one might take.

    python -m benchmarks.datasets --mib=1024 --rounds=3 --write

All peers get the same text, the same number of workers, and take turns. Each is a process that
starts its workers and then does one job after another. With `--write` the table goes to
docs/benchmarks.md.
"""

import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.processes import (
    HungError,
    MemoryWatch,
    PeerError,
    Process,
    UnsupportedError,
    adopt_orphans,
    end_orphans,
)
from benchmarks.report import versions

PEERS = (
    Peer("pool", "`Pool`, by hand"),
    Peer("sorted", "`sorted`, one process"),
    Peer("map_reduce", "`engines.MapReduce`", ("--editable", str(ROOT)), "launchpad-lite"),
    Peer("dask", "Dask bag", ("dask[bag]",), "dask"),
    Peer("spark", "PySpark", ("pyspark",), "pyspark"),
    Peer(
        "ray_data", "Ray Data", ("ray[data]",), "ray", environment={"RAY_USAGE_STATS_ENABLED": "0"}
    ),
)
_JOBS = ("start", "word_count", "sort", "sort_numbers")
_FILES = 8
_VOCABULARY = 50_000
_KEYS = 100_000


@dataclass
class Round:
    """What one round gave for a peer."""

    #: By job: seconds, or why there are none.
    seconds: dict[str, float | str] = field(default_factory=dict)
    #: By job: the most that all processes had.
    memory_mib: dict[str, float] = field(default_factory=dict)
    #: How many different words it has counted, and how many in all.
    counted: list[int] = field(default_factory=list)


def write_text(folder: Path, mib: int) -> None:
    """Writes lines of a random key and ten words; frequent words are much more frequent than others."""
    rng = random.Random(1)  # noqa: S311 - no secret
    letters = "etaoinshrdlucmfw"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 10))) for _ in range(_VOCABULARY)]
    weights = [1 / rank for rank in range(1, _VOCABULARY + 1)]
    for number in range(_FILES):
        left = mib * 2**20 // _FILES
        with (folder / f"{number}.txt").open("w") as file:
            while left > 0:
                chosen = rng.choices(words, weights, k=100_000)
                lines = [
                    f"{rng.randrange(_KEYS):08} {' '.join(chosen[start : start + 10])}\n"
                    for start in range(0, len(chosen), 10)
                ]
                left -= sum(map(len, lines))
                file.writelines(lines)


def measure(
    installed: Installed, folder: Path, workers: int, numbers: int, limit_s: float
) -> Round:
    """Runs all jobs once on a peer; one that does not end in time costs it only that job."""
    result = Round()
    jobs: Sequence[str] = _JOBS
    while jobs:
        jobs = _measure(installed, folder, workers, numbers, limit_s, jobs, result)
    return result


def _measure(
    installed: Installed,
    folder: Path,
    workers: int,
    numbers: int,
    limit_s: float,
    jobs: Sequence[str],
    result: Round,
) -> Sequence[str]:
    """Runs jobs in one process; returns those that need another one, because this one hangs."""
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=folder))
    files = f"{folder}/*.txt"
    command = [str(installed.interpreter), str(installed.peer.script)]
    process = Process(command, installed.variables, {}, folder / f"{installed.peer.name}.log")
    arguments: dict[str, dict[str, object]] = {
        "start": {"workers": workers, "scratch": str(scratch)},
        "word_count": {"files": files},
        "sort": {"files": files, "folder": str(scratch / "sorted")},
        "sort_numbers": {"count": numbers},
    }
    watch = MemoryWatch([process], 0.2, grows=True)
    try:
        with watch.running():
            for place, job in enumerate(jobs, 1):
                watch.peak_mib = 0.0
                try:
                    result.seconds[job], *counted = process.ask(job, limit_s, **arguments[job])
                except UnsupportedError as error:
                    result.seconds[job] = str(error)
                except HungError:
                    result.seconds[job] = f"did not finish in {limit_s:.0f} s"
                    return ["start", *jobs[place:]] if job != "start" and jobs[place:] else []
                except PeerError as error:
                    result.seconds[job] = str(error)
                    return []
                else:
                    result.counted += counted
                    result.memory_mib[job] = watch.peak_mib
    finally:
        process.end()
        end_orphans()
        shutil.rmtree(scratch, ignore_errors=True)
    return []


def table(peers: Sequence[Peer], rounds: dict[str, list[Round]], absent: dict[str, str]) -> str:
    """Returns medians as Markdown, each with its ratio to the floor."""
    lines = [
        "| | start | word count | sort of lines | sort of numbers |",
        "| --- | --: | --: | --: | --: |",
    ]
    floor: dict[str, tuple[float, float]] = {}
    for peer in peers:
        if peer.name in absent:
            lines.append(f"| {peer.title} | absent: {absent[peer.name]} | | | |")
            continue
        cells = []
        for job in _JOBS:
            values = [each.seconds[job] for each in rounds[peer.name] if job in each.seconds]
            seconds = [value for value in values if isinstance(value, float)]
            if not seconds:
                cells.append(str(values[-1]) if values else "")
                continue
            median = statistics.median(seconds)
            if job == "start":
                cells.append(f"{median:.1f} s")
                continue
            memory = max(each.memory_mib.get(job, 0.0) for each in rounds[peer.name])
            first = floor.setdefault(job, (median, memory))
            cells.append(
                f"{median:.1f} s ({median / first[0]:.1f}), {memory:,.0f} MiB ({memory / first[1]:.1f})"
            )
        lines.append(f"| {peer.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=2)
    parser.add_argument("--mib", type=int, default=1024, help="of text")
    parser.add_argument("--numbers", type=int, default=6_000_000, help="to sort")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each job of a peer")
    chosen = parser.parse_args()
    adopt_orphans()
    peers = [peer for peer in PEERS if peer.name in chosen.peers]
    installed, absent = install_all(peers)
    rounds: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="datasets-") as folder:
        write_text(Path(folder), chosen.mib)
        for _ in range(chosen.rounds):
            for one in installed:
                result = measure(one, Path(folder), chosen.workers, chosen.numbers, chosen.limit)
                print(one.peer.name, result, flush=True)
                rounds.setdefault(one.peer.name, []).append(result)
    counts = {tuple(each.counted) for some in rounds.values() for each in some if each.counted}
    if len(counts) > 1:
        raise SystemExit("the peers have counted differently: see above")
    text = (
        f"{chosen.mib:,} MiB of text, {chosen.numbers:,} numbers, {chosen.workers} workers, medians of {chosen.rounds} rounds. In "
        f"brackets: times the floor. {machine()}.\n\n{versions(installed)}\n"
        f"{table(peers, rounds, absent)}"
    )
    print(text)
    if chosen.write:
        page.put("datasets", text)


if __name__ == "__main__":
    main()
