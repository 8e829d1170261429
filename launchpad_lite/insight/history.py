"""What is kept of a run in its folder: `history.jsonl`, rows of JSON that docs/insight.md describes."""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from courier.lowlevel import surviving
from launchpad_lite.insight._view import CallMeter, names_of
from launchpad_lite.launching import LaunchPlan, NodeStatus, Outcome, ProgramResult
from launchpad_lite.life.events import Logged
from launchpad_lite.parts.private_files import open_private, write_private

FILE = "history.jsonl"
Row = dict[str, Any]
#: Seconds between two rows of a node, by their age in seconds; longer if the file would be too long.
_WIDTHS_S = ((300.0, 1.0), (3600.0, 10.0), (86400.0, 60.0), (math.inf, 600.0))
_MOST_BYTES = 20 << 20
#: What is read at once: 40,000 rows, in a quarter of a second.
_MOST_READ_BYTES = 4 << 20
#: Seconds between two looks; a look takes at most one part in so many of the time.
_PERIOD_S, _REST = 1.0, 100


def thin(lines: Iterable[bytes], now: float, most_bytes: float) -> list[bytes]:
    """Returns the lines that stay: the older, the fewer; those where the state changes, and their order."""
    kept, scale = list(_thinned(lines, now, 1.0)), 1.0
    while sum(map(len, kept)) > most_bytes and scale < 1e6:
        scale *= 2
        kept = list(_thinned(kept, now, scale))
    return kept


