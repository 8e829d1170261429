"""`python -m launchpad_lite.launch status | logs | stop | stack`: programs that run already."""

import datetime as dt
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import courier
from launchpad_lite._escapes import shown
from launchpad_lite._log_file import FollowedLog, find_logs, folder_of_runs
from launchpad_lite._registry import Entry, Inspector, running_programs
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeStatus, RunningProgram

COMMANDS = ("status", "logs", "stop", "stack")
#: Seconds in which it is found out whether a program that was attached to has ended already.
_LOOK_S = 1.0
#: Seconds between two looks at logs that are followed.
_FOLLOW_S = 0.2
#: What a call to the process of a program raises once the program has ended.
_GONE = (courier.ServerLostError, courier.ServerUnreachableError)


def ask_attached(
    command: str, running: RunningProgram, nodes: Sequence[str], *, follow: bool
) -> None:
    """Runs a command for a program that continues without the process that launched it.

    Args:
        command: One of `COMMANDS`.
        running: The program.
        nodes: As for `ask_listed`.
        follow: As for `ask_listed`.

    Raises:
        LaunchError: It cannot be done.
    """
    _ask(command, Inspector(running, _LOOK_S), running.log_dir, nodes, follow=follow)


def ask_listed(command: str, words: Sequence[str], *, follow: bool) -> None:
    """Runs a command for a running program of this user.

    Args:
        command: One of `COMMANDS`; `status` without words lists all programs.
        words: The program (its name, or the number of the process that launched it; by default the
            newest), then nodes (`label` or `label[replica]`; by default all).
        follow: Whether `logs` continues until the program ends.

    Raises:
        LaunchError: There is no such program or node, or it does not answer.
    """
    entries, passed_over = running_programs()
    if command == "status" and not words:
        print(shown(render_runs(entries)))  # noqa: T201 - what a command line is for
        if passed_over:
            text = f"passed over {len(passed_over)}: {passed_over[0]}"
            print(shown(text), file=sys.stderr)  # noqa: T201
        if len(entries) != 1:
            return
        print()  # noqa: T201
    if not entries:
        logs = (
            f". Logs of programs that have ended: {folder_of_runs()}" if command == "logs" else ""
        )
        raise LaunchError(
            "no program of this user runs on this machine. For one that outlives its launcher, name "
            f"that: --launcher=slurm{logs}"
        )
    entry, nodes = _choose(entries, words)
    where = f"{entry.program!r} of process {entry.pid}"
    try:
        with entry.inspector() as inspector:
            log_dir = None if entry.log_dir is None else Path(entry.log_dir)
            _ask(command, inspector, log_dir, nodes, follow=follow)
    except _GONE as error:
        if command not in ("stop", "logs"):
            raise LaunchError(f"{where} has ended meanwhile") from error
        print(f"{entry.program}: has ended")  # noqa: T201
    except courier.CourierError as error:
        raise LaunchError(f"{where} does not answer: {error}") from error


def _choose(entries: Sequence[Entry], words: Sequence[str]) -> tuple[Entry, Sequence[str]]:
    """Returns the program that is meant, and the nodes."""
    if words:
        for entry in entries:
            if words[0] in (entry.program, str(entry.pid)):
                return entry, words[1:]
    return entries[0], words


def _ask(
    command: str,
    inspector: Inspector,
    log_dir: Path | None,
    nodes: Sequence[str],
    *,
    follow: bool,
) -> None:
    if command == "stop" and not nodes:
        # Before all else: who has looked at a run that has ended can no longer remove it.
        print(shown(inspector.stop()))  # noqa: T201
        return
    title, known = inspector.status()
    chosen = _matching([each.name for each in known], nodes, title)
    if command == "status":
        print(shown(title))  # noqa: T201
        print(shown(render_status([each for each in known if each.name in chosen])))  # noqa: T201
        if log_dir is not None:
            print(f"logs: {log_dir}")  # noqa: T201
    elif command == "stop":
        raise LaunchError(f"{title}; `stop` ends whole programs, not nodes: {', '.join(nodes)}")
    elif command == "stack":
        for node, text in inspector.stacks().items():
            if not nodes or node in chosen:
                print(shown(f"{node}\n{textwrap.indent(text, '  ')}\n"))  # noqa: T201
    else:
        lines = _followed(inspector, log_dir) if follow else inspector.output()
        is_empty = True
        for node, line in lines:
            is_empty = False
            if not nodes or node in chosen:
                text = line.decode(errors="replace").rstrip("\r\n")
                print(shown(f"[{node}] {text}"), flush=True)  # noqa: T201
        if is_empty and log_dir is None:
            raise LaunchError(
                "what its nodes print is not kept: it is in the output of the process that launched it"
            )


def _matching(known: Sequence[str], wanted: Sequence[str], title: str) -> Collection[str]:
    """Returns the nodes that are named by label or by label and replica; all if none is."""
    chosen: set[str] = set()
    for word in wanted:
        found = [name for name in known if word in (name, name.rpartition("[")[0])]
        if not found:
            raise LaunchError(
                f"{title}; there is no program or node {word!r}. Nodes: {', '.join(known)}"
            )
        chosen.update(found)
    return chosen or known


def _followed(inspector: Inspector, log_dir: Path | None) -> Iterator[tuple[str, bytes]]:
    """Yields what nodes print, line by line, until the program ends."""
    if log_dir is None:
        return
    logs: dict[str, FollowedLog] = {}
    begun: dict[str, bytes] = {}
    has_ended = False
    while True:
        for node, path in find_logs(log_dir):
            log = logs.setdefault(node, FollowedLog(path))
            for data in log.finish() if has_ended else log.read():
                *lines, begun[node] = (begun.get(node, b"") + data).split(b"\n")
                yield from ((node, line) for line in lines)
            if has_ended and begun.get(node):
                yield node, begun[node]
        if has_ended:
            return
        try:
            has_ended = inspector.join(_FOLLOW_S)
        except _GONE:
            has_ended = True


def render_runs(entries: Sequence[Entry]) -> str:
    """Returns a table of running programs."""
    if not entries:
        return "no program of this user runs on this machine"
    rows: list[Sequence[object]] = [("program", "launcher", "pid", "running for", "nodes", "logs")]
    for each in entries:
        age = dt.timedelta(seconds=max(0, int(time.time() - each.started_at)))
        rows.append((each.program, each.launcher, each.pid, age, each.nodes, each.log_dir or None))
    return _table(rows)


def render_status(status: Sequence[NodeStatus]) -> str:
    """Returns a table of how nodes are."""
    rows: list[Sequence[object]] = [("node", "state", "host", "pid", "restarts", "cores", "MiB")]
    for each in status:
        usage = (each.cpu, each.memory_mib)
        rows.append((each.name, each.state, each.host, each.pid, each.restarts, *usage))
    return _table(rows)


def _table(rows: Sequence[Sequence[object]]) -> str:
    cells = [[*map(_cell, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
