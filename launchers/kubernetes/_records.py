"""The records in a supervisor's log: numbered lines of text. Pure.

One record per line, `<number> <kind> <rest>`; numbers count from 1 for each process:

| kind | rest |
|---|---|
| `out` | `<node> <text>`: a line that a node printed |
| `part` | the same, of a line that continues in the node's next record |
| `up`, `status`, `answer`, `end` | `<i>/<k> <piece>`: JSON, cut into pieces |

Records are shorter than the limit at which container runtimes cut lines. Any other line of the log,
like the last words of an interpreter that crashes, counts as output of the supervisor.
"""

import hashlib
import hmac
import json
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from launchers.hosts.elsewhere import ProgramEnd
from launchers.kubernetes._agreed import SUPERVISOR
from launchers.supervision.console import Writer
from launchpad_lite.launching import NodeFailure, NodeStatus, ProgramResult
from launchpad_lite.parts.as_json import from_json, to_json

#: Bytes of text in one record. Container runtimes cut lines at 16 KiB.
_PIECE_BYTES = 8000
#: Of a larger exception, which may hold arrays, only the text is sent.
_PARCEL_BYTES = 256 << 10
#: A longer record of the end is shortened, because kubelets keep only 10 MiB of a log by default.
_END_BYTES = 4 << 20
#: The shortest form has at most so many failures, with so many characters of each.
_MAX_HEADLINES = 100
_HEADLINE_CHARACTERS = 2000

_RECORD = re.compile(r"([1-9][0-9]{0,14}) (out|part|up|status|answer|end) (.*)", re.DOTALL)
_NODE = re.compile(r"([^\[\]]+\[[0-9]+\]) (.*)", re.DOTALL)
_PIECE = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8}) (.*)", re.DOTALL)
_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (.*)", re.DOTALL
)


@dataclass(frozen=True)
class PrintedRecord:
    """A line that a node printed, with its end, or the supervisor, under the name `supervisor`."""

    node: str
    data: bytes


@dataclass(frozen=True)
class Note:
    """What is wrong with the log, for people."""

    text: str


@dataclass(frozen=True)
class Up:
    """All nodes are placed."""


@dataclass(frozen=True)
class StatusRecord:
    """How each node was.

    The supervisor waits for pods with the `awaited` host names. It sends nothing to earlier pods of
    these names.
    """

    nodes: tuple[NodeStatus, ...]
    awaited: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerRecord:
    """The answer to a question."""

    question: str
    text: str


Record = PrintedRecord | Note | Up | StatusRecord | AnswerRecord | ProgramEnd
#: Those that are JSON, cut into pieces.
_KINDS = {"up": Up, "status": StatusRecord, "answer": AnswerRecord, "end": ProgramEnd}


class RecordWriter:
    """Writes records. Thread-safe.

    `show` and `finish` are those of a `Console`. If the log cannot be written, all methods return at
    once and raise nothing. The numbers show a reader how many records were left out.
    """

    def __init__(self, descriptor: int, key: bytes) -> None:
        """Writes to a blocking descriptor, which the caller closes; seals the end with a key."""
        self._writer = Writer(lambda: descriptor)
        self._key = key
        self._lock = threading.Lock()
        self._number = 0
        self._unfinished: dict[str, bytes] = {}

    def show(self, node: str, data: bytes) -> None:
        with self._lock:
            *lines, rest = (self._unfinished.pop(node, b"") + data).split(b"\n")
            records = [record for line in lines for record in _output_records(node, line)]
            # A long line is shown before its end, because progress bars never end a line.
            *pieces, rest = _pieces(rest)
            records += [(b"part", node.encode() + b" " + piece) for piece in pieces]
            if rest:
                self._unfinished[node] = rest
            self._write(records)

    def finish(self, node: str) -> None:
        with self._lock:
            if rest := self._unfinished.pop(node, b""):
                self._write(_output_records(node, rest))

    def say(self, record: Up | StatusRecord | AnswerRecord) -> None:
        """Writes a record; all but that of the placed nodes may be left out if the log is slow."""
        kind = next(name for name, each in _KINDS.items() if isinstance(record, each))
        text = json.dumps(to_json(record))
        self._write_json(kind.encode(), text, must=isinstance(record, Up))

    def end(self, end: ProgramEnd) -> None:
        """Writes how the program ended, shortened if the kubelet might not keep all of it."""
        forms = (json.dumps(to_json(each, most_bytes=_PARCEL_BYTES)) for each in _shortened(end))
        text = next(text for text in forms if len(text) < _END_BYTES)
        self._write_json(b"end", f"{_seal(self._key, text)} {text}", must=True)

    def drain(self, patience_s: float) -> None:
        """Waits until all is written; gives up when nothing was written for `patience_s` seconds."""
        self._writer.drain(lambda: patience_s)

    def _write_json(self, kind: bytes, text: str, *, must: bool) -> None:
        pieces = [*_pieces(text.encode("ascii"))]
        with self._lock:
            records = (
                (kind, b"%d/%d %b" % (index, len(pieces), piece))
                for index, piece in enumerate(pieces, start=1)
            )
            self._write(records, must=must)

    def _write(self, records: Iterable[tuple[bytes, bytes]], *, must: bool = False) -> None:
        data = bytearray()
        for kind, rest in records:
            self._number += 1
            data += b"%d %b %b\n" % (self._number, kind, rest)
        if data:
            self._writer.put(bytes(data), must=must)


