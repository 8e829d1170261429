"""A dot plot of the results, as an SVG that reads well on light and on dark pages."""

import math
from collections.abc import Sequence

from benchmarks.cases import CASES
from benchmarks.environments import FLOOR, US, Peer
from benchmarks.report import Results

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 860, 268, 40, 74, 26
#: Distinct for colour-blind readers (Okabe and Ito), and on white as on black.
_COLOURS = ("#d55e00", "#8c8c8c", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd")
_TEXT, _LINE = "#808890", "#80889055"


def svg(results: Results, peers: Sequence[Peer]) -> str:
    """Draws a row for each metric and a dot for each peer, at its ratio to the floor."""
    shown = [peer for peer in peers if peer.name not in results.absent and peer.name != FLOOR]
    rows = []
    for metric in (metric for case in CASES for metric in case.metrics):
        ratios = [(peer, results.ratio(metric, peer, FLOOR)) for peer in shown]
        dots = [(peer, ratio) for peer, ratio in ratios if ratio is not None]
        if dots:
            title = f"TLS: {metric.title}" if metric.name.startswith("tls-") else metric.title
            rows.append((title, dots))
    all_ratios = [1.0, 10.0, *(ratio for _, dots in rows for _, ratio in dots)]
    low = math.floor(math.log10(min(all_ratios)) * 2) / 2
    high = math.ceil(math.log10(max(all_ratios)) * 2) / 2
    height = _TOP + _ROW * len(rows) + 44

    def x(ratio: float) -> float:
        share = (math.log10(ratio) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    colours = {peer.name: colour for peer, colour in zip(peers, _COLOURS, strict=True)}
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}">'
    )
    parts = [
        head,
        "<title>How many times worse than the floor each peer is</title>",
        *_legend(shown, colours),
    ]
    bottom = _TOP + _ROW * len(rows)
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        place = x(10.0**exponent)
        dashes = "" if exponent == 0 else ' stroke-dasharray="2 4"'
        parts.append(
            f'<line x1="{place:.1f}" y1="{_TOP - 8}" x2="{place:.1f}" y2="{bottom}" '
            f'stroke="{_LINE}"{dashes}/>'
        )
        label = "floor" if exponent == 0 else f"{10.0**exponent:,g} ×"  # noqa: RUF001 - times
        parts.append(f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 36}" text-anchor="end" font-size="11">'
        "times the floor, further left is better</text>"
    )
    for index, (title, dots) in enumerate(rows):
        y = _TOP + _ROW * (index + 0.5)
        parts.append(f'<text x="{_LEFT - 16}" y="{y + 4.5:.1f}" text-anchor="end">{title}</text>')
        left, right = x(min(ratio for _, ratio in dots)), x(max(ratio for _, ratio in dots))
        parts.append(
            f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="{_LINE}"/>'
        )
        # What is drawn last lies on top: ours.
        for peer, ratio in sorted(dots, key=lambda dot: dot[0].name == US):
            parts.append(_dot(x(ratio), y, peer, colours[peer.name]))
    return "\n".join([*parts, "</svg>", ""])


def _legend(peers: Sequence[Peer], colours: dict[str, str]) -> list[str]:
    parts, place = [], 24.0
    for peer in peers:
        parts.append(_dot(place, 28, peer, colours[peer.name]))
        weight = ' font-weight="600"' if peer.name == US else ""
        parts.append(f'<text x="{place + 12:.0f}" y="32.5"{weight}>{peer.title}</text>')
        place += 44 + 7.2 * len(peer.title)
    return parts


def _dot(x: float, y: float, peer: Peer, colour: str) -> str:
    radius = 6.5 if peer.name == US else 4.5
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'
