"""A running program as others see it: states, rates of calls and the last output of its nodes."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeStatus
from launchpad_lite.parts.escapes import shown
from launchpad_lite.parts.log_file import end_of, log_path

if TYPE_CHECKING:
    from launchpad_lite.launching.registry import Inspector

#: Bytes at the end of a log in which its last line is.
_TAIL_BYTES = 2048
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: Seconds that nodes have to tell their numbers. One that computes in C may take long.
_ASK_S = 1.0
_BAR = 24  # characters of the longest bar


class CallRates(NamedTuple):
    """Calls of a node between two looks: per second, served and made; None: not known.

    `p50_s` and `p99_s` are delays of calls that it served, from arrival to answer: no more than
    twice as long as they were. `errors_s` are calls per second that raised, `queued` those that
    wait for a thread now.
    """

    in_s: float | None = None
    out_s: float | None = None
    errors_s: float | None = None
    queued: int | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class NodeRow(NamedTuple):
    """A node as it is now. `numbers`: its answer to the question `numbers`, if it gave one."""

    status: NodeStatus
    rates: CallRates
    last_line: str
    numbers: Mapping[str, Any]


class ProgramSight(NamedTuple):
    """A program as it is now; `edges`: calls per second by caller and callee."""

    title: str
    rows: Sequence[NodeRow]
    edges: Mapping[tuple[str, str], float]


def plain(text: str) -> str:
    """Returns one line of text without colours and control characters."""
    return _COLOUR.sub("", shown(text)).expandtabs().replace("\r", "").replace("\n", " ")


def plain_lines(text: str) -> str:
    """Returns lines of text without colours and control characters."""
    return "\n".join(map(plain, text.split("\n")))


def view_text(value: object) -> str:
    """Returns what a node shows of itself by `lp.metrics.view`, as lines of text; numbers as bars.

    None is the value of a view whose function has not returned.
    """
    if value is None:
        return "(its function has not returned)"
    if not isinstance(value, Mapping):
        return plain_lines(str(value))
    most, width = max([0, *value.values()]) or 1, max(map(len, value), default=0)
    bars = {name: "█" * round(_BAR * (max(0, number) / most)) for name, number in value.items()}
    rows = (f"{name:>{width}} {bars[name]:{_BAR}} {number:g}" for name, number in value.items())
    return "\n".join(map(plain, rows))


def quantile(counts: Sequence[int], part: float) -> float | None:
    """Returns the delay in seconds below which a part of the calls stays; None without calls.

    `counts[i]` calls took less than 2**i microseconds, and did not fit into an earlier place.
    """
    left = sum(counts) * part
    for power, count in enumerate(counts):
        left -= count
        if count and left <= 0:
            return float(2**power) * 1e-6
    return None


class CallMeter:
    """Makes rates of the sums that nodes tell. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[str, tuple[float, Mapping[str, Any]]] = {}

    def look(
        self, answers: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
    ) -> tuple[dict[str, CallRates], dict[tuple[str, str], float]]:
        """Returns the rates of each node, and those between nodes.

        Args:
            answers: What nodes have answered to the question `numbers`.
            names: The nodes, by each name and address that callers have of them.
        """
        now = self._clock()
        rates: dict[str, CallRates] = {}
        edges: dict[tuple[str, str], float] = {}
        for node, answer in answers.items():
            if not (calls := answer.get("calls")):
                continue
            before_at, before = self._before.get(node, (now, calls))
            self._before[node] = now, calls
            if now <= before_at:
                queued = sum(each["queued"] for each in calls["served"].values())
                rates[node] = CallRates(queued=queued)
                continue
            rates[node], made = _rates(calls, before, now - before_at)
            for server, calls_s in made.items():
                if calls_s > 0 and (callee := names.get(server)) is not None:
                    edges[node, callee] = edges.get((node, callee), 0.0) + calls_s
        return rates, edges


def _rates(
    now: Mapping[str, Any], before: Mapping[str, Any], elapsed_s: float
) -> tuple[CallRates, dict[str, float]]:
    nothing: dict[str, Any] = {}

    def gained(side: str, method: str, key: str) -> int:
        # A node that was started again begins at 0.
        before_it: int = before[side].get(method, nothing).get(key, 0)
        return max(0, int(now[side][method][key]) - before_it)

    served = now["served"]
    delays = [0] * max((len(each["delays"]) for each in served.values()), default=0)
    for method, each in served.items():
        old = before["served"].get(method, nothing).get("delays", ())
        for power, count in enumerate(each["delays"]):
            delays[power] += max(0, count - (old[power] if power < len(old) else 0))
    made: dict[str, float] = {}
    for method in now["made"]:
        server = method.rpartition(": ")[0]
        made[server] = made.get(server, 0.0) + gained("made", method, "calls") / elapsed_s
    found = CallRates(
        sum(gained("served", method, "calls") for method in served) / elapsed_s,
        sum(made.values(), 0.0),
        sum(gained("served", method, "errors") for method in served) / elapsed_s,
        sum(each["queued"] for each in served.values()),
        quantile(delays, 0.5),
        quantile(delays, 0.99),
    )
    return found, made


def names_of(nodes: Iterable[NodeStatus]) -> dict[str, str]:
    """Returns the nodes, by each name and address that callers have of them."""
    return {
        name: each.name
        for each in nodes
        for name in (*each.endpoints, *each.endpoints.values(), each.name)
    }


class LastLines:
    """The last lines of the logs of a run. For one thread; reads only logs that have grown."""

    def __init__(self, log_dir: Path | None) -> None:
        self._log_dir = log_dir
        self._known: dict[str, tuple[int, str]] = {}

    def of(self, node: str) -> str:
        """Returns the last line of a node, or what there is of it; "" if it has no log."""
        size, line = self._known.get(node, (-1, ""))
        if self._log_dir is None:
            return ""
        try:
            path = log_path(self._log_dir, node)
            if (now := path.stat().st_size) != size:
                with path.open("rb") as file:
                    lines = end_of(file, _TAIL_BYTES).split(b"\n")
                *_, last = [b"", *filter(None, map(bytes.strip, lines))]
                self._known[node] = now, (line := plain(last.decode(errors="replace")))
        except OSError:
            pass
        return line


class ProgramView:
    """Looks at a running program. For one thread."""

    def __init__(self, inspector: "Inspector", log_dir: Path | None) -> None:
        self._inspector = inspector
        self._lines = LastLines(log_dir)
        self._meter = CallMeter()

    def look(self) -> ProgramSight:
        """Returns how it is now; a CourierError if the process that supervises it is gone."""
        title, nodes = self._inspector.status()
        try:
            answers = self._inspector.ask("numbers", timeout_s=_ASK_S)
        except LaunchError:  # its launcher cannot ask
            answers = {}
        answers = {node: each for node, each in answers.items() if "error" not in each}
        rates, edges = self._meter.look(answers, names_of(nodes))
        rows = [
            NodeRow(
                each,
                rates.get(each.name, CallRates()),
                self._lines.of(each.name),
                answers.get(each.name, {}),
            )
            for each in nodes
        ]
        return ProgramSight(title, rows, edges)