def _thinned(lines: Iterable[bytes], now: float, scale: float) -> Iterator[bytes]:
    before: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for line in lines:
        if (row := _parsed(line)) is None:
            continue
        width_s = next(width for limit, width in _WIDTHS_S if now - row["t"] <= limit) * scale
        curve = tuple(row.get(name) for name in ("kind", "node", "name", "to"))
        place = (row["t"] // width_s, row.get("state"), row.get("restarts"))
        if row["kind"] in ("program", "end") or before.get(curve) != place:
            before[curve] = place
            yield line


def _parsed(line: bytes) -> Row | None:
    """Returns a row; None for half a line, as a full disk leaves."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("t"), int | float) and "kind" in row:
            return row
    return None


class FollowedHistory:
    """The rows in the folder of a run, which may still grow. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file_id: tuple[int, int] | None = None
        self._at = 0

    def read(self) -> tuple[bool, list[Row]]:
        """Returns whether it was written again, thinned, and rows that are new; there may be more."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                was, self._file_id = self._file_id, (status.st_dev, status.st_ino)
                is_other = was not in (None, self._file_id)
                file.seek(0 if is_other else self._at)
                whole = file.read(_MOST_READ_BYTES).rpartition(b"\n")[0]
                self._at = (0 if is_other else self._at) + len(whole) + bool(whole)
        except FileNotFoundError:  # it has not begun
            return False, []
        return is_other, [row for row in map(_parsed, whole.split(b"\n")) if row is not None]


class RowMaker:
    """Makes rows of what changes. For one thread."""

    def __init__(self) -> None:
        self._before: dict[str, Row] = {}
        self._meter = CallMeter()

    def of_states(self, nodes: Iterable[NodeStatus]) -> Iterator[Row]:
        """Yields a row for each node that has changed."""
        now = round(time.time(), 3)
        for each in nodes:
            has_ended = each.state in ("ended", "failed")  # and uses nothing any more
            row: Row = {
                "kind": "node",
                "node": each.name,
                "state": each.state,
                "restarts": each.restarts,
                "host": each.host,
                "cpu": None if each.cpu is None or has_ended else round(each.cpu, 2),
                "mib": None if each.memory_mib is None or has_ended else round(each.memory_mib),
                "gpu_mib": None if has_ended else each.gpu_memory_mib,
            }
            if self._before.get(each.name) != row:
                self._before[each.name] = row
                yield {"t": now, **row}

    def of_numbers(
        self, answers: Mapping[str, Mapping[str, Any]], nodes: Iterable[NodeStatus]
    ) -> Iterator[Row]:
        """Yields rates of calls, and metrics, of answers to the question `numbers`."""
        now = round(time.time(), 3)
        rates, edges = self._meter.look(answers, names_of(nodes))
        for node, found in rates.items():
            yield {"t": now, "kind": "calls", "node": node, **found._asdict()}
        for (caller, callee), calls_s in edges.items():
            yield {"t": now, "kind": "edge", "node": caller, "to": callee, "calls_s": calls_s}
        for node, answer in answers.items():
            metrics = answer.get("metrics") or {"counter": {}, "gauge": {}, "view": {}}
            for name, value in {**metrics["counter"], **metrics["gauge"]}.items():
                yield {"t": now, "kind": "metric", "node": node, "name": name, "value": value}
            yield from _of_views(now, node, metrics["view"])


def _of_views(now: float, node: str, views: Mapping[str, Any]) -> Iterator[Row]:
    for name, value in views.items():
        if value is not None:
            yield {"t": now, "kind": "view", "node": node, "name": name, "value": value}


class RunHistory:
    """Writes what happens in a program into its folder, once a second, in a thread of its own.

    It begins after the first second. A program that fails sooner gets its rows at its end.
    """

    def __init__(
        self,
        folder: Path,
        plan: LaunchPlan,
        status: Callable[[], Sequence[NodeStatus]],
        warn: Callable[[str], object],
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._path = folder / FILE
        self._plan = plan
        self._status = status
        self._warn = warn
        self._most_bytes = most_bytes
        self._size = 0
        self._has_begun = self._has_failed = False
        self._lock = threading.Lock()
        self._waiting: list[Logged | Mapping[str, Any]] = []  # what came since the last look
        self._make = RowMaker()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="launchpad-history", daemon=True)

    def start(self) -> None:
        """Begins. Without a thread for it, only the end is kept."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def note(self, what: Logged | Mapping[str, Any]) -> None:
        """Takes what a node logged, or answers to the question `numbers`. From any thread."""
        if self._thread.is_alive():  # else it would fill the memory
            with self._lock:
                self._waiting.append(what)

    def end(self, result: ProgramResult) -> None:
        """Writes the last rows, if there are others or the program has failed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._has_begun or result.outcome is Outcome.FAILED:
            end = {"kind": "end", "outcome": result.outcome.value, "reason": result.summary}
            self._write([*self._rows(), {"t": round(time.time(), 3), **end}])

    def _run(self) -> None:
        took_s = 0.0
        while not self._ended.wait(max(_PERIOD_S, _REST * took_s)) and not self._has_failed:
            began_at = time.thread_time()
            with surviving("the thread that keeps the history of a run"):
                self._write(list(self._rows()))
            took_s = time.thread_time() - began_at

    def _rows(self) -> Iterator[Row]:
        nodes = self._status()
        yield from self._make.of_states(nodes)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        # Several may look: the newest answers are those of all; first, because views of the end are newer.
        if answers := [each for each in waiting if not isinstance(each, Logged)]:
            yield from self._make.of_numbers(answers[-1], nodes)
        now = round(time.time(), 3)
        for each in (each for each in waiting if isinstance(each, Logged)):
            for name, value in each.values.items():
                number = value if math.isfinite(value) else None
                row = {"node": each.node, "name": name, "value": number, "step": each.step}
                yield {"t": now, "kind": "log", **row}
            yield from _of_views(now, each.node, each.views)

    def _write(self, rows: Sequence[Row]) -> None:
        if not self._has_begun:
            calls = {each.name: sorted(each.calls) for each in self._plan.executables}
            row = {"kind": "program", "program": self._plan.program, "nodes": calls}
            rows = [{"t": round(time.time(), 3), **row}, *rows]
        data = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        try:
            # Opened each time: it may be a drive that comes and goes.
            with os.fdopen(open_private(self._path), "ab") as file:
                file.write(data)
                self._size = file.tell()
            self._has_begun = True
            if self._size > self._most_bytes:
                with self._path.open("rb") as lines:
                    kept = thin(lines, time.time(), self._most_bytes / 2)
                write_private(self._path, b"".join(kept))
        except OSError as error:
            if not self._has_failed:
                self._warn(f"{self._path} cannot be written, so it ends here: {error}")
            self._has_failed = True
