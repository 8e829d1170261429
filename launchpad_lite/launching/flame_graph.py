"""Profiles of nodes, taken and drawn: as flame graphs, for speedscope, as folded stacks, and as text.

Names in profiles come from nodes, so they are untrusted text.
"""

import collections
import html
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchpad_lite.errors import LaunchError

_MORE_S = 10.0  # seconds that a node has to begin, and to answer at the end
_MOST_LINES = 10  # hottest lines to name, of those that compute, and of those that wait
_ROW, _LEAST = 17, 0.0005  # height of a row in pixels; the least share of all samples that is drawn
_COLOURS = {"user": "#f4a259", "library": "#a8c686", "ours": "#8cb3d9", "": "#d8d8d8"}
_SCRIPT = """
const all = [...document.querySelectorAll("svg svg")];
for (const each of all) each.addEventListener("click", () => {
  const x = +each.dataset.x, w = +each.dataset.w;
  for (const one of all) {
    const left = (one.dataset.x - x) / w * 100, right = left + one.dataset.w / w * 100;
    const from = Math.max(0, left), to = Math.min(100, right);
    one.style.display = to - from < 0.01 ? "none" : "";
    one.setAttribute("x", from + "%");
    one.setAttribute("width", Math.max(0, to - from) + "%");
  }
});
"""

#: The answers of nodes to the question `profile`, by their names.
Profiles = Mapping[str, Mapping[str, Any]]


def take_profile(
    ask: Callable[..., Mapping[str, Any]],
    nodes: Sequence[str],
    seconds: float,
    output: str | Path | None = None,
) -> str:
    """Profiles nodes at the same time; returns the hottest lines, and writes a file.

    `ask` is that of a running program. Raises ValueError for a file of another kind, and a
    LaunchError if a node does not answer.
    """
    kinds = {
        ".svg": flame_graph,
        ".html": lambda found: f"<!doctype html><meta charset=utf-8>\n{flame_graph(found)}",
        ".speedscope.json": speedscope,
        ".txt": folded,
    }
    draw = next((each for end, each in kinds.items() if str(output).endswith(end)), None)
    if output is not None and draw is None:
        raise ValueError(f"output={str(output)!r}: name a file that ends in {', '.join(kinds)}")
    if not 0 < seconds < 86400:
        raise ValueError(f"seconds={seconds}: a profile takes more than 0 s, and less than a day")
    found = ask("profile", seconds, nodes=nodes, timeout_s=seconds + _MORE_S)
    for node in nodes:
        if (error := found.get(node, {"error": "it does not answer"}).get("error")) is not None:
            raise LaunchError(f"{node} has no profile: {error}")
    if draw is not None:
        Path(str(output)).write_text(draw(found), encoding="utf-8")
    return "\n\n".join(f"{node}: {_hottest(found[node])}" for node in nodes)


def _hottest(profile: Mapping[str, Any]) -> str:
    lines: dict[str, collections.Counter[str]] = {}
    for state, _, stack, count in profile["stacks"]:
        places = [profile["places"][index] for index in stack]
        users, ours = ([x for x in places if x[3] == kind] for kind in ("user", "ours"))
        inner = (users or ours or places)[-1]
        lines.setdefault(state, collections.Counter())[_text(inner)] += count
    mean_s, late_s = profile["lock_s"]
    head = (
        f"{profile['seconds']:.1f} s, {profile['samples']} samples; a thread that needs the interpreter lock "
        f"waits {1e3 * mean_s:.1f} ms on average, and {1e3 * late_s:.1f} ms at the 99th percentile "
        "(by how late the sampling thread woke up)"
    )
    parts = [head]
    for state in sorted(lines):
        parts.append(f"  {state}")
        for place, count in lines[state].most_common(_MOST_LINES):
            parts.append(f"  {100 * count / max(1, profile['samples']):6.1f} %  {place}")
    return "\n".join(parts)


