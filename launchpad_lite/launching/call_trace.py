"""Traces of the newest calls of nodes, for <https://ui.perfetto.dev> and `chrome://tracing`.

The format is that of Chrome's trace events. Names in it come from nodes, so they are untrusted text.
"""

import collections
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ANSWER_S = 30.0  # seconds that nodes have to answer
_HOUR_S = 3600.0

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
    path = Path(output)
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"output={str(output)!r}: name a file that ends in .json or .json.gz")
    began = time.perf_counter()
    found = ask("calls", seconds or _HOUR_S, nodes=list(hosts), timeout_s=_ANSWER_S)
    middle = (began + time.perf_counter()) / 2
    answers = {node: each for node, each in found.items() if "error" not in each}
    data = json.dumps(trace(answers, hosts, middle)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    silent = ", ".join(hosts.keys() - answers.keys())
    return (
        f"{sum(len(each['calls']) for each in answers.values())} calls of {len(answers)} nodes: {path}"
        + (f"; no answer came from {silent}" if silent else "")
        + ". Open it at https://ui.perfetto.dev, which reads it in your browser"
    )


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
        rows = _rows(answer["calls"], answer["now"])
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
                "dur": 1e6 * _seconds(call, answer["now"]),
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


def _seconds(call: Mapping[str, Any], now: float) -> float:
    runs = call["end"] == "runs"
    return max(0.0, now - call["began"]) if runs else float(call["seconds"])


def _rows(calls: Sequence[Mapping[str, Any]], now: float) -> list[tuple[int, int]]:
    """Returns the row of each call: its thread, and which of several, because calls in one must nest.

    They come in the order in which they began.
    """
    ends: dict[int, list[list[float]]] = collections.defaultdict(list)
    found: list[tuple[int, int]] = []
    for call in calls:
        began = call["began"]
        end = began + _seconds(call, now)
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
            high = low + _seconds(a, answers[caller]["now"]) - _seconds(b, answers[callee]["now"])
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
