"""Tables of the results, and their place in `docs/benchmarks.md`."""

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks import page
from benchmarks.cases import CASES, Case, Metric
from benchmarks.environments import FLOOR, ROOT, US, Installed, Peer

PLOT = ROOT / "docs" / "benchmarks.svg"
_NOTHING = "–"  # noqa: RUF001 - a dash in a table


@dataclass
class Results:
    """What the rounds gave."""

    #: By metric and peer; one value per round.
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    #: By case and peer: why there is no value.
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    #: By name of the peer: why it takes no part.
    absent: dict[str, str] = field(default_factory=dict)

    def figures(self, metric: Metric, peer: Peer) -> list[float]:
        """Returns what each round gave."""
        return self.values.get((metric.name, peer.name), [])

    def ratios(self, metric: Metric, peer: Peer, base: str) -> list[float]:
        """Returns how many times worse a peer was than another one in the same round."""
        pairs = zip(
            self.figures(metric, peer), self.values.get((metric.name, base), []), strict=False
        )
        if metric.more_is_better:
            return [other / own for own, other in pairs]
        # A difference of two medians can fall below zero, where ratios mean nothing.
        return [own / other for own, other in pairs if other > 0]

    def ratio(self, metric: Metric, peer: Peer, base: str) -> float | None:
        """Returns the median of the ratios; below 1 the peer is better."""
        ratios = self.ratios(metric, peer, base)
        return statistics.median(ratios) if ratios and statistics.median(ratios) > 0 else None


def markdown(results: Results, peers: Sequence[Peer]) -> str:
    """Returns all tables, and what is missing from them."""
    here = [peer for peer in peers if peer.name not in results.absent]
    local = [case for case in CASES if not case.tls]
    remote = [case for case in CASES if case.tls]
    parts = []
    for title, cases, columns in (
        ("One machine", local, here),
        ("TLS between two network namespaces", remote, [peer for peer in here if peer.tls]),
    ):
        parts.append(f"### {title}\n")
        metrics = _measured(results, cases, columns)
        if metrics:
            parts.append(_tables(results, cases, metrics, columns))
        else:
            parts.append("Not measured.\n")
    gaps = _gaps(results, peers)
    if gaps:
        parts.append("### Gaps\n")
        parts.append("".join(f"- {gap}\n" for gap in gaps))
    return "\n".join(parts)


def _measured(results: Results, cases: Sequence[Case], peers: Sequence[Peer]) -> list[Metric]:
    return [
        metric
        for case in cases
        for metric in case.metrics
        if any((metric.name, peer.name) in results.values for peer in peers)
    ]


def _tables(
    results: Results, cases: Sequence[Case], metrics: Sequence[Metric], peers: Sequence[Peer]
) -> str:
    case_of = {metric.name: case.name for case in cases for metric in case.metrics}

    def table(corner: str, samples: Callable[[Metric, Peer], list[float]], base: str) -> str:
        rows = [
            [corner, *(peer.title for peer in peers), "rounds differ by"],
            ["---", *("--:" for _ in peers), "--:"],
        ]
        for metric in metrics:
            row = {peer.name: samples(metric, peer) for peer in peers}
            cells = []
            for name, values in row.items():
                hung = results.reasons.get((case_of[metric.name], name)) == "hung"
                missing = "hung" if hung else _NOTHING
                cells.append(number(statistics.median(values)) if values else missing)
            # What is compared with itself would hide how much the others differ.
            difference = _difference([values for name, values in row.items() if name != base])
            title = metric.title if base else f"{metric.title} ({metric.unit})"
            rows.append([title, *cells, difference])
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    tables = [table("", results.figures, "")]
    for base, text in ((FLOOR, "Times the floor"), (US, "Times courier")):
        if any(peer.name == base for peer in peers):
            tables.append(f"{text} (above 1 is worse):\n")
            tables.append(table(text, functools.partial(results.ratios, base=base), base))
    return "\n".join(tables)


def _difference(rows: Sequence[Sequence[float]]) -> str:
    """Returns how much two values of the same peer differ: the median of all pairs of all peers."""
    differences = [
        abs(one - other) / max(abs(one), abs(other))
        for values in rows
        for one, other in itertools.combinations(values, 2)
        if one or other
    ]
    return f"{statistics.median(differences):.0%}" if differences else _NOTHING


def _gaps(results: Results, peers: Sequence[Peer]) -> list[str]:
    titles = {peer.name: peer.title for peer in peers}
    gaps = [f"{titles[name]} is absent: {reason}." for name, reason in results.absent.items()]
    # Several cases often have the same reason.
    cases: dict[tuple[str, str], list[str]] = {}
    for (case, peer), reason in results.reasons.items():
        cases.setdefault((peer, reason), []).append(case)
    gaps += [
        f"{titles.get(peer, 'All peers')}, {', '.join(names)}: {reason}."
        for (peer, reason), names in cases.items()
    ]
    return gaps


def number(value: float) -> str:
    """Writes a number with three significant digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def versions(installed: Sequence[Installed]) -> str:
    """Returns a list of what was measured."""
    return "".join(f"- {one.peer.title}: {one.version()}\n" for one in installed)


def write(generated: str) -> None:
    """Replaces the generated part of the page."""
    plot = f"![How many times worse than the floor each peer is]({PLOT.name})"
    page.put("the generated part", f"\n{plot}\n\n{generated}")
