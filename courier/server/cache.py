"""A served object that answers for another server, and keeps its answers.

It unpickles nothing: it passes on arguments as bytes, and keeps answers as bytes, with large
buffers in memory that readers on the same host map.
"""

import collections
import contextvars
import functools
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from courier.calls.context import CallContext, enter_call
from courier.calls.dispatch import Dispatcher
from courier.calls.outcomes import (
    Answer,
    End,
    Failure,
    Given,
    Item,
    Items,
    Later,
    Outcome,
    Refusal,
    Step,
    Value,
    packed,
)
from courier.calls.pending import PendingCall
from courier.client.client import connection_of
from courier.client.connection import Connection
from courier.errors import SerializationError
from courier.threads.locks import Lock
from courier.values.frozen import AVAILABLE, Frozen
from courier.values.parcel import Parcel, pack
from courier.values.shared import MIN_BYTES, freeze

_log = logging.getLogger(__name__)

_Key = tuple[str, bytes, tuple[bytes, ...]]


class Cache:
    """Serve it to answer in place of another server: see `Server`.

    Any method of the other server can be called; the answer is that of the last call with the same
    arguments, if it is not too old. Concurrent calls with the same arguments become one. Exceptions
    and generators are passed on, but not kept. Thread-safe.

    Arguments are the same if their pickles are.

    Example:
        client = courier.Client("learner:4711", secret=secret)
        with courier.Server(courier.Cache(client, refresh_s=2, stale_s=4), secret=secret) as server:
            server.join()
    """

    def __init__(
        self,
        client: Any,
        *,
        refresh_s: float,
        stale_s: float,
        max_bytes: int = 1 << 30,
        max_entries: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an empty cache; makes no call yet.

        Args:
            client: A courier client of the server to answer for.
            refresh_s: Seconds that must have passed since the last call before an answer is asked
                for again. A call triggers that, and still gets the old answer.
            stale_s: Seconds after which an answer is not returned any more, counted from when
                it was asked for.
            max_bytes: Memory for answers and arguments. The least recently used goes first.
            max_entries: The same for the number of answers.
            clock: The time in seconds, for the age of answers.

        Raises:
            TypeError: `client` is no courier client.
            ValueError: A number is below 0, or `stale_s` below `refresh_s`.
        """
        if not refresh_s >= 0 or not stale_s >= 0:
            raise ValueError("refresh and stale times cannot be below 0")
        if stale_s < refresh_s:
            raise ValueError(
                f"what is stale after {stale_s:g} s cannot be refreshed after {refresh_s:g} s only"
            )
        if max_bytes < 0 or max_entries < 0:
            raise ValueError("a cache cannot hold less than nothing")
        self._connection = connection_of(client)
        self._refresh_s = refresh_s
        self._stale_s = stale_s
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._clock = clock
        self._lock = Lock()
        #: Entries with an answer, or with a call in flight.
        self._entries: dict[_Key, _CacheEntry] = {}
        #: Entries with an answer, the most recently used last.
        self._kept: collections.OrderedDict[_Key, _CacheEntry] = collections.OrderedDict()
        self._bytes = 0
        # Shared memory holds one per buffer, and the server needs some for its connections.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_descriptors = 1 << 16 if limit == resource.RLIM_INFINITY else limit // 4
        self._descriptors = 0

    def answer(self, method: str, arguments: Parcel, call: CallContext) -> Answer | Later:
        """Answers a call. Never raises, and never waits."""
        key = (method, bytes(arguments.pickle), tuple(map(bytes, arguments.buffers)))
        caller: _WaitingCaller | None = None
        with self._lock:
            # Under the lock: a thread that waited for it must not take an old answer for fresh.
            now = self._clock()
            entry = self._entries.get(key)
            if entry is None:
                # A copy: the arguments may lie in memory that their sender lent.
                arguments = Parcel(key[1], [memoryview(buffer) for buffer in key[2]])
                entry = self._entries[key] = _CacheEntry(method, arguments)
            elif entry.answer is not None:
                self._kept.move_to_end(key)
            entry.wanted_at = now
            answer = entry.answer
            if answer is not None and now - entry.asked_at > self._stale_s:
                answer = None
            if answer is None:
                caller = _WaitingCaller(call)
                entry.waiting[caller] = now
            asks = not entry.is_asked and (
                answer is None or now - entry.tried_at >= self._refresh_s
            )
            if asks:
                entry.is_asked = True
                entry.tried_at = now
        if asks:
            self._ask(key, entry, now, is_wanted=answer is None)
        if answer is not None:
            return answer
        assert caller is not None
        # If the target never answers, callers that have left must not pile up.
        call.on_end(lambda: self._forget(entry, caller))
        return Later(caller.answer)

    def _forget(self, entry: "_CacheEntry", caller: "_WaitingCaller") -> None:
        with self._lock:
            entry.waiting.pop(caller, None)

    def _ask(self, key: _Key, entry: "_CacheEntry", asked_at: float, *, is_wanted: bool) -> None:
        self._call(entry, lambda answer: self._take(key, entry, asked_at, answer), is_wanted)

    def _call(
        self, entry: "_CacheEntry", then: Callable[[Answer], None], is_wanted: bool = True
    ) -> None:
        """Calls the other server. Never raises: errors become the answer."""
        context = contextvars.copy_context()
        if is_wanted:
            # A node that is to end makes only the new calls that its answers need.
            context.run(enter_call, CallContext(entry.method, "callers of a cache", None))
        try:
            pending = context.run(self._connection.forward, entry.method, entry.arguments)
        except BaseException as error:  # noqa: BLE001 - those who wait get it
            then(Failure.of(error))
            return
        pending.when_done(lambda done: then(self._answer_of(done)))
        try:
            pending.hurry()
        except BaseException:  # noqa: BLE001 - no thread to read the answer: the callers get the error
            pending.cancel()

    def _answer_of(self, pending: PendingCall) -> Answer:
        try:
            outcome = pending.wait()
            if isinstance(outcome, Items):
                return _RelayedItems(outcome, self._connection, pending)
            return _passed_on(outcome, pending)
        except BaseException as error:  # noqa: BLE001 - those who wait get it
            return Failure.of(error)

    def _take(self, key: _Key, entry: "_CacheEntry", asked_at: float, outcome: Answer) -> None:
        frozen: Frozen | None = None
        if isinstance(outcome, Value):
            try:
                # Copied out of the connection's memory, of which there is little.
                buffers = outcome.parcel.buffers
                needed = 1 + sum(memoryview(each).nbytes >= MIN_BYTES for each in buffers)
                maps = AVAILABLE and self._descriptors + needed <= self._max_descriptors
                parcel, frozen = freeze(outcome.parcel, maps=maps)
                outcome = Value(parcel)
            except BaseException as error:  # noqa: BLE001 - no memory: those who wait get it
                outcome = Failure.of(error)
        with self._lock:
            now = self._clock()
            is_fresh = not isinstance(outcome, Value) or now - asked_at <= self._stale_s
            # A caller that came before the request gets its outcome, even if that is not fresh.
            served = [
                caller
                for caller, came_at in entry.waiting.items()
                if is_fresh or came_at <= asked_at
            ]
            for caller in served:
                del entry.waiting[caller]
            asks = entry.is_asked = bool(entry.waiting)
            if asks:
                entry.tried_at = now
            if isinstance(outcome, Value) and is_fresh:
                self._keep(key, entry, outcome, frozen, asked_at)
            if entry.answer is not None and now - entry.asked_at > self._stale_s:
                self._drop(key, entry)
            if entry.answer is None and not asks:
                self._entries.pop(key, None)
            self._make_room(now)
        if isinstance(outcome, _RelayedItems):
            # A generator has one reader; the others ask for their own, in another thread: this one
            # reads answers of the other server, and must not wait for it.
            if not served:
                outcome.close()
            for caller in served[1:]:
                self._connection.run_aside(functools.partial(self._call, entry, caller.settle))
            del served[1:]
        for caller in served:
            caller.settle(outcome)
        if asks:
            self._connection.run_aside(
                functools.partial(self._ask, key, entry, now, is_wanted=True)
            )

    # Under the lock

    def _keep(
        self, key: _Key, entry: "_CacheEntry", answer: Value, frozen: Frozen | None, asked_at: float
    ) -> None:
        size = answer.parcel.total_bytes + len(key[1]) + sum(map(len, key[2]))
        if size > self._max_bytes:
            return
        if entry.answer is not None:
            self._uncount(entry)
        entry.answer, entry.frozen, entry.asked_at, entry.size = answer, frozen, asked_at, size
        self._bytes += size
        self._descriptors += entry.descriptors
        self._kept[key] = entry

    def _drop(self, key: _Key, entry: "_CacheEntry") -> None:
        """Forgets an answer, but not that a call is in flight, so that there is only one."""
        self._uncount(entry)
        entry.answer = entry.frozen = None
        del self._kept[key]
        if not entry.is_asked:
            del self._entries[key]

    def _uncount(self, entry: "_CacheEntry") -> None:
        self._bytes -= entry.size
        self._descriptors -= entry.descriptors

    def _make_room(self, now: float) -> None:
        """Drops answers that are too old, or beyond the limit of memory."""
        while self._kept:
            key, entry = next(iter(self._kept.items()))
            is_too_much = self._bytes > self._max_bytes or len(self._kept) > self._max_entries
            if not is_too_much and now - entry.wanted_at <= self._stale_s:
                return
            self._drop(key, entry)


@dataclass(slots=True, eq=False)
class _WaitingCaller:
    call: CallContext
    answer: Step[Answer] = field(default_factory=Step)

    def settle(self, outcome: Answer) -> None:
        """Passes the answer on. Never raises: others wait for the same answer."""
        if isinstance(outcome, _RelayedItems):
            outcome.read_by(self.call)
        self.answer.set_result(outcome)


@dataclass(slots=True, eq=False)
class _CacheEntry:
    method: str
    arguments: Parcel
    answer: Value | None = None
    #: Keeps the memory of the answer, so that readers of this host can map it.
    frozen: Frozen | None = None
    asked_at: float = 0.0
    tried_at: float = 0.0
    wanted_at: float = 0.0
    #: Whether a call is on its way.
    is_asked: bool = False
    size: int = 0
    #: Callers that need a newer answer, with the time at which they came.
    waiting: dict[_WaitingCaller, float] = field(default_factory=dict)

    @property
    def descriptors(self) -> int:
        return 0 if self.frozen is None else 1 + len(self.frozen.views)


class _RelayedItems(Items):
    """The items of the other server's generator, as received bytes."""

    def __init__(self, items: Items, connection: Connection, pending: PendingCall) -> None:
        self._items = items
        self._connection = connection
        self._pending = pending
        self._call: CallContext | None = None
        self._steps = False

    def read_by(self, call: CallContext) -> None:
        self._call = call
        call.on_end(self._leave)

    def next_item(self) -> Item:
        self._steps = True
        try:
            if self._call is not None and self._call.cancelled:
                return End()
            item = self._items.next_item()
            if isinstance(item, End):
                return item
            return _passed_on(item, self._pending)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, the server lives on
            return Failure.of(error)
        finally:
            self._steps = False

    def close(self) -> None:
        """Ends the generator, also before its first item was read. Never raises."""
        try:
            self._items.close()
        except BaseException:  # noqa: BLE001 - the server lives on
            _log.exception("%s: a generator cannot be closed", self._pending.where)

    def _leave(self) -> None:
        # A caller that waits for an item gets an error; otherwise the server closes it. In another
        # thread, because the generator's own end may run here.
        if self._steps:
            self._connection.run_aside(self.close)


class CacheDispatcher(Dispatcher):
    """Hands calls to a cache, except for those of methods that were bound to its server."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._cache = cache

    def listed_names(self) -> list[str]:
        """Returns none: it has the methods of its target, which may not be up yet."""
        return []

    def run(self, method: str, arguments: Parcel, call: CallContext) -> Answer | Later:
        if method in self._methods:
            return super().run(method, arguments, call)
        numbers = self._numbers_of(method)
        call.began = began = time.perf_counter()
        record = numbers.begin(began, call.tag, call.number, get_ident())
        return self._ended(self._cache.answer(method, arguments, call), call, numbers, record)

    def run_shared(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallContext
    ) -> Outcome | Later:
        """Returns the reply itself: cached bytes are not shared memory."""
        if method in self._methods:
            return super().run_shared(method, args, kwargs, call)
        try:
            return self.run(method, pack((args, kwargs)), call)
        except SerializationError as error:
            return Failure.of(error)


def _passed_on(
    outcome: Value | Given | Failure | Refusal, pending: PendingCall
) -> Value | Failure | Refusal:
    """Returns the answer for the cache's callers; raises if the other server did not answer."""
    if isinstance(outcome, Value | Failure):
        return outcome
    return packed(outcome.result(pending))
