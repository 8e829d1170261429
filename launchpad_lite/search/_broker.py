"""A broker as a node: serves models and workers, helps other brokers, and keeps what it accepted."""

import asyncio
import collections
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import courier
import launchpad_lite as lp
from launchpad_lite.parts.waiting import is_set_within
from launchpad_lite.search._messages import (
    Assignment,
    Collected,
    Life,
    Load,
    MembersView,
    SearchMember,
    TaskOutcome,
    TaskProgress,
    TaskSubmission,
    WorkerMachine,
    first_of,
)
from launchpad_lite.search._parts import BrokerOptions
from launchpad_lite.search._queue import Changes, Queue
from launchpad_lite.search._store import PART_BYTES, PAYLOAD, RESULT, Store
from launchpad_lite.search._timing import RETRY_S
from launchpad_lite.search.errors import LOST, SearchError

#: Seconds after which a model hears that a task runs, if there is no other news.
_LASTING_S = 0.1
T = TypeVar("T")


@dataclass(eq=False)
class _Waiter:
    worker: Life
    kinds: Collection[str]
    count: int
    helps: bool
    #: Leases tasks to it.
    take: Callable[[], list[Assignment]]
    found: "asyncio.Future[list[Assignment]]"


def _open(options: BrokerOptions, broker: str) -> Store:
    # Databases are loaded where they are used: most brokers keep their tasks in memory.
    if options.database is not None:
        from launchpad_lite.search._postgres import PostgresStore

        return PostgresStore(options.database, broker)
    if options.folder is not None:
        from launchpad_lite.search._sqlite import BROKERS, SqliteStore

        return SqliteStore(Path(options.folder, BROKERS, f"{broker}.sqlite"))
    return Store()


