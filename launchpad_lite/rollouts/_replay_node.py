"""A replay buffer as a node: serves actors and learners."""

import asyncio
import bisect
import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import courier
import launchpad_lite as lp
from launchpad_lite.parts.waiting import is_set_within
from launchpad_lite.rollouts.results import TableInfo

if TYPE_CHECKING:
    from launchpad_lite.rollouts._table import (
        Floats,
        Ints,
        Leaves,
        ReplayTable,
        SampledItems,
        SentItems,
        TableState,
    )
    from launchpad_lite.rollouts.replay import Table

T = TypeVar("T")

#: Seconds for which a caller that asks again keeps its place.
_PLACE_S = 0.5
#: Rows of an array that are copied at a time.
_BLOCK = 1024


class ReplayCall(NamedTuple):
    """Who calls, and how long that may take."""

    table: str
    token: int  # names what waits, also in the calls that ask again
    who: str  # the node that calls
    waited_s: float  # already
    wait_s: float  # until it wants an answer


class _Waiting(NamedTuple):
    """A call that waits for so many items."""

    since: float
    call: ReplayCall
    items: int
    loop: asyncio.AbstractEventLoop
    may_go: asyncio.Event


class ReplayServer:
    """Keeps the tables. Coroutines are for its event loop; other methods, for any thread."""

    def __init__(self, tables: "Sequence[Table]") -> None:
        from launchpad_lite.rollouts._table import ReplayTable

        self._rules = {each.name: each for each in tables}
        seed = lp.current_node().seed
        self._tables = {name: ReplayTable(each, seed) for name, each in self._rules.items()}
        #: By table, the inserts and the samples that wait, the longest first.
        self._queues: dict[str, dict[str, list[_Waiting]]] = {
            name: {"insert": [], "sample": []} for name in self._tables
        }
        #: Of the tables: between the event loop and other threads.
        self._lock = threading.Lock()
        lp.metrics.view("replay", self._text)

    @courier.idempotent
    def insert_now(self, name: str, items: "SentItems") -> bool:
        """Inserts items as `insert`, in a third of the time; returns False if that has to wait."""
        table, queues, batch = self._tables[name], self._queues[name], items.batch()
        before = table.limiter.inserts
        try:
            with self._lock:
                return not queues["insert"] and table.insert(batch, time.monotonic())
        finally:
            if table.limiter.inserts > before:
                for first in queues["sample"][:1]:
                    with contextlib.suppress(RuntimeError):  # the loop ends with the program
                        first.loop.call_soon_threadsafe(first.may_go.set)

    @courier.idempotent
    async def insert(self, call: ReplayCall, items: "SentItems") -> str:
        """Inserts items; returns "", or for what it waits."""
        batch = items.batch()
        size = len(batch.keys)
        found = await self._wait("insert", call, size, lambda table, now: table.insert(batch, now))
        return found if isinstance(found, str) else ""

    async def sample(self, call: ReplayCall, count: int) -> "SampledItems | str":
        """Returns items, or for what it waits."""
        return await self._wait("sample", call, count, lambda table, now: table.sample(count, now))

    async def _wait(
        self,
        what: str,
        call: ReplayCall,
        count: int,
        work: "Callable[[ReplayTable, float], T | None]",
    ) -> T | str:
        """Returns what a function of a table does at last; or for what it waits."""
        table, began_at = self._tables[call.table], time.monotonic()
        queue = self._queues[call.table][what]
        queue[:] = [each for each in queue if each.call.token != call.token]  # of its last call
        loop = asyncio.get_running_loop()
        me = _Waiting(began_at - call.waited_s, call, count, loop, asyncio.Event())
        bisect.insort(queue, me, key=lambda each: each.since)
        keeps_place = False
        try:
            while True:
                me.may_go.clear()
                # Who waits longest goes first: a large batch is not held up by small ones.
                if queue[0] is me:
                    with self._lock:
                        before = table.limiter.inserts, table.limiter.samples
                        found = work(table, time.monotonic())
                    if before != (table.limiter.inserts, table.limiter.samples):
                        self._wake(call.table)
                    if found:
                        return found
                if not await is_set_within(me.may_go, began_at + call.wait_s - time.monotonic()):
                    keeps_place = call.wait_s >= _PLACE_S
                    return table.why(what, count, time.monotonic())
        finally:
            if keeps_place:  # the caller is about to ask again
                loop.call_later(_PLACE_S, self._leave, call.table, queue, me)
            else:
                self._leave(call.table, queue, me)

    def _leave(self, table: str, queue: list[_Waiting], me: _Waiting) -> None:
        if me in queue:
            queue.remove(me)
        self._wake(table)

    def _wake(self, table: str) -> None:
        for queue in self._queues[table].values():
            if queue:
                queue[0].may_go.set()

    @courier.idempotent
    async def update_priorities(self, table: str, keys: "Ints", priorities: "Floats") -> int:
        with self._lock:
            return self._tables[table].update_priorities(keys, priorities)

    def __courier_waits__(self, method: str) -> list[tuple[str, str]]:
        now = time.monotonic()
        return [
            ("", self._tables[name].why(method, each.items, now))
            for name, queues in self._queues.items()
            for each in tuple(queues.get(method, ()))
        ]

    @courier.idempotent
    async def info(self) -> dict[str, TableInfo]:
        now = time.monotonic()
        return {
            name: TableInfo(
                len(table),
                self._rules[name].max_size,
                table.steps,
                table.limiter.inserts,
                table.limiter.samples,
                [
                    f"{each.call.who} waits {now - each.since:.0f} s: {table.why(what, each.items, now)}"
                    for what, queue in self._queues[name].items()
                    for each in queue
                ],
            )
            for name, table in self._tables.items()
        }

    def _text(self) -> str:
        return "\n".join(
            f"{name}: {len(table):,} items; {table.limiter.inserts:,} inserted, {table.limiter.samples:,} "
            f"sampled; {sum(map(len, self._queues[name].values()))} calls wait"
            for name, table in self._tables.items()
        )

    def save(self, folder: Path) -> None:
        """Writes all tables. Calls go on meanwhile: rows that it writes stay as they are."""
        for index, (name, table) in enumerate(self._tables.items()):
            with self._lock:
                state = table.state()
            try:
                _write(folder / str(index), name, state)
            finally:
                with self._lock:
                    table.let_go()

    def restore(self, folder: Path) -> None:
        """Takes the tables that have the names of those that were saved."""
        for each in folder.iterdir():
            name, state = _read(each)
            if name in self._tables:
                self._tables[name].restore(state)


