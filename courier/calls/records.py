"""What this process has called, and has answered: numbers by method, and the newest calls in a ring.

The ring lies in memory that may outlive the process (`keep_in`), so that another one reads after a
SIGKILL what was going on. It has no arguments and no results. A call takes 0.7 µs here,
so there are no locks: `next` of a counter, `pack_into` and `+=` on an attribute are each one step of
an interpreter with a lock.
"""

import contextvars
import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Collection, Iterable, Iterator
from math import frexp
from time import perf_counter
from typing import Any, NamedTuple

from courier.errors import (
    CallCancelledError,
    CallTimeoutError,
    ServerBusyError,
    ServerLostError,
    ServerUnreachableError,
)
from courier.threads.locks import RLock

#: What the calls of this context belong to: where several nodes share a process, which node.
SCOPE: contextvars.ContextVar[object] = contextvars.ContextVar("courier_scope", default=None)

#: Begin, connection, number there, thread, method, seconds, end.
_RECORD = struct.Struct("<dIIQHfBx")
#: Of these, what is known only when the call was sent, and when it has ended.
_SENT, _SENT_AT = struct.Struct("<II"), 8
_END, _END_AT = struct.Struct("<fB"), 26
#: As `_RECORD`, of a call that runs: the last word is its method. Faster than to write three zeros.
_write = struct.Struct("<dIIQQ").pack_into
_write_sent, _write_end = _SENT.pack_into, _END.pack_into
#: Records of the ring.
ROOM = 1 << 16
_RING_BYTES = _RECORD.size * ROOM
#: Its bits are the place of a record in the ring, and its number there if it has no other.
MASK = _RING_BYTES - 1
#: Names of methods, by their index, and then those of peers, by the tags of their connections.
_NAME = struct.Struct("<IB123s")
_NAMES = 2048
_PEERS_AT = _NAMES * _NAME.size
_RING_AT = 2 * _PEERS_AT
#: Bytes of the memory; what is never written takes no room.
MEMORY_BYTES = _RING_AT + _RING_BYTES
_SERVED, _MADE, _PEER = 1, 2, 3
#: Counts by power of two of microseconds: up to years.
_DELAYS = 48
_VALUE, _END_OF_STREAM = 16, 24
#: How calls end, by the kinds of outcomes, and numbers below those for errors of connections.
_ENDS = {
    0: "runs",
    1: "timed out",
    2: "cancelled",
    3: "server lost",
    4: "server unreachable",
    5: "failed",
    16: "ok",
    17: "raised",
    18: "unknown method",
    19: "unpicklable result",
    20: "bad arguments",
    21: "server busy",
    22: "server stops",
    24: "ok",
}
_ERRORS = (
    (CallTimeoutError, 1),
    (CallCancelledError, 2),
    (ServerLostError, 3),
    (ServerUnreachableError, 4),
    (ServerBusyError, 21),
)

_memory = mmap.mmap(-1, MEMORY_BYTES)
_ring = memoryview(_memory)[_RING_AT:]
#: A record is known by how many bytes came before it.
_count = itertools.count(_RECORD.size, _RECORD.size)
_newest = 0
_peers = itertools.count()
_lock = RLock()
_all: "dict[int, MethodNumbers]" = {}
_by_key: "dict[tuple[object, str | None, str], MethodNumbers]" = {}
#: In place of the connection, for calls inside this process.
own_tag = int.from_bytes(os.urandom(4), "little")
#: Those whose calls are counted: each has `_numbers`, by method.
USERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
#: Servers of this process.
QUEUES: "weakref.WeakSet[Any]" = weakref.WeakSet()


