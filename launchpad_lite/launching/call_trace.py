"""Traces of the newest calls of nodes, for <https://ui.perfetto.dev> and `chrome://tracing`.

The format is that of Chrome's trace events. Names in it come from nodes, so they are untrusted text.
"""

import collections
import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from courier.lowlevel import call_records
from launchpad_lite.errors import LaunchError
from launchpad_lite.life.result import named
from launchpad_lite.parts.escapes import shown

if TYPE_CHECKING:
    from launchpad_lite.launching import RunningProgram

_ANSWER_S = 30.0  # seconds that nodes have to answer
_HOUR_S = 3600.0
#: Seconds that a node which hangs delays the others, in a trace of a run; and until nodes are there.
_PATIENCE_S, _PAUSE_S = 3.0, 0.2
#: The newest that a trace of a run has, of all nodes.
_MOST_CALLS = 300_000
_LOGGER = logging.getLogger(__name__)

#: The answers of nodes to the question `calls`, by their names.
CallAnswers = Mapping[str, Mapping[str, Any]]
_Event = dict[str, Any]


def take_trace(
    ask: Callable[..., Any], hosts: Mapping[str, str], seconds: float, output: str | Path
) -> str:
    """Writes the calls of nodes in the last seconds to a file; returns what it holds.

    `ask` is that of a running program, and `hosts` are those of the nodes to ask. Raises ValueError
    for a file of another kind.
    """
    path = _checked(output)
    began = time.perf_counter()
    found = ask("calls", seconds or _HOUR_S, nodes=list(hosts), timeout_s=_ANSWER_S)
    middle = (began + time.perf_counter()) / 2
    answers = {node: each for node, each in found.items() if "error" not in each}
    silent = ", ".join(hosts.keys() - answers.keys())
    return _write(path, answers, hosts, middle, f"; no answer came from {silent}" if silent else "")


def _checked(output: str | Path) -> Path:
    path = Path(output)
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"output={str(output)!r}: name a file that ends in .json or .json.gz")
    return path


