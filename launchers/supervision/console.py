"""The merged output of all nodes, for people, and a way to print that blocks no caller.

The supervisor's thread must not print itself: a reader that stops reading (a pager, a stopped terminal, a
hung `tee`) would hold up the whole program.
"""

import collections
import contextlib
import functools
import io
import logging
import math
import os
import select
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol, TextIO

from launchers.supervision._terminal import Lines, LiveLines
from launchpad_lite.parts.escapes import shown

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
#: Most bytes that wait for a slow reader. Beyond that, lines are dropped until half has been read.
_MAX_WAITING_BYTES = 16 << 20
#: Bytes that a line, or a movement of the cursor, counts for beside its length, because each costs time. So
#: all that waits takes at most half a second.
_STEP_BYTES = 160
#: Milliseconds between two checks of a reader that takes nothing: its stream may have another descriptor.
_LOOK_MS = 1000
#: Seconds for which a program that has ended waits for a reader that takes nothing: its notice, within
#: these limits. If asked to end at once, it waits only the least.
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 10.0
_DRAW_S = 0.1  # seconds between two drawings of unfinished lines, at the least
#: Bytes to write, or a function that the writing thread calls for them.
_Piece = bytes | Callable[[], bytes]


class Output(Protocol):
    """Shows what nodes print. Thread-safe."""

    def show(self, node: str, data: bytes) -> None:
        """Gets output of a node and shows it."""

    def finish(self, node: str) -> None:
        """Shows the last line of a node, if it has no end."""