class MethodNumbers:
    """The numbers of one method: of its calls here, or to one server.

    Made by `numbers_of`. An update is lost only where threads run without the interpreter's lock.
    """

    __slots__ = ("_begun", "_delays", "_errors", "_seconds", "born", "index", "key")

    def __init__(self, key: tuple[object, str | None, str], index: int) -> None:
        #: The scope, the server (None: of this process), and the method.
        self.key = key
        self.index = index
        #: The index of earlier records is that of another method.
        self.born = perf_counter()
        self.forget()

    def begin(self, now: float, tag: int, number: int, thread: int) -> int:
        """Records that a call begins, `now` as of `perf_counter`; returns its record."""
        global _newest
        _newest = record = next(_count)
        self._begun += 1
        _write(_ring, record & MASK, now, tag, number, thread, self.index)
        return record

    def sent(self, record: int, tag: int, number: int) -> None:
        """Records by which connection a call was sent, and under which number."""
        if _newest - record < _RING_BYTES:
            _write_sent(_ring, (record & MASK) + _SENT_AT, tag, number)

    def end(self, record: int, began: float, waited_s: float = 0.0, how: int = _VALUE) -> None:
        """Records that a call has ended; `how`: the kind of its outcome, or see `how_ended`."""
        took_s = perf_counter() - began
        self._seconds += took_s
        self._delays[frexp((took_s + waited_s) * 1e6)[1]] += 1
        if how != _VALUE and how != _END_OF_STREAM:
            self._errors += 1
        if _newest - record < _RING_BYTES:
            _write_end(_ring, (record & MASK) + _END_AT, took_s, how)

    def add_to(self, total: dict[str, Any]) -> None:
        delays = list(self._delays)
        total["calls"] += self._begun
        total["errors"] += self._errors
        total["seconds"] += self._seconds
        total["running"] += max(0, self._begun - sum(delays))
        total["delays"] = [a + b for a, b in zip(total["delays"], delays, strict=True)]

    def _enter(self) -> None:
        _, server, method = self.key
        kind, text = (_SERVED, method) if server is None else (_MADE, f"{server}: {method}")
        _write_name(self.index * _NAME.size, self.index, kind, text)

    def forget(self) -> None:
        self._begun = self._errors = 0
        self._seconds = 0.0
        self._delays = [0] * _DELAYS


def numbers_of(scope: object, server: str | None, method: str) -> MethodNumbers:
    """Returns the numbers of calls to a method of another server, or of one here (None)."""
    key = (scope, server, method)
    with _lock:
        numbers = _by_key.get(key)
        if numbers is None:
            if len(_all) >= _NAMES - 1:
                _drop_unused()
            index = next((each for each in range(_NAMES - 1) if each not in _all), _NAMES - 1)
            if index in _all:
                return _all[index]
            if index == _NAMES - 1:  # names that peers make up must not fill the memory
                key = (None, None, "others")
            numbers = _by_key[key] = _all[index] = MethodNumbers(key, index)
            numbers._enter()
        return numbers


def _drop_unused() -> None:
    """Makes room: drops the numbers of clients and servers that are gone."""
    used = {id(each) for user in list(USERS) for each in list(user._numbers.values())}
    for key, numbers in list(_by_key.items()):
        if id(numbers) not in used:
            del _by_key[key], _all[numbers.index]


def forget(scope: object) -> None:
    """Drops the numbers of what has ended."""
    with _lock:
        for key in [key for key in _by_key if key[0] is scope]:
            numbers = _by_key.pop(key)
            _all.pop(numbers.index, None)


def note_peer(tag: int, peer: str) -> None:
    """Notes which peer has the connection of a tag."""
    _write_name(_PEERS_AT + next(_peers) % _NAMES * _NAME.size, tag, _PEER, peer)


def _write_name(at: int, key: int, kind: int, text: str) -> None:
    _NAME.pack_into(_memory, at, key, kind, text.encode(errors="replace"))


def how_ended(outcome: object) -> int:
    """Returns for `end` how a call ended: with an outcome, or an exception in its place."""
    if isinstance(outcome, Exception):
        return next((how for kind, how in _ERRORS if isinstance(outcome, kind)), 5)
    return int(getattr(outcome, "kind", _VALUE))


def count() -> int:
    """Returns how many calls this process has recorded, inner ones too."""
    return _newest // _RECORD.size


def keep_in(descriptor: int) -> None:
    """Keeps the records of this process in memory of `MEMORY_BYTES`, which may outlive it."""
    with _lock:
        _use(mmap.mmap(descriptor, MEMORY_BYTES))


def _use(memory: mmap.mmap) -> None:
    global _memory, _ring, own_tag
    _memory, _ring = memory, memoryview(memory)[_RING_AT:]
    own_tag = int.from_bytes(os.urandom(4), "little")
    for numbers in _all.values():
        numbers._enter()


def _survive_fork() -> None:
    """Leaves the memory to the parent."""
    global _lock
    _lock = RLock()
    for numbers in _all.values():
        numbers.forget()
    _use(mmap.mmap(-1, MEMORY_BYTES))


os.register_at_fork(after_in_child=_survive_fork)