def _text(place: Sequence[Any]) -> str:
    name, file, line, _ = place
    return f"{name} ({Path(file).name}:{line})" if file else f"({name})"


def _stacks(profiles: Profiles) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """Yields stacks as text and kind of each frame, and how often they were seen."""
    for node, profile in profiles.items():
        for state, thread, stack, count in profile["stacks"]:
            places = [profile["places"][index] for index in stack]
            begin = [(node, ""), (state, ""), (thread, "")]
            yield [*begin, *((_text(each), each[3]) for each in places)], count


def folded(profiles: Profiles) -> str:
    """Returns folded stacks, a line each, as flamegraph.pl and others read them."""
    return "".join(
        ";".join(text.replace(";", ",").replace("\n", " ") for text, _ in stack) + f" {count}\n"
        for stack, count in _stacks(profiles)
    )


def speedscope(profiles: Profiles) -> str:
    """Returns a file of https://www.speedscope.app, with a profile for each thread and state."""
    frames: dict[tuple[Any, ...], int] = {}
    threads: dict[str, tuple[list[list[int]], list[int]]] = {}
    for node, profile in profiles.items():
        for state, thread, stack, count in profile["stacks"]:
            places = [tuple(profile["places"][index]) for index in stack]
            rows, weights = threads.setdefault(f"{node} {thread}: {state}", ([], []))
            rows.append([frames.setdefault(each, len(frames)) for each in places])
            weights.append(count)
    shared = [
        {"name": name, "file": file, "line": line} if file else {"name": f"({name})"}
        for name, file, line, _ in frames
    ]
    kinds = {"type": "sampled", "unit": "none", "startValue": 0}
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": shared},
            "profiles": [
                {
                    **kinds,
                    "name": name,
                    "endValue": sum(weights),
                    "samples": rows,
                    "weights": weights,
                }
                for name, (rows, weights) in threads.items()
            ],
        }
    )


class _Flame:
    def __init__(self, kind: str = "") -> None:
        self.kind, self.count = kind, 0
        self.inner: dict[str, _Flame] = {}


def flame_graph(profiles: Profiles) -> str:
    """Returns an SVG: the wider a frame, the more samples; a click on one makes it the widest."""
    root = _Flame()
    for stack, count in _stacks(profiles):
        frame = root
        frame.count += count
        for text, kind in stack:
            frame = frame.inner.setdefault(text, _Flame(kind))
            frame.count += count
    drawn: list[str] = []
    depth = _draw("all", root, 0.0, 0, root.count or 1, drawn)
    height = _ROW * (depth + 1)
    key = "code of yours: orange; other packages: green; launchpad-lite: blue; click: zoom"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height + _ROW}" '
        f'font-family="monospace" font-size="11">\n<text x="2" y="12">{key}</text>\n'
        + "".join(drawn)
        + f"<script><![CDATA[{_SCRIPT}]]></script>\n</svg>\n"
    )


def _draw(text: str, frame: _Flame, left: float, row: int, total: int, drawn: list[str]) -> int:
    """Draws a frame and those inside of it, below it; returns the number of rows."""
    share = frame.count / total
    text = "".join(each if each.isprintable() else "?" for each in text)
    drawn.append(
        f'<svg x="{100 * left:.4f}%" y="{_ROW * (row + 1)}" width="{100 * share:.4f}%" height="{_ROW - 1}" '
        f'data-x="{left:.6f}" data-w="{share:.6f}">'
        f"<title>{html.escape(text)}: {frame.count} samples, {100 * share:.1f} %</title>"
        f'<rect width="100%" height="100%" fill="{_COLOURS[frame.kind]}" stroke="white"/>'
        f'<text x="3" y="12">{html.escape(text)}</text></svg>\n'
    )
    deepest = row
    for inner, each in sorted(frame.inner.items(), key=operator.itemgetter(0)):
        if each.count >= _LEAST * total:
            deepest = max(deepest, _draw(inner, each, left, row + 1, total, drawn))
        left += each.count / total
    return deepest
