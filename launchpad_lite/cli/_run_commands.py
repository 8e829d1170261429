"""`python -m launchpad_lite.launch status | logs | ...`: commands for running programs."""

import contextlib
import datetime as dt
import json
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import courier
from launchpad_lite.cli._report import write_report
from launchpad_lite.errors import LaunchError, ProgramPathError
from launchpad_lite.launching import NodeStatus
from launchpad_lite.launching.call_trace import take_trace
from launchpad_lite.launching.flame_graph import take_profile
from launchpad_lite.launching.registry import Inspector, RegistryEntry, running_programs
from launchpad_lite.launching.status_table import render_status, text_table
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.parts.escapes import shown
from launchpad_lite.parts.log_file import FollowedLogs, folder_of_runs

#: Seconds between two reads of followed logs.
_FOLLOW_S = 0.2
_PROFILE_S = 5.0
_ANSWER_S = 10.0  # seconds that the debugger of a node has to answer


class AskOptions(NamedTuple):
    """The options of a command."""

    follow: bool = False  # go on until the program ends
    json: bool = False  # print JSON
    seconds: float = 0.0  # of a profile, or a trace; 0: as many as is usual
    output: str = ""  # a file to write
    port: int = 0  # of a page; 0: any


def ask_listed(command: str, words: Sequence[str], options: AskOptions) -> None:
    """Runs a command for a running program of this user; `status` without words lists all programs.

    Words are the program (its name, or the number of the process that launched it; by default the
    newest, but `stop` asks for one of several), then nodes (`label` or `label[replica]`; by default
    all).
    """
    if command == "report" and words and Path(words[0]).is_dir():
        print(shown(write_report(None, Path(words[0]), options.output)), end="")  # noqa: T201
        return
    entries, passed_over = running_programs()
    if command == "status" and not words and options.json:
        names = ("program", "launcher", "pid", "started_at", "nodes", "log_dir")
        found = [{name: getattr(each, name) for name in names} for each in entries]
        print_json(programs=found, passed_over=passed_over)
        return
    if command == "status" and not words:
        print(shown(render_runs(entries)))  # noqa: T201 - what a command line is for
        if passed_over:
            text = f"passed over {len(passed_over)}: {passed_over[0]}"
            print(shown(text), file=sys.stderr)  # noqa: T201
        if len(entries) != 1:
            return
        print()  # noqa: T201
    if command == "dashboard" and words and (folder := Path(words[0]).absolute()).is_dir():
        words = [str(each.pid) for each in entries if each.log_dir == str(folder)]
        if not words:  # it has ended
            _show_dashboard(None, folder, options.port)
    if not entries:
        logs = (
            f". Logs of programs that have ended: {folder_of_runs()}" if command == "logs" else ""
        )
        raise LaunchError(
            "no program of this user runs on this machine. For one that outlives its launcher, name "
            f"that: --launcher=slurm{logs}"
        )
    entry, nodes = _choose(command, entries, words)
    where = f"{entry.program!r} of process {entry.pid}"
    try:
        with entry.inspector() as inspector:
            log_dir = None if entry.log_dir is None else Path(entry.log_dir)
            ask(command, inspector, log_dir, nodes, options)
    except courier.ServerGoneError as error:
        if command not in ("stop", "logs"):
            raise LaunchError(f"{where} has ended meanwhile") from error
        print(f"{entry.program}: has ended")  # noqa: T201
    except courier.CourierError as error:
        raise LaunchError(f"{where} does not answer: {error}") from error


def _choose(
    command: str, entries: Sequence[RegistryEntry], words: Sequence[str]
) -> tuple[RegistryEntry, Sequence[str]]:
    named = [each for each in entries if words and words[0] in (each.program, str(each.pid))]
    meant = named or entries
    which = dict.fromkeys(f"{each.program} of process {each.pid}" for each in meant)
    if command == "stop" and len(which) > 1:
        unknown = "" if named or not words else f"no program is {words[0]!r}; "
        raise LaunchError(
            f"{unknown}which one is to stop? Name it, or its process: {', '.join(which)}"
        )
    return meant[0], words[1:] if named else words