def call_numbers(scopes: Collection[object] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns how many calls this process has answered and made, by method.

    `scopes`: only those of servers and clients that were made while `call_records.SCOPE` had one of
    these values; where several nodes share a process, each has its own.

    Returns:
        `{"served": {method: numbers}, "made": {"server: method": numbers}}`. Each has `calls`,
        `errors` (calls that ended with one), `seconds` (how long they ran, streams until their end;
        if made: took), `running` and `queued` (now), and `delays`: how many took less than 2**k µs,
        waiting included, and not less than half of that, for each k from 0.

    Example:
        for method, numbers in lowlevel.call_numbers()["served"].items():
            print(method, numbers["calls"], "calls", numbers["running"], "run now")
    """
    found: dict[str, dict[str, dict[str, Any]]] = {"served": {}, "made": {}}

    def total(kind: str, name: str) -> dict[str, Any]:
        empty = {"calls": 0, "errors": 0, "seconds": 0.0, "running": 0, "queued": 0}
        return found[kind].setdefault(name, {**empty, "delays": [0] * _DELAYS})

    for numbers in list(_all.values()):
        scope, server, method = numbers.key
        if (scopes is None or scope in scopes) and not _is_inner(method):
            name = method if server is None else f"{server}: {method}"
            numbers.add_to(total("served" if server is None else "made", name))
    for queues in list(QUEUES):
        if scopes is None or queues.scope in scopes:
            for method, count in queues.queued().items():
                total("served", method)["queued"] += count
    return found


class RecordedCall(NamedTuple):
    """A call of the ring.

    Attributes:
        began: When, as of `perf_counter` of that machine.
        seconds: How long it took; 0 if it runs.
        is_served: Whether it was answered, not made, there.
        peer: The server, or where the caller is.
        method: Its name.
        end: How it ended.
        thread: The ident of the thread where it began.
        tag, number: The same on both sides; 0 if unknown.
    """

    began: float
    seconds: float
    is_served: bool
    peer: str
    method: str
    end: str
    thread: int
    tag: int
    number: int

    def describe(self, now: float) -> str:
        """Returns a line for people, with the seconds before `now`."""
        verb, to = ("answered", "for") if self.is_served else ("called", "of")
        took = "" if self.end == "runs" else f" within {1e3 * self.seconds:.3f} ms"
        return f"{self.began - now:+.6f} s  {verb} {self.method} {to} {self.peer}: {self.end}{took}"


def newest_calls(
    most: int, scopes: Collection[object] | None = None, since: float = 0.0
) -> list[RecordedCall]:
    """Returns the newest calls of this process, the oldest first; `scopes` as in `call_numbers`.

    `since`: only those that ran at that time of `perf_counter`, or later.
    """

    def is_wanted(index: int, call: RecordedCall) -> bool:
        numbers = _all.get(index)
        if numbers is None or call.began < numbers.born or _is_inner(call.method):
            return False
        return scopes is None or numbers.key[0] in scopes

    found = _read(_memory, since)
    return _newest_of((call for index, call in found if is_wanted(index, call)), most)


def _is_inner(method: str) -> bool:
    return method.startswith("__courier_")


def calls_in(descriptor: int, most: int) -> list[RecordedCall]:
    """Returns the newest calls of a process that has ended; see `keep_in`."""
    with mmap.mmap(descriptor, MEMORY_BYTES, prot=mmap.PROT_READ) as memory:
        return _newest_of((call for _, call in _read(memory)), most)


def _newest_of(calls: Iterable[RecordedCall], most: int) -> list[RecordedCall]:
    return sorted(calls)[-most:] if most else []


def _read(memory: mmap.mmap, since: float = 0.0) -> Iterator[tuple[int, RecordedCall]]:
    """Yields all calls of a memory that ran at a time or later, each with the index of its method."""
    methods: dict[int, tuple[bool, str, str]] = {}
    peers: dict[int, str] = {}
    for key, kind, data in _NAME.iter_unpack(memory[:_RING_AT]):
        # A process that crashed may have written anything.
        text = "".join(filter(str.isprintable, data.rstrip(b"\0").decode(errors="replace")))
        if kind == _PEER:
            peers[key] = text
        elif kind:
            server, _, method = text.rpartition(": ")
            methods[key] = kind == _SERVED, server, method
    for position, record in enumerate(_RECORD.iter_unpack(memory[_RING_AT:])):
        began, tag, number, thread, index, took_s, end = record
        # A Ctrl-C may have come between a number and its record: that place stays as it was.
        if began > 0 and index in methods and (not end or began + took_s >= since):
            is_served, server, method = methods[index]
            peer = peers.get(tag, "this process") if is_served else server
            ids = thread, tag, number or position * _RECORD.size
            call = began, took_s, is_served, peer, method, _ENDS.get(end, "?"), *ids
            yield index, RecordedCall(*call)