def _output_records(node: str, line: bytes) -> list[tuple[bytes, bytes]]:
    *parts, last = _pieces(line)
    head = node.encode() + b" "
    return [*((b"part", head + part) for part in parts), (b"out", head + last)]


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cuts data into at least one piece, never within a character, because logs may be text."""
    start = 0
    while len(data) - start > _PIECE_BYTES:
        end = start + _PIECE_BYTES
        for back in range(4):
            if data[end - back] & 0xC0 != 0x80:  # where a character begins
                end -= back
                break
        yield data[start:end]
        start = end
    yield data[start:]


class RecordReader:
    """Reads the log of one process; returns each record once, even if the log is read again.

    Each line of the log has a time stamp.
    """

    def __init__(self, key: bytes | None) -> None:
        """Prepares it. Without the key for the seal of the end, exceptions stay texts."""
        self._key = key
        self.last_number = 0
        #: Lines without a number that were read; only their time stamps identify them.
        self._strays: set[str] = set()
        self._pieces: list[str] = []

    def feed(self, line: str) -> list[Record]:
        """Takes in a line without its end; returns its records: none if the line was read before.

        Bytes that are no UTF-8 are as `surrogateescape` has them.
        """
        if (stamped := _STAMP.fullmatch(line)) is None:
            # A kubelet that cannot read the log sends an error message as its content, with status 200.
            return []
        text = stamped[1]
        if (record := _RECORD.fullmatch(text)) is not None:
            number, kind, rest = int(record[1]), record[2], record[3]
            if number <= self.last_number:
                return []
            found = self._read(kind, rest, number == self.last_number + 1)
            if found is not None:
                lost, self.last_number = number - self.last_number - 1, number
                lines = "1 line of the log was" if lost == 1 else f"{lost} lines of the log were"
                return [Note(f"{lines} lost"), *found] if lost else found
        if line in self._strays:
            return []
        self._strays.add(line)
        return [PrintedRecord(SUPERVISOR, _encoded(f"{text}\n"))]

    def _read(self, kind: str, rest: str, is_next: bool) -> list[Record] | None:
        """Returns what a record says; None if it is no record."""
        if kind in ("out", "part"):
            if (parts := _NODE.fullmatch(rest)) is None:
                return None
            return [PrintedRecord(parts[1], _encoded(parts[2] + ("\n" if kind == "out" else "")))]
        if (parts := _PIECE.fullmatch(rest)) is None:
            return None
        index, count = int(parts[1]), int(parts[2])
        if index == 1 or not is_next:
            self._pieces = []  # what was there is incomplete for good
        if index != len(self._pieces) + 1:
            return []
        self._pieces.append(parts[3])
        if index < count:
            return []
        text, self._pieces = "".join(self._pieces), []
        try:
            return [self._decode(kind, text)]
        except Exception:  # noqa: BLE001 - any process may print what looks like a record
            return [Note(f"a record of the log cannot be read: {kind} {text[:200]}")]

    def _decode(self, kind: str, text: str) -> Record:
        is_ours = False
        if kind == "end":
            seal, _, text = text.partition(" ")
            is_ours = self._key is not None and hmac.compare_digest(
                seal.encode(), _seal(self._key, text).encode()
            )
        record: Record = from_json(_KINDS[kind], json.loads(text), is_trusted=is_ours)
        return record


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _seal(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _shortened(end: ProgramEnd) -> Iterator[ProgramEnd]:
    """Yields shorter and shorter forms; the last one is always short enough."""
    yield end
    yield replace(end, stacks={})
    result = end.result
    failures = tuple(map(_headline_of, result.failures[:_MAX_HEADLINES]))
    restarts = tuple(
        replace(each, failure=each.failure and _headline_of(each.failure))
        for each in result.restarts[-_MAX_HEADLINES:]
    )
    reason = result.reason[:_HEADLINE_CHARACTERS]
    short = ProgramResult(result.outcome, failures, reason, result.signum, restarts=restarts)
    yield ProgramEnd(short, {})


def _headline_of(failure: NodeFailure) -> NodeFailure:
    summary = failure.summary[:_HEADLINE_CHARACTERS]
    return replace(
        failure, summary=summary, report=None, last_output="", stacks="", calls="", restarts=()
    )
