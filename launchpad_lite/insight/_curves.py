"""Curves and last states of a run, from the rows of its history."""

from collections.abc import Iterable, Mapping
from typing import Any

from launchpad_lite.insight._view import plain, view_text
from launchpad_lite.insight.history import Row

#: Points that a curve keeps: above, every other of its older half goes.
_MOST_POINTS = 1200
#: Lines that are drawn in one chart, or nodes whose view is shown; points of each line.
_MOST_LINES, _SHOWN_POINTS = 8, 300
_CHARTS = {
    "cpu": "cores",
    "mib": "memory (MiB)",
    "gpu_mib": "GPU memory (MiB)",
    "in_s": "calls/s served",
}


def label_of(node: str) -> str:
    """Returns the group of a node."""
    return node.rpartition("[")[0]


class Curves:
    """What the page shows of a history. For one thread.

    Attributes:
        program: Its name.
        nodes: Which nodes each calls, by name.
        states: The last row of each node.
        rates: The last rates of calls of each node.
        edges: The last calls per second by caller and callee.
        end: The row of the end, if there is one.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all, as another run in the same folder begins."""
        self.program = ""
        self.nodes: Mapping[str, list[str]] = {}
        self.states: dict[str, Row] = {}
        self.rates: dict[str, Row] = {}
        self.edges: dict[tuple[str, str], float] = {}
        self.end: Row | None = None
        self._views: dict[str, dict[str, Any]] = {}  # the last ones, by name and node
        self._now: dict[tuple[str, str], float] = {}  # values of nodes, and sums of groups
        #: Points by chart and line; None in place of those of lines that are not drawn.
        self._points: dict[str, dict[str, list[tuple[float, float | None]] | None]] = {}

    def take_in(self, rows: Iterable[Row]) -> None:
        """Adds rows; those of one moment stand together."""
        for row in rows:
            t, node = row["t"], str(row.get("node"))
            match row["kind"]:
                case "program":
                    self.clear()
                    self.program, self.nodes = str(row.get("program")), row["nodes"]
                case "node":
                    self.states[node] = row
                    row.setdefault("gpu_mib", None)  # earlier versions do not have it
                    self._sum_up(t, node, row, "cpu", "mib", "gpu_mib")
                case "calls":
                    self.rates[node] = row
                    self._sum_up(t, node, row, "in_s")
                case "edge":
                    self.edges[node, row["to"]] = row["calls_s"]
                case "log" | "metric":
                    self._add(row["name"], node, t, row["value"])
                case "view":
                    self._views.setdefault(row["name"], {})[node] = row["value"]
                case "end":
                    self.end = row
                case _:  # of a later version
                    pass

    def _sum_up(self, t: float, node: str, row: Row, *names: str) -> None:
        label = label_of(node)
        for name in names:
            before = self._now.get((name, node), 0.0)
            if (value := row[name] or 0.0) == before == 0.0 and label not in self._points.get(
                name, ()
            ):
                continue  # not known yet
            self._now[name, node] = value
            self._now[name, label] = total = self._now.get((name, label), 0.0) + value - before
            self._add(name, label, t, total)

    def _add(self, name: str, line: str, t: float, value: float | None) -> None:
        lines = self._points.setdefault(name, {})
        points = lines.setdefault(line, [] if len(lines) < _MOST_LINES else None)
        if points is None:
            return
        if points and points[-1][0] == t:
            points[-1] = t, value
            return
        points.append((t, value))
        if len(points) > _MOST_POINTS:
            half = _MOST_POINTS // 2
            points[:half] = points[:half:2]

    def charts(self) -> list[dict[str, Any]]:
        """Returns the charts: each a title and lines, each a name, times and values."""
        found = self._points
        ours = [name for name in _CHARTS if name in found]
        return [
            {
                "title": _CHARTS.get(name, name),
                "lines": [_line(line, points) for line, points in found[name].items() if points],
                "more": max(0, len(found[name]) - _MOST_LINES),
            }
            for name in [*ours, *sorted(found.keys() - set(ours))]
        ]

    def views(self) -> dict[str, str]:
        """Returns the last views of nodes as text, by name."""
        return {name: _shown(views) for name, views in sorted(self._views.items())}


def _shown(views: Mapping[str, Any]) -> str:
    texts = [f"{plain(node)}\n{view_text(value)}" for node, value in sorted(views.items())]
    more = [f"and {len(texts) - _MOST_LINES} more nodes"] if len(texts) > _MOST_LINES else []
    return "\n".join([*texts[:_MOST_LINES], *more])


def _line(name: str, points: list[tuple[float, float | None]]) -> dict[str, Any]:
    # From the end: the newest point is always there.
    shown = points[:: -max(1, -(-len(points) // _SHOWN_POINTS))][::-1]
    return {"name": name, "t": [t for t, _ in shown], "v": [value for _, value in shown]}
