"""Profiles of nodes, taken and drawn: as flame graphs, for speedscope, as folded stacks, and as text.

Names in profiles come from nodes, so they are untrusted text.
"""

import collections
import html
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchpad_lite.errors import LaunchError

_MORE_S = 10.0  # seconds that a node has to begin, and to answer at the end
_MOST_LINES = 10  # hottest lines to name, of those that compute, and of those that wait
_ROW, _MOST_ROWS = 17, 200  # height of a row of a flame graph in pixels; frames of a stack
_LEAST = 0.0005  # the least part of all samples that is drawn
_COLOURS = {"user": "#f4a259", "library": "#a8c686", "ours": "#8cb3d9", "": "#d8d8d8"}
_SCRIPT = """
const all = [...document.querySelectorAll("svg svg")], at = x => Math.min(100, Math.max(0, x));
for (const each of all) each.addEventListener("click", () => {
  for (const one of all) {
    const left = 100 * (one.dataset.x - each.dataset.x) / each.dataset.w;
    const wide = at(left + 100 * one.dataset.w / each.dataset.w) - at(left);
    one.style.display = wide < 0.01 ? "none" : "";
    one.setAttribute("x", at(left) + "%");
    one.setAttribute("width", wide + "%");
  }
});
"""

#: The answers of nodes to the question `profile`, by their names.
Profiles = Mapping[str, Mapping[str, Any]]
_Stacks = Sequence[tuple[list[tuple[str, str]], int]]  # text and kind of each frame; how often


def take_profile(
    ask: Callable[..., Any], nodes: Sequence[str], seconds: float, output: str | Path | None
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
    found = ask_for_profiles(ask, nodes, seconds)
    if draw is not None:
        Path(str(output)).write_text(draw(found), "utf-8", "backslashreplace")
    return hottest(found)


def ask_for_profiles(ask: Callable[..., Any], nodes: Sequence[str], seconds: float) -> Profiles:
    """Profiles nodes at the same time. Raises as `take_profile`."""
    if not 0 < seconds < 86400:
        raise ValueError(f"seconds={seconds}: a profile takes more than 0 s, and less than a day")
    found: Profiles = ask("profile", seconds, nodes=nodes, timeout_s=seconds + _MORE_S)
    for node in nodes:
        if (error := found.get(node, {"error": "it does not answer"}).get("error")) is not None:
            raise LaunchError(f"{node} has no profile: {error}")
    return {node: found[node] for node in nodes}


def hottest(profiles: Profiles) -> str:
    """Returns the hottest lines of nodes."""
    return "\n\n".join(f"{node}: {_hottest(each)}" for node, each in profiles.items())


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
    for state in sorted(lines):
        head += f"\n  {state}"
        for place, count in lines[state].most_common(_MOST_LINES):
            head += f"\n  {100 * count / max(1, profile['samples']):6.1f} %  {place}"
    return head


def _text(place: Sequence[Any]) -> str:
    name, file, line, _ = place
    return f"{name} ({Path(file).name}:{line})" if file else f"({name})"


def _stacks(profiles: Profiles) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """Yields stacks as text and kind of each frame, and how often they were seen."""
    for node, profile in profiles.items():
        for state, thread, stack, count in profile["stacks"]:
            places = [profile["places"][index] for index in stack[:_MOST_ROWS]]
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
    found: dict[str, dict[str, Any]] = {}
    for node, profile in profiles.items():
        for state, thread, stack, count in profile["stacks"]:
            places = [tuple(profile["places"][index]) for index in stack]
            name = f"{node} {thread}: {state}"
            kinds = {"type": "sampled", "unit": "none", "startValue": 0, "endValue": 0}
            lists: dict[str, list[Any]] = {"samples": [], "weights": []}
            each = found.setdefault(name, {"name": name, **kinds, **lists})
            each["samples"].append([frames.setdefault(place, len(frames)) for place in places])
            each["weights"].append(count)
            each["endValue"] += count
    shared = [{"name": name, "file": file, "line": line} for name, file, line, _ in frames]
    schema = "https://www.speedscope.app/file-format-schema.json"
    all_found = {"$schema": schema, "shared": {"frames": shared}, "profiles": [*found.values()]}
    return json.dumps(all_found)


def flame_graph(profiles: Profiles) -> str:
    """Returns an SVG: the wider a frame, the more samples; a click on one makes it the widest."""
    stacks = sorted(_stacks(profiles))
    drawn: list[str] = []
    depth = _draw(stacks, ("all", ""), 0, 0.0, sum(count for _, count in stacks) or 1, drawn)
    key = "code of yours: orange; other packages: green; launchpad-lite: blue; click: zoom"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{_ROW * (depth + 2)}" '
        f'font-family="monospace" font-size="11">\n<text x="2" y="12">{key}</text>\n'
        f"{''.join(drawn)}<script><![CDATA[{_SCRIPT}]]></script>\n</svg>\n"
    )


def _draw(
    stacks: _Stacks, frame: tuple[str, str], row: int, left: float, total: int, drawn: list[str]
) -> int:
    """Draws a frame with its stacks, of which `row` frames are drawn already; returns the lowest row."""
    count = sum(each for _, each in stacks)
    share = count / total
    text = html.escape("".join(each if each.isprintable() else "?" for each in frame[0]))
    drawn.append(
        f'<svg x="{100 * left:.4f}%" y="{_ROW * (row + 1)}" width="{100 * share:.4f}%" height="{_ROW - 1}" '
        f'data-x="{left:.6f}" data-w="{share:.6f}">'
        f"<title>{text}: {count} samples, {100 * share:.1f} %</title>"
        f'<rect width="100%" height="100%" fill="{_COLOURS[frame[1]]}" stroke="white"/>'
        f'<text x="3" y="12">{text}</text></svg>\n'
    )
    lowest = row
    longer = [each for each in stacks if len(each[0]) > row]
    for inner, group in itertools.groupby(longer, key=lambda each: each[0][row]):
        found = [*group]
        part = sum(each for _, each in found) / total
        if part >= _LEAST:
            lowest = max(lowest, _draw(found, inner, row + 1, left, total, drawn))
        left += part
    return lowest