class Writer:
    """Writes bytes to a reader that may not read them. Thread-safe; only `drain` waits.

    A thread writes them, and exists only while there are any. It is a daemon, so that the interpreter can
    end. It writes to the descriptor and not to Python's stream: the interpreter crashes at its end if a
    daemon still locks a stream.
    """

    def __init__(
        self,
        find: Callable[[], int | TextIO | None],
        note: Callable[[int], bytes] = lambda _: b"",
        live: LiveLines | None = None,
        drawn_by: "Writer | None" = None,
    ) -> None:
        """Prepares it.

        `find` returns where to write: a descriptor, a stream that has none, or nowhere. `note`
        returns what to write in place of so many lines that were dropped. `live` are lines that
        stay below all other output, on a terminal; `drawn_by` is the writer that draws them, if it
        is another one.
        """
        self._find = find
        self._note = note
        self._live = live
        self._drawn_by = drawn_by
        #: Whether these lines must be drawn, and the earliest time for it.
        self._is_stale = False
        self._draw_at = -math.inf
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[_Piece, int, int]] = collections.deque()
        self._waiting_bytes = 0
        self._dropped_lines = 0
        self._thread: threading.Thread | None = None
        #: How many pieces were put, how many were written, and how often the reader took something. The
        #: last tells a slow reader from one that stands still.
        self._put = self._written = self._taken = 0
        #: Whether the reader had no room for the next bytes. If it had, the thread got no turn.
        self._is_refused = False

    def put(self, data: _Piece, lines: int = 1, *, size: int = 0, must: bool = False) -> bool:
        """Queues something to be written; drops it if too much waits. Returns whether it is queued.

        `data` are whole lines, or a function that the writing thread calls for them and that counts
        for `size` bytes. With `must`, for rare pieces, it is queued in any case.
        """
        size = len(data) if isinstance(data, bytes) else size
        with self._changed:
            limit = _MAX_WAITING_BYTES // 2 if self._dropped_lines else _MAX_WAITING_BYTES
            if self._waiting_bytes + size > limit and not must:
                self._dropped_lines += lines
                return False
            self._add_note()
            self._add(data, lines, size)
            is_alone = not self._start()
        if is_alone:
            self._work(0)
        return True

    def redraw(self) -> None:
        """Requests a drawing of the unfinished lines; many requests are one drawing."""
        with self._changed:
            self.note_stale()
            is_alone = not self._start()
        if is_alone:
            self._work(0)

    def note_stale(self) -> None:
        """Requests a drawing from a function that the writing thread calls: that thread runs already."""
        with self._changed:
            if not self._is_stale:
                self._is_stale = True
                self._put += 1

    def _add(self, data: _Piece, lines: int, size: int) -> None:
        self._waiting.append((data, lines, size))
        self._waiting_bytes += size
        self._put += 1

    def _add_note(self) -> None:
        if self._dropped_lines:
            self._add(self._note(self._dropped_lines), self._dropped_lines, 0)
            self._dropped_lines = 0

    def _start(self) -> bool:
        """Starts a thread that writes, if there is none; returns whether there is one."""
        if self._thread is None or not self._thread.is_alive():  # as after a fork
            thread = threading.Thread(
                target=self._work, args=(_LOOK_MS,), name="launchpad-output", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end, or has no room
                return False
            self._thread = thread
        return True

    def drain(self, patience_s: Callable[[], float]) -> int:
        """Waits until all is written or the reader takes nothing; returns how many are left."""
        with self._changed:
            self._add_note()
            if (self._waiting or self._is_stale) and not self._start():
                return sum(lines for _, lines, _ in self._waiting)
            self._draw_at = -math.inf
            self._changed.notify_all()
            last, taken, taken_at = self._put, self._taken, time.monotonic()
            while self._written < last:
                self._changed.wait(0.05)
                now = time.monotonic()
                if self._taken != taken or not self._is_refused:
                    taken, taken_at = self._taken, now
                elif now - taken_at >= patience_s():
                    return sum(lines for _, lines, _ in self._waiting) + self._dropped_lines
            thread = None if self._waiting or self._is_stale else self._thread
        if thread is not None:
            thread.join(1.0)  # it is about to end, and a test may count threads
        return 0

    def _work(self, look_ms: int) -> None:
        while True:
            with self._changed:
                while look_ms and self._is_stale and not self._waiting:
                    if (early_s := self._draw_at - time.monotonic()) <= 0:
                        break
                    self._changed.wait(early_s)
                if not self._waiting and not self._is_stale:
                    if self._thread is threading.current_thread():
                        self._thread = None
                    return
                data, _, size = self._waiting[0] if self._waiting else (None, 0, 0)
                # While lines come fast, unfinished ones are drawn at intervals only.
                is_last = len(self._waiting) == 1
                draws = data is None or (is_last and time.monotonic() >= self._draw_at)
                drawn = int(draws and self._is_stale)
                if draws:
                    self._is_stale = False
            # There may be no reader: no stream, or one that is closed or broken.
            with contextlib.suppress(Exception):
                said = data() if callable(data) else data or b""
                self._write(self._with_live_lines(said, draws=draws), look_ms)
            with self._changed:
                self._is_refused = False
                if data is not None:
                    self._waiting.popleft()
                    self._waiting_bytes -= size
                self._written += drawn + (data is not None)
                self._taken += 1
                self._changed.notify_all()

    def _with_live_lines(self, data: bytes, *, draws: bool) -> bytes:
        """Returns data with the escape sequences that keep unfinished lines below it."""
        target = self._find()
        if self._live is None or not isinstance(target, int) or not os.isatty(target):
            return data
        before = (self._live.erase() if data else "").encode()
        if self._drawn_by is not None:
            if before:
                self._drawn_by.redraw()
            return before + data
        if not draws:
            if before:
                self.note_stale()
            return before + data
        now = time.monotonic()
        self._draw_at = now + _DRAW_S
        size = shutil.get_terminal_size()
        picture = self._live.draw(size.columns, size.lines, now)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        return before + data + picture.encode(encoding, "replace")

    def _write(self, data: bytes, look_ms: int) -> None:
        view = memoryview(data)
        while view and (target := self._find()) is not None:
            if not isinstance(target, int):
                encoding = getattr(target, "encoding", None) or "utf-8"
                self._is_refused = True  # it may be: a stream does not tell
                target.write(data.decode(encoding, "replace"))
                target.flush()
                return
            room = select.poll()
            room.register(target, select.POLLOUT)
            if not room.poll(0):
                self._is_refused = True
                if look_ms == 0:
                    return
                room.poll(look_ms)
                continue
            try:
                # A descriptor that is ready takes at least as many bytes as a pipe takes in one piece.
                view = view[os.write(target, view[: select.PIPE_BUF]) :]
                self._taken += 1
                self._is_refused = False
            except BlockingIOError:  # a terminal that does not block may take fewer
                self._is_refused = True
                time.sleep(0.01)


def _standard(name: str) -> Callable[[], int | TextIO | None]:
    """Returns a function that finds a standard stream, which the user may replace at any time."""

    def find() -> int | TextIO | None:
        stream: TextIO | None = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        # Another descriptor may be closed, and opened for another file, while the thread waits.
        if isinstance(raw, io.FileIO) and (number := raw.fileno()) in (1, 2):
            return number
        return stream

    return find


def _not_shown(lines: int) -> bytes:
    what = "1 line was" if lines == 1 else f"{lines:,} lines were"
    return f"launchpad: {what} not shown: they were not read in time. The log files have them.\n".encode()


_LIVE = LiveLines()
_OUT = Writer(_standard("stdout"), _not_shown, _LIVE)
_ERR = Writer(_standard("stderr"), live=_LIVE, drawn_by=_OUT)


def tell(text: str, end: str = "\n") -> None:
    """Prints a message to standard error; does not wait."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    _ERR.put(f"{shown(text)}{end}".encode(encoding, "backslashreplace"))


def warn(
    logger: logging.Logger, text: str, *values: object, error: BaseException | None = None
) -> None:
    """Logs a warning; if the user has set up no handler, prints it without waiting for a reader."""
    level = logging.WARNING if error is None else logging.ERROR
    values = tuple(shown(str(v)) if isinstance(v, str | Exception) else v for v in values)
    if logger.hasHandlers():
        logger.log(level, text, *values, exc_info=error)
    elif logger.isEnabledFor(level):
        trace = "" if error is None else "\n" + "".join(traceback.format_exception(error))
        tell(f"{text % values}{trace}")


def show_rest(notice_s: float, is_in_hurry: Callable[[], bool], last: str = "") -> None:
    """Waits until all output has been read, or the reader stops reading; then prints `last`."""

    def patience_s() -> float:
        most = _LEAST_PATIENCE_S if is_in_hurry() else _MOST_PATIENCE_S
        return max(_LEAST_PATIENCE_S, min(most, notice_s if notice_s >= 0 else most))

    if left := _OUT.drain(patience_s):
        _ERR.put(_not_shown(left))
    if last:
        tell(last)
    _ERR.drain(lambda: _LEAST_PATIENCE_S)


class Console:
    """Prints lines of many nodes, each with the node's name. Thread-safe; never blocks.

    Coloured on a terminal, plain elsewhere. Lines stay whole: a piece without an end waits for the rest. A
    terminal shows it meanwhile below all finished lines; elsewhere only its last state is printed. Lines
    that are not read in time are counted and left out. `show_rest` waits for them.
    """

    def __init__(self) -> None:
        """Flushes what this process has printed so far, which may block."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        self._lock = threading.Lock()
        self._nodes: dict[str, Lines] = {}
        self._colours: dict[str, int] = {}
        self._is_torn: dict[str, bool] = {}  # whether the last output of a node was dropped

    def show(self, node: str, data: bytes) -> None:
        lines = data.count(b"\n")
        size = len(data) + _STEP_BYTES * (lines + data.count(b"\x1b"))
        # The writing thread makes the lines, because the thread that reads a host's link must not be late.
        piece = functools.partial(self._show, node, data, self._is_torn.get(node, False))
        self._is_torn[node] = not _OUT.put(piece, max(lines, 1), size=size)

    def finish(self, node: str) -> None:
        """Prints the last line of a node, if it has no end."""
        _OUT.put(functools.partial(self._finish, node), 0, must=True)

    def _show(self, node: str, data: bytes, is_torn: bool) -> bytes:
        with self._lock:
            output = self._nodes.setdefault(node, Lines())
            # Dropped output may have ended the line.
            lines = (output.finish() if is_torn else []) + output.feed(data)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
                if self._is_live():
                    rest = self._named(node, output.unfinished())
                    if _LIVE.put((self, node), rest, time.monotonic()) and not lines:
                        _OUT.note_stale()
            return self._text(node, lines)

    def _finish(self, node: str) -> bytes:
        with self._lock:
            lines = self._nodes.pop(node, Lines()).finish()
            if _LIVE.forget((self, node)) and not lines:
                _OUT.note_stale()
            return self._text(node, lines)

    def _is_live(self) -> bool:
        # Not at a prompt of Python: the lines would overwrite it.
        is_plain = _is_dumb() or hasattr(sys, "ps1")
        return sys.stdout.isatty() and not is_plain

    def _text(self, node: str, lines: list[bytes]) -> bytes:
        if not lines or sys.stdout is None:  # a service may have no stream
            return b""
        text = "".join(f"{line}\n" for line in self._named(node, lines))
        return text.encode(getattr(sys.stdout, "encoding", None) or "utf-8", "backslashreplace")

    def _named(self, node: str, lines: list[bytes]) -> list[str]:
        prefix = self._prefix(node)
        return [f"{prefix} {shown(line.decode(errors='replace'))}" for line in lines]

    def _prefix(self, node: str) -> str:
        if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or _is_dumb():
            return f"[{node}]"
        label = node.partition("[")[0]
        colour = self._colours.setdefault(label, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m[{node}]\x1b[0m"


def _is_dumb() -> bool:
    """Returns whether the terminal knows no colours and no movements of the cursor."""
    return os.environ.get("TERM") == "dumb"