def _write(
    path: Path, answers: CallAnswers, hosts: Mapping[str, str], now: float, note: str
) -> str:
    count = sum(len(each["calls"]) for each in answers.values())
    found = f"{count} calls of {len(answers)} nodes"
    data = json.dumps({**trace(answers, hosts, now), "otherData": {"calls": found + note}}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return (
        f"{found}: {path}{note}. Open it at https://ui.perfetto.dev, which reads it in your browser"
    )


class RunTrace:
    """All calls of a program. Its thread reads them once a second, and writes them after the end."""

    def __init__(self, running: "RunningProgram", output: str | Path) -> None:
        """Begins. Raises ValueError for a file of another kind."""
        self._running = running
        self._path = _checked(output).absolute()
        self._hosts: dict[str, str] = {}
        #: As answers to `calls`, but with calls by when and in which thread they began.
        self._answers: dict[str, dict[str, Any]] = {}
        #: By host and process, how many calls it has recorded; this process, also of what was before.
        self._recorded: dict[tuple[str, int], int] = {}
        self._before = {os.getpid(): call_records.count()}
        self._missing = 0
        # No daemon: the end of the script waits for it.
        self.thread = threading.Thread(target=self._run, name="launchpad-trace")
        self.thread.start()

    def _run(self) -> None:
        program = self._running.plan.program
        try:
            while self._running.result is None:
                if not self._take_in():
                    self._running.join(_PAUSE_S)
            answers = {
                node: {**each, "calls": [each["calls"][key] for key in sorted(each["calls"])]}
                for node, each in self._answers.items()
            }
            note = f"; {self._missing} more are missing: there were too many"
            note = note if self._missing else ""
            if silent := self._hosts.keys() - answers.keys():
                note += f"; no answer came from {named(sorted(silent), 10)}"
            text = _write(self._path, answers, self._hosts, 0.0, note)
            print(shown(f"{program}: {text}"), flush=True)  # noqa: T201 - it was asked for
        except (LaunchError, OSError) as error:
            _LOGGER.warning("%s: no trace is written: %s", program, error)

    def _take_in(self) -> bool:
        """Asks for calls that are new; returns whether a node answered, which takes a second."""
        self._hosts.update((each.name, each.host) for each in self._running.status())
        since = {node: each["asked"] for node, each in self._answers.items()}
        found = self._running.ask("trace", since, timeout_s=_PATIENCE_S)
        now = time.perf_counter()
        answers = {node: each for node, each in found.items() if "error" not in each}
        for node, each in answers.items():
            process = self._hosts[node], each["pid"]
            before = self._recorded.get(process, self._before.get(each["pid"], 0))
            self._missing += max(0, each["count"] - before - each["room"])
            self._recorded[process] = each["count"]
            kept = self._answers.setdefault(node, {"threads": {}, "calls": {}})
            # `now`: as of the same time for all, by the clock of its host.
            kept.update(asked=each["now"], now=each["now"] - now)
            named_now = {ident: name for ident, name in each["threads"].items() if name}
            kept["threads"].update(named_now)  # those that have ended have no name any more
            calls = kept["calls"]
            calls.update(((call["began"], call["thread"]), call) for call in each["calls"])
            for key in list(calls)[: max(0, len(calls) - _MOST_CALLS // len(self._hosts))]:
                del calls[key]
                self._missing += 1
        return bool(answers)


def trace(answers: CallAnswers, hosts: Mapping[str, str], now: float) -> dict[str, Any]:
    """Returns the trace: a row for each node and thread, and an arrow for each call between them.

    `now` is about when they answered, by a clock of this host.
    """
    pairs = _pairs(answers)
    offsets = _offsets(answers, hosts, pairs, now)
    callers = {served: made[0] for made, served in pairs}
    begins = [
        call["began"] + offsets[hosts[node]]
        for node, each in answers.items()
        for call in each["calls"]
    ]
    first = min(begins, default=0.0)
    events: list[_Event] = []
    slices: dict[tuple[str, int], _Event] = {}
    for process, (node, answer) in enumerate(answers.items(), 1):
        events.append(_name("process", node, process))
        offset = offsets[hosts[node]] - first
        rows = _rows(answer["calls"])
        numbers = {key: row for row, key in enumerate(dict.fromkeys(rows), 1)}
        for (ident, depth), row in numbers.items():
            name = answer["threads"].get(str(ident)) or f"thread {ident}"
            events.append(
                _name("thread", name + (f" ({depth + 1})" if depth else ""), process, row)
            )
        for index, (call, key) in enumerate(zip(answer["calls"], rows, strict=True)):
            peer = callers.get((node, index), call["peer"])
            slices[node, index] = {
                "name": call["method"] if call["is_served"] else f"{peer}: {call['method']}",
                "cat": "answered" if call["is_served"] else "called",
                "ph": "X",
                "ts": 1e6 * (call["began"] + offset),
                "dur": 1e6 * call["seconds"],
                "pid": process,
                "tid": numbers[key],
                "args": {"peer": peer, "end": call["end"]},
            }
    events += slices.values()
    for number, (made, served) in enumerate(pairs, 1):
        for phase, end in (("s", slices[made]), ("f", slices[served])):
            arrow = {"name": "call", "cat": "call", "ph": phase, "id": number, "bp": "e"}
            events.append({**arrow, **{key: end[key] for key in ("ts", "pid", "tid")}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(what: str, name: str, process: int, row: int = 0) -> _Event:
    args = {"name": name}
    return {"name": f"{what}_name", "ph": "M", "pid": process, "tid": row, "args": args}


def _rows(calls: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Returns the row of each call: its thread, and which of several, because calls in one must nest.

    They come in the order in which they began.
    """
    ends: dict[int, list[list[float]]] = collections.defaultdict(list)
    found: list[tuple[int, int]] = []
    for call in calls:
        began = call["began"]
        end = began + call["seconds"]
        rows = ends[call["thread"]]
        for open_ends in rows:
            while open_ends and open_ends[-1] <= began:
                open_ends.pop()
        fits = (depth for depth, each in enumerate(rows) if not each or end <= each[-1])
        if (depth := next(fits, len(rows))) == len(rows):
            rows.append([])
        rows[depth].append(end)
        found.append((call["thread"], depth))
    return found


_Place = tuple[str, int]  # a node, and the index of one of its calls


def _pairs(answers: CallAnswers) -> list[tuple[_Place, _Place]]:
    """Returns the two sides of each call that both sides have recorded."""
    made: dict[tuple[int, int], _Place] = {}
    served: dict[tuple[int, int], _Place] = {}
    for node, answer in answers.items():
        for index, call in enumerate(answer["calls"]):
            if call["tag"]:
                side = served if call["is_served"] else made
                side[call["tag"], call["number"]] = node, index
    return [(made[key], served[key]) for key in made.keys() & served.keys()]


def _offsets(
    answers: CallAnswers,
    hosts: Mapping[str, str],
    pairs: Sequence[tuple[_Place, _Place]],
    now: float,
) -> dict[str, float]:
    """Returns by host what is added to its clock, so that each answer lies within its call."""
    rough = {hosts[node]: now - answer["now"] for node, answer in answers.items()}
    #: By two hosts, the bounds of what the clock of the second is behind that of the first.
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for (caller, made), (callee, served) in pairs:
        here, there = hosts[caller], hosts[callee]
        if here != there:
            a, b = answers[caller]["calls"][made], answers[callee]["calls"][served]
            low = a["began"] - b["began"]
            high = low + a["seconds"] - b["seconds"]
            for key, (least, most) in (
                ((here, there), (low, high)),
                ((there, here), (-high, -low)),
            ):
                known = bounds.get(key, (least, most))
                bounds[key] = max(known[0], least), min(known[1], most)
    offsets: dict[str, float] = {}
    for root in rough.items():  # hosts that called each other follow one of them
        waiting = [root] if root[0] not in offsets else []
        while waiting:
            host, offset = waiting.pop()
            if host not in offsets:
                offsets[host] = offset
                beside = ((to, each) for (here, to), each in bounds.items() if here == host)
                waiting += [(to, offset + sum(each) / 2) for to, each in beside]
    return offsets