class _Asked(NamedTuple):
    """What a command is to look at."""

    inspector: Inspector
    log_dir: Path | None
    title: str
    nodes: Sequence[NodeStatus]  # that are chosen
    is_part: bool  # whether some were named
    options: AskOptions

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.nodes]


def ask(
    command: str,
    inspector: Inspector,
    log_dir: Path | None,
    words: Sequence[str],
    options: AskOptions,
) -> None:
    """Runs a command for a running program, of which `inspector` tells; `words` name nodes."""
    if command == "stop" and not words:
        print(shown(inspector.stop()))  # noqa: T201
        return
    title, known = inspector.status()
    chosen = _matching([each.name for each in known], words, title)
    if words and command in _OF_PROGRAMS:
        does = "ends" if command == "stop" else "looks at"
        raise LaunchError(
            f"{title}; `{command}` {does} whole programs, not nodes: {', '.join(words)}"
        )
    nodes = [each for each in known if each.name in chosen]
    try:
        run, _ = _COMMANDS[command]
        run(_Asked(inspector, log_dir, title, nodes, bool(words), options))
    except ValueError as error:  # an option
        raise ProgramPathError(str(error)) from None
    except courier.CourierError:  # some are an OSError, too
        raise
    except OSError as error:
        if not options.output:
            raise
        text = f"cannot write {options.output}: {error}; name another --output="
        raise LaunchError(text) from error


def _status(asked: _Asked) -> None:
    if asked.options.json:
        folder = None if asked.log_dir is None else str(asked.log_dir)
        print_json(summary=asked.title, log_dir=folder, nodes=[to_json(x) for x in asked.nodes])
        return
    print(shown(f"{asked.title}\n{render_status(asked.nodes)}"))  # noqa: T201
    if asked.log_dir is not None:
        print(f"logs: {asked.log_dir}")  # noqa: T201


def _logs(asked: _Asked) -> None:
    inspector, log_dir = asked.inspector, asked.log_dir
    is_empty = True
    for node, line in _followed(inspector, log_dir) if asked.options.follow else inspector.output():
        is_empty = False
        if not asked.is_part or node in asked.names:
            text = line.decode(errors="replace").rstrip("\r\n")
            said = {"node": node, "line": text}
            line_shown = json.dumps(said) if asked.options.json else shown(f"[{node}] {text}")
            print(line_shown, flush=True)  # noqa: T201
    if is_empty and log_dir is None:
        raise LaunchError(
            "what its nodes print is not kept: it is in the output of the process that launched it"
        )


def _stack(asked: _Asked) -> None:
    stacks = asked.inspector.stacks()
    stacks = {k: text for k, text in stacks.items() if not asked.is_part or k in asked.names}
    if asked.options.json:
        print_json(stacks=stacks)
        return
    for node, text in stacks.items():
        print(shown(f"{node}\n{textwrap.indent(text, '  ')}\n"))  # noqa: T201


def _why(asked: _Asked) -> None:
    if asked.options.json:
        print_json(**asked.inspector.wait_graph())
    else:
        print(shown(asked.inspector.why()))  # noqa: T201


def _profile(asked: _Asked) -> None:
    seconds, output = asked.options.seconds or _PROFILE_S, asked.options.output or None
    print(shown(take_profile(asked.inspector.ask, asked.names, seconds, output)))  # noqa: T201


def _trace(asked: _Asked) -> None:
    hosts = {each.name: each.host for each in asked.nodes}
    seconds, output = asked.options.seconds, asked.options.output
    print(shown(take_trace(asked.inspector.ask, hosts, seconds, output)))  # noqa: T201


