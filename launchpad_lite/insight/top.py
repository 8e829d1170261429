"""`top`: the nodes of a running program, as a table that is renewed."""

import itertools
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launchpad_lite.insight._view import NodeRow, ProgramSight, ProgramView
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.launching.status_table import text_table
from launchpad_lite.parts.escapes import shown

#: Seconds between two looks; looks take at most one part in so many of the time.
PERIOD_S, REST = 1.0, 40
_HEAD = (
    *("node", "state", "cores", "MiB", "GPU MiB", "calls/s in", "out"),
    *("errors/s", "queued", "p50", "p99", "restarts", "last line"),
)
_HOME, _TO_END, _TO_END_OF_LINE = "\x1b[H", "\x1b[J", "\x1b[K"


def table_of(nodes: Sequence[NodeRow]) -> tuple[list[str], list[list[object]]]:
    """Returns the names of columns, and a row for each node; with GPU memory if one holds some."""
    has_gpu = any(each.status.gpu_memory_mib is not None for each in nodes)
    shows = [has_gpu or name != "GPU MiB" for name in _HEAD]
    rows = [[*itertools.compress(_cells(each), shows)] for each in nodes]
    return [*itertools.compress(_HEAD, shows)], rows


def _cells(row: NodeRow) -> Sequence[object]:
    status, rates = row.status, row.rates
    return (
        status.name,
        status.state,
        status.cpu,
        status.memory_mib,
        status.gpu_memory_mib,
        rates.in_s,
        rates.out_s,
        rates.errors_s,
        rates.queued,
        _delay(rates.p50_s),
        _delay(rates.p99_s),
        status.restarts,
        row.last_line,
    )


def _delay(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def render(sight: ProgramSight, columns: int | None = None, lines: int | None = None) -> str:
    """Returns the table as text; with a limit of lines, of the nodes that use most."""
    rows = list(sight.rows)
    if lines is not None and len(rows) > (most := max(1, lines - 4)):
        busiest = sorted(rows, key=lambda row: -(row.status.cpu or 0.0))[:most]
        rows = [row for row in rows if row in busiest]
    head, found = table_of(rows)
    text = [sight.title, *text_table([head, *found]).split("\n")]
    if left := len(sight.rows) - len(rows):
        text.append(f"and {left} more, which use less")
    return "\n".join(line if columns is None else line[: columns - 1] for line in map(shown, text))


def show_top(inspector: Inspector, log_dir: Path | None) -> None:
    """Shows the nodes until the program ends or Ctrl-C; once, if the output is no terminal."""
    view = ProgramView(inspector, log_dir)
    sight = view.look()  # rates need two
    if not sys.stdout.isatty():
        inspector.join(PERIOD_S)
        print(render(view.look()))  # noqa: T201 - what a command line is for
        return
    try:
        from launchpad_lite.insight._top_app import TopApp
    except ImportError:  # the extra is not installed
        _show_plainly(inspector, view, sight)
    else:
        TopApp(inspector, view).run()


def _show_plainly(inspector: Inspector, view: ProgramView, sight: ProgramSight) -> None:
    has_ended, took_s = False, 0.0
    print(f"{_HOME}{_TO_END}", end="")  # noqa: T201
    while True:
        size = shutil.get_terminal_size()
        text = render(sight, size.columns, size.lines)
        # Over what is there, so that it does not flicker.
        text = text.replace("\n", f"{_TO_END_OF_LINE}\n")
        print(f"{_HOME}{text}{_TO_END_OF_LINE}\n{_TO_END}", end="", flush=True)  # noqa: T201
        if has_ended:
            return
        has_ended = inspector.join(max(PERIOD_S, REST * took_s))
        began_at = time.monotonic()
        sight = view.look()
        took_s = time.monotonic() - began_at
