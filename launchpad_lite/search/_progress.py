"""The table that a running search shows."""

import sys
import time
from typing import TextIO

from launchpad_lite.search._model_node import Status

_WIDTHS = {
    "queued": 7,
    "running": 8,
    "done": 7,
    "failed": 7,
    "stopped": 8,
    "again": 6,
    "lost": 5,
    "workers": 8,
    "best": 12,
}
#: Seconds between two rows where the output is no terminal.
_ROW_S = 10.0
_BAR = 16


class Table:
    """Shows how far a search is: one row, drawn again and again; in a pipe, a row every 10 s."""

    def __init__(self, total: int | None, out: TextIO | None = None) -> None:
        #: How many trials there will be, if that is known.
        self._total = total
        self._out = sys.stderr if out is None else out
        self._redraws = self._out.isatty()
        self._has_begun = False
        self._shown_at = time.monotonic()
        self._said: set[str] = set()

    def show(self, status: Status) -> None:
        for kind in status.unknown_kinds:
            if kind not in self._said:
                self._said.add(kind)
                self._out.write(f"tasks of kind {kind!r} wait, and no worker takes them\n")
        is_last = self._has_begun and status.is_over
        if not self._redraws and time.monotonic() < self._shown_at + _ROW_S and not is_last:
            return
        self._shown_at = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._out.write(
                "".join(f"{name:>{_WIDTHS[name]}}" for name in _WIDTHS) + "      time\n"
            )
        row = self._row(status)
        self._out.write(f"\r{row}\x1b[K" if self._redraws else f"{row}\n")
        self._out.flush()

    def _row(self, status: Status) -> str:
        best = "" if status.best is None else f"{status.best.score:.5g}"
        cells = [
            f"{best if name == 'best' else getattr(status, name):>{width}}"
            for name, width in _WIDTHS.items()
        ]
        minutes, seconds = divmod(int(status.seconds), 60)
        row = "".join(cells) + f" {minutes // 60:3}:{minutes % 60:02}:{seconds:02}"
        if self._total:
            ended = status.done + status.failed + status.stopped
            filled = "█" * min(_BAR, _BAR * ended // self._total)
            row += f" [{filled:<{_BAR}}] {ended}/{self._total}"
        return row

    def end(self) -> None:
        """Leaves the last row where it is."""
        if self._redraws and self._has_begun:
            self._out.write("\n")
            self._out.flush()
