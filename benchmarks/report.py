"""Tables of the results, and their place in `docs/benchmarks.md`."""

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

    def median(self, metric: Metric, peer: Peer) -> float | None:
        """Returns the median over all rounds."""
        values = self.values.get((metric.name, peer.name))
        return statistics.median(values) if values else None

    def ratio(self, metric: Metric, peer: Peer, base: str) -> float | None:
        """Returns how many times worse a peer is than another one; below 1 it is better."""
        own = self.values.get((metric.name, peer.name))
        other = self.values.get((metric.name, base))
        if not own or not other:
            return None
        worse, better = statistics.median(own), statistics.median(other)
        if metric.more_is_better:
            worse, better = better, worse
        # A difference of two medians can fall below zero, where ratios mean nothing.
        return worse / better if worse > 0 and better > 0 else None


def markdown(results: Results, peers: Sequence[Peer]) -> str:
    """Returns all tables, and what is missing from them."""
    here = [peer for peer in peers if peer.name not in results.absent]
    local = [case for case in CASES if not case.tls]
    remote = [case for case in CASES if case.tls]
    parts = []
    for title, cases, columns in (
        ("One machine", local, here),
        (
            "TLS between two network namespaces",
            remote,
            [peer for peer in here if peer.tls],
        ),
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

    def absolute(metric: Metric, peer: Peer) -> str:
        value = results.median(metric, peer)
        if value is not None:
            return number(value)
        reason = results.reasons.get((case_of[metric.name], peer.name))
        return "hung" if reason == "hung" else _NOTHING

    def relative(base: str) -> Callable[[Metric, Peer], str]:
        def show(metric: Metric, peer: Peer) -> str:
            ratio = results.ratio(metric, peer, base)
            return _NOTHING if ratio is None else number(ratio)

        return show

    tables = [_table("", metrics, peers, absolute, with_unit=True)]
    for base, text in ((FLOOR, "Times the floor"), (US, "Times courier")):
        if any(peer.name == base for peer in peers):
            tables.append(f"{text} (above 1 is worse):\n")
            tables.append(_table(text, metrics, peers, relative(base), with_unit=False))
    return "\n".join(tables)


def _table(
    corner: str,
    metrics: Sequence[Metric],
    peers: Sequence[Peer],
    show: Callable[[Metric, Peer], str],
    with_unit: bool,
) -> str:
    head = [corner, *(peer.title for peer in peers)]
    rows = [head, ["---", *("--:" for _ in peers)]]
    for metric in metrics:
        title = f"{metric.title} ({metric.unit})" if with_unit else metric.title
        rows.append([title, *(show(metric, peer) for peer in peers)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
