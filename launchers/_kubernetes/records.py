"""What a supervisor says to readers of its log: numbered lines of text. Pure.

One record per line, `<number> <kind> <rest>`; numbers count from 1 for each process:

| kind | rest |
|---|---|
| `out` | `<node> <text>`: a line that a node printed |
| `part` | the same, of a line that continues in the node's next record |
| `note` | `<text>`: something people should know |
| `up`, `status`, `end` | `<i>/<k> <piece>`: JSON, cut into pieces |

Lines stay shorter than those that container runtimes cut. Everything else in the log, like what an
interpreter says that dies, has no such form and is output of the supervisor.
"""

import hashlib
import hmac
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launchers._console import Writer
from launchers._kubernetes.agreed import SUPERVISOR
from launchpad_lite._as_json import from_json, to_json
from launchpad_lite.launching import NodeFailure, NodeStatus, ProgramResult

#: Bytes of text in one record. Container runtimes cut lines at 16 KiB.
_PIECE_BYTES = 8000
#: Output of a node without an end of the line is shown once it is as long: progress bars never end
#: theirs.
_UNFINISHED_BYTES = _PIECE_BYTES
#: A larger exception stays behind, as its text alone; it may hold arrays.
_PARCEL_BYTES = 256 << 10
#: A longer account of the end is shortened: kubelets keep the last 10 MiB of a log, by default.
_END_BYTES = 4 << 20
#: What is left of it then, at the least: so many failures, and of each so much.
_MAX_HEADLINES = 100
_HEADLINE_CHARACTERS = 2000

_RECORD = re.compile(r"([1-9][0-9]{0,14}) (out|part|note|up|status|end) (.*)", re.DOTALL)
_NODE = re.compile(r"([^\[\]]+\[[0-9]+\]) (.*)", re.DOTALL)
_PIECE = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8}) (.*)", re.DOTALL)
_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (.*)", re.DOTALL
)
#: Lines without a number that are remembered, to be shown once.
_MAX_STRAYS = 10_000


# The records


@dataclass(frozen=True)
class Output:
    """A node printed something; `supervisor` is the supervisor itself.

    Attributes:
        node: `label[replica]`.
        data: What it printed, the end of the line included.
    """

    node: str
    data: bytes


@dataclass(frozen=True)
class Note:
    """Something people should know."""

    text: str


@dataclass(frozen=True)
class Up:
    """All nodes are placed.

    Attributes:
        hosts: Where each is, by its name.
    """

    hosts: Mapping[str, str]


@dataclass(frozen=True)
class Status:
    """How each node was."""

    nodes: tuple[NodeStatus, ...]


@dataclass(frozen=True)
class End:
    """How a program ended.

    Attributes:
        result: Of the program.
        stacks: Where the threads of each node were when it failed, by name.
    """

    result: ProgramResult
    stacks: Mapping[str, str]


Record = Output | Note | Up | Status | End


# Writing


class RecordWriter:
    """Writes records. Thread-safe.

    `show` and `finish` are those of a `Console`. A log that cannot be written to ends nothing:
    all methods go on without a word then, and without waiting. Who reads is told how many records were
    left out, because they are numbered.
    """

    def __init__(self, descriptor: int, key: bytes) -> None:
        """Prepares it.

        Args:
            descriptor: Where to write, blocking. It stays the caller's.
            key: For the seal of the end; known to the launching process, too.
        """
        self._writer = Writer(lambda: descriptor)
        self._key = key
        self._lock = threading.Lock()
        self._number = 0
        self._unfinished: dict[str, bytes] = {}

    def show(self, node: str, data: bytes) -> None:
        """Takes in output of a node and writes the lines that are complete."""
        with self._lock:
            *lines, rest = (self._unfinished.pop(node, b"") + data).split(b"\n")
            records = [record for line in lines for record in _output_records(node, line)]
            if len(rest) > _UNFINISHED_BYTES:
                *pieces, rest = _pieces(rest)
                records += [(b"part", node.encode() + b" " + piece) for piece in pieces]
            if rest:
                self._unfinished[node] = rest
            self._write(records)

    def finish(self, node: str) -> None:
        """Writes what a node said without ending the line."""
        with self._lock:
            if rest := self._unfinished.pop(node, b""):
                self._write(_output_records(node, rest))

    def out(self, node: str, line: bytes) -> None:
        """Writes a line of a node, given without its end."""
        with self._lock:
            self._write(_output_records(node, line))

    def note(self, text: str) -> None:
        """Writes something that people should know, a record for each line of it."""
        with self._lock:
            self._write(
                (b"note", piece)
                for line in text.split("\n")
                for piece in _pieces(line.encode(errors="backslashreplace"))
            )

    def up(self, hosts: Mapping[str, str]) -> None:
        """Writes that the program runs, and where each node is."""
        self._write_json(b"up", json.dumps(to_json(Up(hosts))), must=True)

    def status(self, nodes: Sequence[NodeStatus]) -> None:
        """Writes how each node is."""
        self._write_json(b"status", json.dumps(to_json(nodes)))

    def end(self, end: End) -> None:
        """Writes how the program ended: all that fits into what is kept of a log."""
        forms = (json.dumps(to_json(each, most_bytes=_PARCEL_BYTES)) for each in _shortened(end))
        text = next(text for text in forms if len(text) < _END_BYTES)
        self._write_json(b"end", f"{_seal(self._key, text)} {text}", must=True)

    def drain(self, patience_s: float) -> None:
        """Waits until all is written, or nothing of it for so long."""
        self._writer.drain(lambda: patience_s)

    def _write_json(self, kind: bytes, text: str, *, must: bool = False) -> None:
        pieces = [*_pieces(text.encode("ascii"))]
        with self._lock:
            records = (
                (kind, b"%d/%d %b" % (index, len(pieces), piece))
                for index, piece in enumerate(pieces, start=1)
            )
            self._write(records, must=must)

    def _write(
        self,
        records: "Iterator[tuple[bytes, bytes]] | list[tuple[bytes, bytes]]",
        *,
        must: bool = False,
    ) -> None:
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
    """Cuts data into at least one piece, not within a character: logs may be kept as text."""
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


