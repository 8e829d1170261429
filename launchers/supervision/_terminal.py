"""Output of nodes as lines, and the lines that a terminal shows while they are unfinished.

A progress bar writes one line again and again, each time after a carriage return. This module decides which
lines that becomes; `console` writes them.
"""

import re
import threading
import unicodedata
from collections.abc import Hashable, Sequence

_MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in pieces
_SHOWN_BYTES = 4096  # more than the width of any terminal
_MOST_ROWS = 50  # how many lines output may move up: more than any nested bars need
#: Ends of lines, and escape sequences other than colours.
_CONTROL = re.compile(rb"(\n|\x1b\[[0-?]*[ -/]*[@-ln-~])")
_BEGUN_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*)?")
_LONGEST_SEQUENCE = 32
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_ERASE = "\r\x1b[J"
#: Seconds without a change after which a line gives its place to others, if not all have room.
_FRESH_S = 5.0


class Lines:
    """The output of one node, cut into lines as a terminal would show them in the end.

    Text after a carriage return replaces the line. Output may move the cursor up, as bars below each other
    do. It may then change the lines that it came back to, until it ends the lowest of them. Colours stay;
    other escape sequences that begin with `ESC [` are left out. For one thread.
    """

    def __init__(self) -> None:
        self._rows = [b""]  # lines that may still change; the last is the lowest
        self._at = 0
        self._begun_sequence = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in output; returns the lines that are finished now, without their ends."""
        data = self._begun_sequence + data
        start = data.rfind(b"\x1b", max(0, len(data) - _LONGEST_SEQUENCE))
        is_begun = start >= 0 and _BEGUN_SEQUENCE.fullmatch(data, start)
        data, self._begun_sequence = (data[:start], data[start:]) if is_begun else (data, b"")
        finished: list[bytes] = []
        if b"\x1b" not in data and len(self._rows) == 1:  # most output; much faster
            *lines, rest = (self._rows[0] + data).split(b"\n")
            finished = [_last_state(line).rstrip(b"\r") for line in lines]
            self._rows = [_last_state(rest)]
        else:
            for index, part in enumerate(_CONTROL.split(data)):
                if index % 2 == 0:
                    self._rows[self._at] = _last_state(self._rows[self._at] + part)
                elif part == b"\n":
                    finished += self._end_line()
                else:
                    self._obey(part)
        if len(self._rows[self._at]) > _MAX_LINE_BYTES:
            finished += self.finish()
        return finished

    def finish(self) -> list[bytes]:
        """Returns the lines that are not finished and not empty, as they are, and forgets them."""
        rows, self._rows, self._at = self._rows, [b""], 0
        return [text for row in rows if (text := row.rstrip(b"\r")).strip()]

    def unfinished(self) -> list[bytes]:
        """Returns the beginnings of these lines, and keeps them."""
        rows = (row[:_SHOWN_BYTES].rstrip(b"\r") for row in self._rows)
        return [row for row in rows if row.strip()]

    def _end_line(self) -> list[bytes]:
        if self._at < len(self._rows) - 1:
            self._at += 1
            return []
        if len(self._rows) > 1:
            return self.finish()
        line, self._rows[0] = self._rows[0].rstrip(b"\r"), b""
        return [line]

    def _obey(self, sequence: bytes) -> None:
        arguments, how = sequence[2:-1], sequence[-1:]
        count = max(1, int(arguments)) if arguments.isdigit() else 1
        if how in b"AF":
            missing = min(count - self._at, _MOST_ROWS - len(self._rows))
            if missing > 0:
                self._rows[:0] = [b""] * missing
                self._at += missing
            self._at = max(0, self._at - count)
        elif how in b"BE":
            self._at = min(len(self._rows) - 1, self._at + count)
        elif how == b"K" and (arguments == b"2" or self._rows[self._at].endswith(b"\r")):
            self._rows[self._at] = b""
        if how in b"EF":
            self._rows[self._at] = _last_state(self._rows[self._at] + b"\r")


def _last_state(row: bytes) -> bytes:
    """Returns what a terminal shows in a row. Carriage returns at its end stay, as the next text replaces the row."""
    if b"\r" not in row:
        return row
    body = row.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + (b"\r" if len(body) < len(row) else b"")


class LiveLines:
    """The unfinished lines at the bottom of a terminal, below all finished ones. Thread-safe.

    The cursor stays at the beginning of the first of them. So text that other programs print comes above
    them, though it may mix with the first. If its width changes, a terminal moves cursor and lines
    together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[Hashable, tuple[Sequence[str], float]] = {}
        self._is_drawn = False

    def put(self, owner: Hashable, lines: Sequence[str], now: float) -> bool:
        """Replaces the lines of an owner, which keeps its place; returns whether they differ."""
        with self._lock:
            before, _ = self._lines.get(owner, ((), now))
            self._lines[owner] = lines, now
            return before != lines

    def forget(self, owner: Hashable) -> bool:
        """Removes the lines of an owner; returns whether there were any."""
        with self._lock:
            lines, _ = self._lines.pop(owner, ((), 0.0))
            return bool(lines)

    def erase(self) -> str:
        """Returns the text that removes the lines from the terminal; "" if none are drawn."""
        with self._lock:
            was_drawn, self._is_drawn = self._is_drawn, False
            return _ERASE if was_drawn else ""

    def draw(self, columns: int, rows: int, now: float) -> str:
        """Returns the text that draws the lines on a terminal, in place of the drawn ones.

        They take half of its height at most. If that is too little, lines that changed lately come
        first.
        """
        with self._lock:
            shown = _choose([*self._lines.values()], max(1, rows // 2), now)
            self._is_drawn |= bool(shown)
        if not shown:
            return self.erase()
        # One column stays free: a terminal that filled the last one may begin the next line.
        text = "\n".join(f"{_cut(line, columns - 1)}\x1b[K" for line in shown)
        up = f"\x1b[{len(shown) - 1}A" if len(shown) > 1 else ""
        return f"\r{text}\x1b[J\r{up}"


def _choose(owners: list[tuple[Sequence[str], float]], room: int, now: float) -> list[str]:
    lines = [line for each, _ in owners for line in each]
    if len(lines) <= room:
        return lines
    # Lines that changed lately, in their old order: people cannot read lines that change places.
    fresh = [line for each, changed_at in owners for line in each if now - changed_at < _FRESH_S]
    stale = [line for each, changed_at in owners for line in each if now - changed_at >= _FRESH_S]
    if room == 1:
        return (fresh + stale)[:1]
    return [*(fresh + stale)[: room - 1], f"... and {len(lines) - room + 1} more lines"]


def _cut(line: str, columns: int) -> str:
    """Returns the beginning of a line that takes so many columns at most, with its colours."""
    taken, kept = 0, []
    for index, piece in enumerate(_COLOUR.split(line)):
        if index % 2:
            kept.append(piece)
            continue
        for character in piece:
            taken += _width(character)
            if taken > columns:
                break
            kept.append(character if character.isprintable() else " ")
    text = "".join(kept)
    return f"{text}\x1b[0m" if "\x1b" in text else text


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