def _attach(asked: _Asked) -> None:
    """Passes on lines to the debugger of a node, until it or the input ends."""
    if len(asked.nodes) != 1:
        raise LaunchError(
            f"{asked.title}; `attach` looks into one node, not {', '.join(asked.names)}"
        )
    (node,) = asked.names
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines with it
    argument: str | None = None
    while True:
        answers = asked.inspector.ask("debug", argument, nodes=[node], timeout_s=_ANSWER_S)
        answer = answers.get(node, {"error": "it does not answer, or has ended"})
        if "error" in answer:
            raise LaunchError(f"{node} has no debugger: {answer['error']}")
        before, line_end, prompt = answer["output"].rpartition("\n")
        print(shown(before), end=line_end, flush=True)  # noqa: T201
        if answer["over"]:
            return
        argument = ""
        if answer["asks"]:
            try:
                argument = f"={input(shown(prompt))}"
            except (EOFError, KeyboardInterrupt):
                argument = "=quit"
                print()  # noqa: T201


def _report(asked: _Asked) -> None:
    text = write_report(asked.inspector, asked.log_dir, asked.options.output)
    print(shown(text), end="")  # noqa: T201


def _top(asked: _Asked) -> None:
    from launchpad_lite.insight.top import show_top

    show_top(asked.inspector, asked.log_dir)


def _dashboard(asked: _Asked) -> None:
    _show_dashboard(asked.inspector, asked.log_dir, asked.options.port)


#: What each command does, and its options.
_COMMANDS: Mapping[str, tuple[Callable[[_Asked], None], Sequence[str]]] = {
    "status": (_status, ("json",)),
    "logs": (_logs, ("follow", "json")),
    "stack": (_stack, ("json",)),
    "why": (_why, ("json",)),
    "profile": (_profile, ("seconds", "output")),
    "trace": (_trace, ("seconds", "output")),
    "attach": (_attach, ()),
    "report": (_report, ("output",)),
    "top": (_top, ()),
    "dashboard": (_dashboard, ("port",)),
}
COMMANDS = {**{name: options for name, (_, options) in _COMMANDS.items()}, "stop": ()}
#: Those that look at a whole program.
_OF_PROGRAMS = ("dashboard", "report", "stop", "top", "why")


def print_json(**content: Any) -> None:
    """Prints an object in one line: what `docs/command_line.md` describes."""
    print(json.dumps({"format": 1, **content}))  # noqa: T201


def _show_dashboard(inspector: Inspector | None, folder: Path | None, port: int) -> None:
    from launchpad_lite.insight.dashboard import show_dashboard  # few want it

    show_dashboard(inspector, folder, port)


def _matching(known: Sequence[str], wanted: Sequence[str], title: str) -> Collection[str]:
    """Returns nodes by label, or by label and replica; all if none is named."""
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
    """Yields the output of nodes, line by line, until the program ends."""
    if log_dir is None:
        yield from inspector.follow()
        return
    logs = FollowedLogs(log_dir)
    begun: dict[str, bytes] = {}
    has_ended = False
    while True:
        for node, data in logs.read(is_last=has_ended):
            *lines, begun[node] = (begun.get(node, b"") + data).split(b"\n")
            yield from ((node, line) for line in lines)
        if has_ended:
            yield from ((node, line) for node, line in begun.items() if line)
            return
        try:
            has_ended = inspector.join(_FOLLOW_S)
        except courier.ServerGoneError:
            has_ended = True


def render_runs(entries: Sequence[RegistryEntry]) -> str:
    if not entries:
        return "no program of this user runs on this machine"
    rows: list[Sequence[object]] = [("program", "launcher", "pid", "running for", "nodes", "logs")]
    for each in entries:
        age = dt.timedelta(seconds=max(0, int(time.time() - each.started_at)))
        rows.append((each.program, each.launcher, each.pid, age, each.nodes, each.log_dir or None))
    return text_table(rows)