# Reading


class RecordReader:
    """Reads the log of one process, which may be followed several times: each record counts once."""

    def __init__(self, key: bytes | None, *, is_stamped: bool = False) -> None:
        """Prepares it.

        Args:
            key: For the seal of the end. Without it exceptions stay texts.
            is_stamped: Whether each line of the log has a time stamp: what has none is no part of it.
        """
        self._key = key
        self._is_stamped = is_stamped
        self._last = 0
        #: Lines without a number have nothing but their time to be known by.
        self._strays: dict[str, None] = {}
        self._pieces: list[str] = []

    @property
    def last_number(self) -> int:
        """Number of the last record; 0 before the first."""
        return self._last

    def feed(self, line: str) -> list[Record]:
        """Takes in a line and returns what it says: nothing if it was read before.

        Args:
            line: Without its end, bytes that are no UTF-8 as `surrogateescape` has them. A
                time stamp may precede it, as Kubernetes writes it.
        """
        stamped = _STAMP.fullmatch(line)
        if stamped is None and self._is_stamped:
            # A kubelet that cannot read the log says so in its place, and that all went well.
            return []
        text = line if stamped is None else stamped[1]
        if (record := _RECORD.fullmatch(text)) is not None:
            number, kind, rest = int(record[1]), record[2], record[3]
            if number <= self._last:
                return []
            found = self._read(kind, rest, number == self._last + 1)
            if found is not None:
                lost, self._last = number - self._last - 1, number
                gap = [Note(f"{_counted(lost)} lost")] if lost else []
                return [*gap, *found]
        if stamped is not None:
            if line in self._strays:
                return []
            self._strays[line] = None
            if len(self._strays) > _MAX_STRAYS:
                del self._strays[next(iter(self._strays))]
        return [Output(SUPERVISOR, _encoded(f"{text}\n"))]

    def _read(self, kind: str, rest: str, is_next: bool) -> list[Record] | None:
        """Returns what a record says; None if it is no record."""
        if kind == "note":
            return [Note(rest)]
        if kind in ("out", "part"):
            if (parts := _NODE.fullmatch(rest)) is None:
                return None
            return [Output(parts[1], _encoded(parts[2] + ("\n" if kind == "out" else "")))]
        if (parts := _PIECE.fullmatch(rest)) is None:
            return None
        index, count = int(parts[1]), int(parts[2])
        if index == 1:
            self._pieces = []
        elif not is_next:
            self._pieces = []  # incomplete for good
        if index != len(self._pieces) + 1:
            return []
        self._pieces.append(parts[3])
        if index < count:
            return []
        text, self._pieces = "".join(self._pieces), []
        try:
            return [self._decode(kind, text)]
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return [Note(f"a record of the log cannot be read: {kind} {text[:200]}")]

    def _decode(self, kind: str, text: str) -> Record:
        if kind == "end":
            seal, _, text = text.partition(" ")
            is_ours = self._key is not None and hmac.compare_digest(
                seal.encode(), _seal(self._key, text).encode()
            )
            end: End = from_json(End, json.loads(text), is_trusted=is_ours)
            return end
        found = json.loads(text)
        if kind == "up":
            up: Up = from_json(Up, found)
            return up
        return Status(from_json(tuple[NodeStatus, ...], found))


def _counted(lost: int) -> str:
    return "1 line of the log was" if lost == 1 else f"{lost} lines of the log were"


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


# The end as JSON


def _seal(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _shortened(end: End) -> Iterator[End]:
    """Returns shorter forms of it, the longest first; the last one is always short."""
    yield end
    yield replace(end, stacks={})
    result = end.result
    restarts = tuple(
        replace(each, failure=each.failure and _headline_of(each.failure))
        for each in result.restarts
    )
    headlines = tuple(_headline_of(each) for each in result.failures)
    failures = (*result.failures[:1], *headlines[1:])
    yield End(replace(result, failures=failures, restarts=restarts), {})
    yield End(
        ProgramResult(
            result.outcome,
            headlines[:_MAX_HEADLINES],
            result.reason[:_HEADLINE_CHARACTERS],
            result.signum,
            restarts=restarts[-_MAX_HEADLINES:],
        ),
        {},
    )


def _headline_of(failure: NodeFailure) -> NodeFailure:
    summary = failure.summary[:_HEADLINE_CHARACTERS]
    return replace(failure, summary=summary, report=None, last_output="", stacks="", restarts=())