class Broker:
    """Passes tasks from models to workers, and outcomes back. All its methods are for its event loop."""

    def __init__(
        self, me: Any, name_server: Any, peers: Mapping[str, Any], options: BrokerOptions
    ) -> None:
        """Makes one, with the tasks that its earlier life has kept; `peers` are other brokers."""
        name = lp.current_node().name
        self._me = Life(name, os.urandom(16).hex())
        self._address = me.address
        self._name_server = name_server
        self._timing = options.timing
        self._queue = Queue(lease_s=options.timing.lease_s, max_losses=options.max_losses)
        self._store = _open(options, name)
        self._queue.restore(self._store.load(), time.monotonic())
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._stored = self._queue.changes
        self._writing: asyncio.Task[Any] | None = None
        #: Held while something large is written.
        self._staging = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, "broker-store")
        self._view = MembersView(True, {})
        #: Set when it is to end, and answers all that wait.
        self._closed = asyncio.Event()
        #: Whether the search is over. If it ends for another reason, its workers stay.
        self._is_over = False
        #: Set when the last worker leaves.
        self._has_no_workers = asyncio.Event()
        self._is_asked = asyncio.Event()
        self._helping = {name: _Helping(self, name, peer) for name, peer in peers.items()}
        #: One for each model that waits, or broker that is helped; set when there may be something
        #: for it.
        self._news = {name: helping.woken for name, helping in self._helping.items()}
        self._failure: BaseException | None = None

    # Called by models.

    @courier.idempotent
    async def submit(self, model: str, submissions: Sequence[TaskSubmission]) -> int:
        """Accepts tasks, as many as there is room for, in order; returns how many."""
        for each in submissions:
            if self._helping and any(each.limits.needs):
                raise SearchError(
                    "tasks with cpus, gpus or memory_bytes need a search with brokers=1"
                )
            if len(each.payload) > PART_BYTES:
                is_wanted = partial(self._queue.lacks, each)
                await self._stage(each.id, PAYLOAD, each.payload, is_wanted)
        count = self._queue.submit(model, submissions, time.monotonic())
        self._hand_out()
        await self._keep()
        return count

    async def collect(
        self,
        model: str,
        session: str,
        acknowledged: Sequence[str],
        stopped: Mapping[str, bool],
        wait_s: float,
    ) -> Collected:
        """Waits for outcomes and other news of a model, and returns them.

        In another session than before, the model gets all outcomes again that it has not
        acknowledged: it was started again, or an answer was lost. It has saved the outcomes of
        `acknowledged`. Those of `stopped` are to end early, some by force.
        """
        self._queue.acknowledge(model, acknowledged)
        self._queue.stop(model, stopped)
        outcomes, progress = self._queue.collect(model, session)
        if not outcomes and not progress and not self._closed.is_set():
            await self._wait_for_news(model, wait_s)
            outcomes, progress = self._queue.collect(model, session)
        await self._keep()
        return Collected(
            self._me.life,
            outcomes,
            progress,
            self._queue.load(time.monotonic()),
            self._queue.unknown_kinds(),
            self._queue.begun(model),
        )

    async def _wait_for_news(self, model: str, wait_s: float) -> None:
        if model in self._news:
            self._news[model].set()  # its caller has given up
        news = self._news[model] = asyncio.Event()
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            is_set = await is_set_within(news, min(left, _LASTING_S))
            if is_set or self._queue.has_news(model, begun=True):
                break
        if self._news.get(model) is news:
            del self._news[model]

    @courier.idempotent
    async def cancel(self, model: str, ids: Sequence[str]) -> None:
        self._queue.cancel(model, ids)
        await self._keep()

    @courier.idempotent
    async def resume(
        self, model: str, ids: Sequence[str], awaited: Sequence[str] = ()
    ) -> tuple[str, list[str]]:
        """Forgets tasks as `Queue.resume`; returns its life, and those that are not here.

        If a lost broker has some of them in the same database, this one takes them over.
        """
        missing = self._queue.resume(model, ids, awaited)
        self._hand_out()
        if missing:
            # Models that lose their broker come here after `patience_s`: tasks can move by then.
            wait_s = min(self._timing.silence_s, self._timing.patience_s)
            silence_s = max(2 * self._timing.beat_s, wait_s)
            lost = await self._in_store(self._store.take_over, model, silence_s)
            self._queue.inherit(lost, time.monotonic())
            missing = self._queue.missing(model, missing)
            self._hand_out()
        await self._keep()
        return self._me.life, missing

    # Called by workers, and by brokers that help.

    async def work(
        self,
        worker: Life,
        held: Sequence[str],
        outcomes: Sequence[TaskOutcome],
        kinds: Collection[str],
        count: int,
        wait_s: float,
        helps: bool = False,
        machine: WorkerMachine | None = None,
    ) -> list[Assignment] | None:
        """Takes outcomes, waits for tasks as `Queue.take`. None: the search is over."""
        await self._take(outcomes)
        for other in [each for each in self._waiters if each.worker.name == worker.name]:
            self._waiters.remove(other)  # its caller has given up
            other.found.cancel()

        def take() -> list[Assignment]:
            now = time.monotonic()
            return self._queue.take(worker, held, kinds, count, now, helps=helps, machine=machine)

        found = take()
        if outcomes and self._queue.needs_room():
            self._hand_out()  # there may be more room than for one
        if count and not found and wait_s > 0 and not self._closed.is_set():
            future = asyncio.get_running_loop().create_future()
            waiter = _Waiter(worker, kinds, count, helps, take, future)
            self._waiters.append(waiter)
            self._wake_helping()  # there may be a broker to help
            try:
                await asyncio.wait([future], timeout=wait_s)
                found = future.result() if future.done() and not future.cancelled() else []
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        await self._keep()
        return None if self._is_over and not found else found

    @courier.idempotent
    async def beat(
        self, worker: Life, held: Mapping[str, str], progress: Sequence[TaskProgress]
    ) -> dict[str, bool]:
        stops = self._queue.beat(worker, held, progress, time.monotonic())
        self._tell()
        await self._keep()  # a lease that has ended may not come back with the store
        return stops

    @courier.idempotent
    async def give_back(self, worker: Life, held: Mapping[str, str]) -> None:
        self._queue.give_back(worker, held)
        self._hand_out()
        await self._keep()

    @courier.idempotent
    async def hand_in(self, outcomes: Sequence[TaskOutcome]) -> None:
        await self._take(outcomes)
        await self._keep()

    @courier.idempotent
    async def leave(self, worker: Life, outcomes: Sequence[TaskOutcome]) -> None:
        """Takes the last outcomes of a worker that leaves, and takes back its other tasks."""
        await self._take(outcomes)
        self._queue.leave(worker)
        if not self._queue.load(time.monotonic()).workers:
            self._has_no_workers.set()
        self._hand_out()
        self._tell()
        await self._keep()

    @courier.idempotent
    async def dismiss(self, worker: Life) -> None:
        """Answers the call of a worker that waits for tasks and is to end."""
        for waiter in self._waiters:
            if waiter.worker == worker and not waiter.found.done():
                waiter.found.set_result([])

    @courier.grpc_service("search.v1.Broker", "Work", "Beat", "Leave")
    async def serve_foreign(self, method: str, request: bytes) -> bytes:
        from launchpad_lite.search import _foreign  # loads protobuf

        return await _foreign.BROKER[method](self, request)

    @courier.idempotent
    async def load(self) -> Load:
        return self._queue.load(time.monotonic())

    @courier.idempotent
    async def close(self) -> None:
        self._is_over = True
        self._answer_all()

    def _answer_all(self) -> None:
        self._closed.set()
        for waiter in self._waiters:
            if not waiter.found.done():
                waiter.found.set_result([])
        for news in self._news.values():
            news.set()

    # Run by its node.

    async def _see_off(self) -> None:
        """Waits until the workers have left; does not wait for lost ones."""
        if self._queue.load(time.monotonic()).workers:
            self._has_no_workers.clear()  # set by workers that had left before
            await is_set_within(self._has_no_workers, self._timing.silence_s)
        with contextlib.suppress(*LOST):
            server = courier.with_timeout(self._name_server, self._timing.beat_s)
            await server.aio.leave("broker", self._me)

    async def run(self) -> None:
        """Runs until the search is over, or the program stops, or it cannot keep its tasks."""
        loop = asyncio.get_running_loop()

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._is_asked.set)

        loops = [self._tick(), self._show(), self._hold()]
        loops += [helping.run() for helping in self._helping.values()]
        tasks: list[asyncio.Task[None]] = [loop.create_task(each) for each in loops]
        closing = [loop.create_task(each.wait()) for each in (self._closed, self._is_asked)]
        lp.register_stop_handler(ask)
        try:
            await asyncio.wait([*closing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for ended in [task for task in tasks if task.done()]:
                ended.result()
            if self._failure is not None:
                raise self._failure
            self._answer_all()
            if not self._is_asked.is_set():
                await self._see_off()
        finally:
            lp.unregister_stop_handler(ask)
            self._answer_all()
            for task in (*tasks, *closing):
                task.cancel()
            await asyncio.gather(*tasks, *closing, return_exceptions=True)
            self._writer.shutdown()
            self._store.close()

    async def _tick(self) -> None:
        while True:
            self._queue.tick(time.monotonic())
            self._hand_out()
            self._tell()
            await self._keep()
            await asyncio.sleep(self._timing.lease_s / 8)

    async def _show(self) -> None:
        """Sends heartbeats to the name server, whose answers list the others."""
        server = courier.with_timeout(self._name_server, self._timing.beat_s)
        if not self._helping:  # all that start with this one know it
            await asyncio.sleep(RETRY_S)
        while True:
            try:
                load = self._queue.load(time.monotonic())
                self._view = await server.aio.beat("broker", self._me, load)
                if not self._view.is_known:
                    member = SearchMember("broker", self._me, self._address, version=lp.__version__)
                    await server.aio.register(member)
                if self._view.is_closed:
                    await self.close()
                self._wake_helping()
                pause_s = self._timing.beat_s
            except LOST:
                pause_s = RETRY_S  # it is started again, and learns all by the next heartbeats
            await asyncio.sleep(pause_s)

    def _hand_out(self) -> None:
        for waiter in list(self._waiters):
            is_ready = not waiter.found.done() and self._queue.has_work(waiter.kinds)
            if is_ready and (found := waiter.take()):
                waiter.found.set_result(found)
                self._waiters.remove(waiter)

    async def _take(self, outcomes: Sequence[TaskOutcome]) -> None:
        for each in outcomes:
            if len(each.payload) > PART_BYTES:
                is_wanted = partial(self._queue.awaits, each)
                await self._stage(each.id, RESULT, each.payload, is_wanted)
            self._queue.finish(each)
        self._tell()

    def _tell(self) -> None:
        """Wakes those that have something to collect."""
        for owner, news in self._news.items():
            if self._queue.has_news(owner):
                news.set()

    async def _keep(self) -> None:
        """Returns once all that has changed is in the store; several callers share a write.

        If the store fails, the broker ends, because it accepts only what is stored.
        """
        if self._failure is not None:
            raise self._failure  # the store lacks what it could not write then
        number = self._queue.changes
        while self._stored < number:
            if self._writing is None or self._writing.done():
                upto, changes = self._queue.changes, self._queue.take_changes()
                # Two changes of threads cost more than a small write.
                if self._store.is_quick(changes):
                    with self._ending_if_it_fails():
                        self._store.write(changes)
                    self._stored = upto
                    return
                write = self._write(changes.copy(), upto)
                self._writing = asyncio.get_running_loop().create_task(write)
            # Callers may be cancelled, because they are lost themselves. The write goes on.
            await asyncio.shield(self._writing)

    async def _stage(self, key: str, what: str, body: bytes, is_wanted: Callable[[], bool]) -> None:
        """Has the store take over something large in parts; other writes go in between."""
        async with self._staging:  # one after the other: the same may come again, after a timeout
            for part in itertools.count() if is_wanted() else ():
                while self._writing is not None and not self._writing.done():
                    await asyncio.shield(self._writing)
                    await asyncio.sleep(0)  # other callers that wait for it go first
                self._writing = asyncio.get_running_loop().create_task(
                    self._in_store(self._store.stage, key, what, body, part)
                )
                if await asyncio.shield(self._writing):
                    break
                await asyncio.sleep(0)

    async def _write(self, changes: Changes, upto: int) -> None:
        await self._in_store(self._store.write, changes)
        self._stored = upto

    async def _in_store(self, function: Callable[..., T], *args: object) -> T:
        """Calls the store in its thread. If that fails, the broker ends."""
        with self._ending_if_it_fails():
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)

    @contextlib.contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = error
            self._closed.set()
            raise

    async def _hold(self) -> None:
        while True:
            await self._in_store(self._store.beat)
            await asyncio.sleep(self._timing.beat_s)

    # Helping others.

    def _wanted(self, name: str) -> tuple[Collection[str], int]:
        """Returns kinds and number of the tasks to ask a peer for, because workers here wait."""
        free = [each for each in self._waiters if not each.helps and not each.found.done()]
        queued = {
            peer: load.queued
            for peer, (_, load) in self._view.brokers.items()
            if peer in self._helping and load.queued
        }
        if not free or name != max(queued, key=queued.__getitem__, default=""):
            return (), 0
        # Until the next view: it may have none left.
        self._view = self._view._replace(
            brokers={peer: each for peer, each in self._view.brokers.items() if peer != name}
        )
        kinds = {kind for waiter in free for kind in waiter.kinds}
        return kinds, sum(waiter.count for waiter in free)

    def _wake_helping(self) -> None:
        for helping in self._helping.values():
            helping.woken.set()


class _Helping:
    """Has workers of a broker run tasks of another one: to that, it is a worker with many tasks."""

    def __init__(self, broker: Broker, name: str, peer: Any) -> None:
        self._broker = broker
        self._queue = broker._queue
        #: The broker that is helped.
        self._name = name
        self._peer = courier.with_timeout(peer, 2 * broker._timing.beat_s)
        #: The tokens of its tasks, by id.
        self._tokens: dict[str, str] = {}
        #: Those of these tasks that had no worker at the last heartbeat.
        self._waited: set[str] = set()
        self._unsent: list[TaskOutcome] = []
        self._progress: list[TaskProgress] = []
        #: Set when there may be something to do.
        self.woken = asyncio.Event()

    async def run(self) -> None:
        beat_at = 0.0
        while True:
            if self._tokens:
                await is_set_within(self.woken, max(0.0, beat_at - time.monotonic()))
            else:
                await self.woken.wait()
            self.woken.clear()
            outcomes, progress = self._queue.collect(self._name, "")
            self._unsent += outcomes
            self._progress += progress
            kinds, count = self._broker._wanted(self._name)
            try:
                if self._unsent or count:
                    await self._exchange(kinds, count)
                if self._tokens and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._broker._timing.beat_s
                    await self._beat()
            except LOST:
                await asyncio.sleep(RETRY_S)
                if self._unsent:
                    self.woken.set()

    async def _exchange(self, kinds: Collection[str], count: int) -> None:
        sent = [
            each._replace(token=self._tokens.get(each.id, "")) for each in first_of(self._unsent)
        ]
        held = [each for each in self._tokens if each not in {outcome.id for outcome in sent}]
        found = await self._peer.aio.work(
            self._broker._me, held, sent, kinds, count, 0.0, helps=True
        )
        del self._unsent[: len(sent)]
        if self._unsent or self._queue.has_news(self._name):
            self.woken.set()  # not all went into one call
        self._queue.acknowledge(self._name, [outcome.id for outcome in sent])
        for outcome in sent:
            self._tokens.pop(outcome.id, None)
        if found is None:
            return  # the search is over
        self._tokens.update({each.id: each.token for each in found})
        self._queue.adopt(self._name, found)
        self._broker._hand_out()

    async def _beat(self) -> None:
        await self._give_back()
        progress, self._progress = self._progress, []
        stops = await self._peer.aio.beat(self._broker._me, self._tokens, progress)
        self._queue.stop(self._name, stops)
        for each in self._queue.missing(self._name, stops):
            self._tokens.pop(each, None)  # a model has sent it here, and gets the outcome

    async def _give_back(self) -> None:
        """Gives back tasks that wait since the last heartbeat: their broker may have a worker."""
        waiting = self._queue.waiting(self._name)
        stuck = {each: self._tokens.pop(each) for each in waiting if each in self._waited}
        self._waited = set(waiting).difference(stuck)
        if stuck:
            self._queue.cancel(self._name, stuck)
            await self._peer.aio.give_back(self._broker._me, stuck)