def _write(folder: Path, name: str, state: "TableState") -> None:
    import numpy as np

    folder.mkdir()
    items = state.items
    plain = (tuple(items._replace(own=(), steps=())), *state[1:])
    (folder / "state").write_bytes(pickle.dumps((name, plain)))
    parts = ("own", items.own, state.own_rows), ("step", items.steps, state.step_rows)
    for part, leaves, rows in parts:
        for index, leaf in enumerate(leaves):
            shape = (len(rows), *leaf.shape[1:])
            path = folder / f"{part}-{index}.npy"
            file = np.lib.format.open_memmap(path, "w+", leaf.dtype, shape)
            for begin in range(0, len(rows), _BLOCK):
                file[begin : begin + _BLOCK] = leaf[rows[begin : begin + _BLOCK]]


def _read(folder: Path) -> "tuple[str, TableState]":
    import numpy as np

    from launchpad_lite.rollouts._table import InsertBatch, TableState

    def read(part: str) -> "Leaves":
        count = len(list(folder.glob(f"{part}-*")))
        return [np.load(folder / f"{part}-{index}.npy") for index in range(count)]

    name, (items, *others) = pickle.loads((folder / "state").read_bytes())
    own, steps = read("own"), read("step")
    return name, TableState(InsertBatch(*items)._replace(own=own, steps=steps), *others)
