"""A peer: a member of the ring that makes steps.

The ring and this module's own coroutines run on the node's event loop. Code of the user runs in two
threads: one makes the steps, one applies updates.
"""

import asyncio
import contextlib
import contextvars
import functools
import random
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import courier
import launchpad_lite as lp
from launchpad_lite.engines._member import (
    SUCCESSORS,
    Contact,
    ElsewhereError,
    GoneError,
    RingMember,
    distance,
    key_place,
)
from launchpad_lite.engines._population import Gate, Verdict
from launchpad_lite.engines._user_code import Check, run_user_code
from launchpad_lite.engines._values import (
    Key,
    check_first,
    check_key,
    check_updates,
    listed,
    pulled,
)
from launchpad_lite.engines.barriers import Barrier
from launchpad_lite.engines.errors import ValuesLostError

if TYPE_CHECKING:
    from launchpad_lite.engines.peer_to_peer import PeerToPeer

#: Seconds between two looks at the neighbours.
_LOOK_S = 0.2
#: Seconds until something is tried again.
_RETRY_S = 0.05
#: Seconds in which a peer answers who it is, or counts as gone.
PING_S = 2.0
#: Seconds for which a peer tries to get back onto the ring.
PATIENCE_S = 20.0
#: How many peers are asked to tell how many there are.
_ASKED = 100

_LOST = courier.ServerGoneError, courier.CallTimeoutError, courier.CallCancelledError
#: Methods that other members call.
_PROTOCOL = ("neighbours", "search", "admit", "receive", "inherit", "store", "read", "put")


class Peer:
    """Holds values, and makes steps. A node."""

    def __init__(
        self, job: "PeerToPeer", name: str, peers: Mapping[str, Any], replicas: int
    ) -> None:
        self._me = Contact(name, lp.restart_count())
        #: Clients of all peers by name; None in the place of this one.
        self._peers = peers
        self._rng = random.Random(f"{lp.current_node().seed} {self._me.life}")  # noqa: S311
        self._member = RingMember(self._me, replicas, self._call, self._rng)
        for method in _PROTOCOL:
            setattr(self, method, getattr(self._member, method))
        self._job = job.in_node(self._ask_for_job)
        #: The last known owner of each key.
        self._owners: dict[Key, Contact] = {}
        #: Set and replaced when a step is over.
        self._stepped = asyncio.Event()
        #: A peer that comes back does not hold others up until it is on the ring.
        self._makes_steps = self._me.life == 0
        self._is_in_user_code = False
        self._has_entered = asyncio.Event()
        self._stops = asyncio.Event()
        #: Whether it makes the ring: in a second life, unless another peer may have been on one.
        self._makes_ring = name == self._first.name
        #: Whether no peer makes a step before all are there: not, if the ring was there before it.
        self._awaits_all = self._me.life == 0
        #: The peers that have been on the ring, if this is the first peer.
        self._seen_on_ring = {name}
        self._all_greeted = asyncio.Event()
        self._stepping = ThreadPoolExecutor(1, "peer-steps")
        self._applying = ThreadPoolExecutor(1, "peer-updates")
        #: For whom it waits at the barrier.
        self._asked: dict[asyncio.Task[int | None], Contact] = {}
        lp.metrics.view("engine", self._view)

    # Called by other nodes and the job.

    async def get(self, key: Key) -> tuple[Any, int]:
        check_key(key)
        found: tuple[Any, int] = await self._at_owner(key, "read", key)
        return found

    async def set(self, key: Key, value: Any) -> None:
        check_key(key)
        await self._at_owner(key, "put", key, value)

    async def estimate(self) -> float:
        await self._has_entered.wait()
        ring = self._member.ring
        if ring.knows_all():
            return len(ring.successors) + 1.0
        others = self._others()
        asked = self._rng.sample(others, min(_ASKED, len(others)))
        return 1 + len(others) * len(await self._on_ring(asked)) / len(asked)

    # Called by other peers, besides the protocol of the ring.

    async def update(self, key: Key, peer: str, number: tuple[int, int], update: Any) -> None:
        """Applies an update to a value that this peer owns: once for each life and step of a peer."""
        named = key, peer, number[1]

        async def apply(value: Any) -> Any:
            if self._stops.is_set():
                raise ElsewhereError(f"{self._me.name} ends")
            pull = functools.partial(pulled, self._job, self._me.name, *named, value, update)
            return await self._in_thread(self._applying, pull)

        await self._member.update(key, peer, number, apply)

    async def beyond(self, step: int) -> int | None:
        """Returns how many steps this peer has finished, once these are more than `step`.

        None: it makes no steps any more, or not yet again.
        """
        while self._makes_steps and self._member.step <= step:
            await self._stepped.wait()
        return self._member.step if self._makes_steps else None

    async def makes_ring(self) -> bool:
        """Returns whether this peer is going to make the ring, or may."""
        return self._makes_ring and not self._has_entered.is_set()

    async def may_know_ring(self) -> bool:
        """Returns whether this peer has been on the ring, in this life or perhaps in one before."""
        return self._me.life > 0 or self._has_entered.is_set() or self._member.is_on_ring

    async def note_on_ring(self, peer: str) -> None:
        """Tells the first peer that another one is on the ring; returns once all were on it."""
        self._seen_on_ring.add(peer)
        if len(self._seen_on_ring) == len(self._peers) or not self._awaits_all:
            self._all_greeted.set()
        await self._all_greeted.wait()

    def _view(self) -> str:
        names = sorted(each.name for each in self._asked.copy().values())
        waits = f", waits at the barrier for {len(names)}: {', '.join(names[:5])}" if names else ""
        return f"{self._member.step:,} steps{waits}"

    # The steps.

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._mending: asyncio.Task[None] = loop.create_task(self._mend())

        def stop() -> None:
            loop.call_soon_threadsafe(self._stops.set)

        lp.register_stop_handler(stop)
        working = loop.create_task(self._work())
        tending = loop.create_task(self._tend())
        stopping = loop.create_task(self._stops.wait())
        tasks: set[asyncio.Task[Any]] = {working, tending, stopping}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._stops.is_set():
                if not self._is_in_user_code:
                    working.cancel()  # others that it waits for may be gone
                await asyncio.wait({working})
            for task in (working, tending):
                if task.done() and not (task.cancelled() and self._stops.is_set()):
                    task.result()
        finally:
            lp.unregister_stop_handler(stop)
            self._stops.set()
            tasks.add(self._mending)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._stepping.shutdown(wait=False)
            self._applying.shutdown(wait=False)

    async def _work(self) -> None:
        await self._user("start")
        if await self._is_to_make_ring():
            self._awaits_all = True
            self._member.begin(await self._user("initial", check=check_first))
            self._has_entered.set()
        await self._has_entered.wait()
        self._makes_steps = True
        # It may have ended: the others go on without it.
        await self._answer(self._first, "note_on_ring", self._me.name)
        while not await self._user("stop"):
            await self._step()
            await self._pass_barrier()
        self._makes_steps = False
        self._stepped.set()
        await self._user("finish")
        await self._member.leave()

    @property
    def _first(self) -> Contact:
        return Contact(next(iter(self._peers)))

    async def _is_to_make_ring(self) -> bool:
        """Returns whether it makes the ring, once that is certain.

        In a second life it asks all others: there may be a ring, or values that were lost with one.
        """
        gives_up_at = self._loop.time() + PATIENCE_S
        while self._makes_ring and self._me.life and not self._has_entered.is_set():
            asked = [self._answer(other, "may_know_ring") for other in self._others()]
            answers = set(await asyncio.gather(*asked))
            if answers == {False}:
                break
            # One that does not answer may not have started yet.
            may_start = None in answers and True not in answers
            self._makes_ring = may_start and self._loop.time() < gives_up_at
            await asyncio.sleep(_RETRY_S)
        return self._makes_ring and not self._has_entered.is_set()

    def _others(self) -> list[Contact]:
        return [Contact(name) for name in self._peers if name != self._me.name]

    async def _step(self) -> None:
        step = self._member.step
        keys = dict.fromkeys(await self._user("schedule", check=listed))
        found = await asyncio.gather(*map(self.get, keys))
        values = {key: value for key, (value, _) in zip(keys, found, strict=True)}
        updates = await self._user("push", values)
        check_updates(updates, values, self._me.name, step)
        name, number = self._me.name, (self._me.life, step)
        await asyncio.gather(
            *[
                self._at_owner(key, "update", key, name, number, update)
                for key, update in updates.items()
            ]
        )
        self._member.step = max(self._member.step, step + 1)
        self._stepped.set()
        self._stepped = asyncio.Event()

    # The barrier.

    async def _pass_barrier(self) -> None:
        while not await self._waits_for(await self._sample()):
            pass

    async def _waits_for(self, sample: list[Contact]) -> bool:
        """Returns whether it may go on; if not, it is to draw another sample."""
        barrier = self._job.barrier
        gate = Gate(barrier, self._member.step, sample)
        verdict = gate.verdict()
        limit_s = None if isinstance(barrier.resample, str) else barrier.resample
        ends_at = None if limit_s is None else self._loop.time() + limit_s
        asked = self._asked = {}
        try:
            while verdict is Verdict.WAIT:
                for contact, step in gate.questions():
                    answer = self._answer(contact, "beyond", step)
                    asked[self._loop.create_task(answer)] = contact
                left_s = None if ends_at is None else max(0.0, ends_at - self._loop.time())
                done, _ = await asyncio.wait(
                    asked, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return False
                for task in done:
                    contact, finished = asked.pop(task), task.result()
                    if finished is None:
                        verdict = gate.drop(contact)
                    else:
                        verdict = gate.observe(contact, finished)
                    if verdict is not Verdict.WAIT:
                        break
            return verdict is Verdict.ADVANCE
        finally:
            for task in asked:
                task.cancel()
            self._asked = {}

    async def _sample(self) -> list[Contact]:
        barrier, ring = self._job.barrier, self._member.ring
        size = barrier.sample_size
        others = self._others()
        draws_itself = type(barrier).sample is not Barrier.sample
        if size is None or size >= SUCCESSORS or draws_itself:
            return barrier.sample(others, self._rng)
        if ring.knows_all():
            return barrier.sample(ring.successors, self._rng)
        self._rng.shuffle(others)
        found: list[Contact] = []
        while others and len(found) < size:
            some, others = others[: size - len(found)], others[size - len(found) :]
            found += await self._on_ring(some)
        return found

    async def _on_ring(self, some: list[Contact]) -> list[Contact]:
        """Returns those of some others that are on the ring, unless one is alone there."""
        answers = await asyncio.gather(*[self._answer(each, "neighbours") for each in some])
        found = zip(some, answers, strict=True)
        return [each for each, answer in found if answer is not None and answer[1]]

    # The ring.

    async def _tend(self) -> None:
        """Keeps this peer on the ring, or gets it there. If that cannot be, raises ValuesLostError."""
        gives_up_at = self._loop.time() + PATIENCE_S
        while True:
            if not self._is_in_user_code:
                lp.heartbeat()  # a peer that waits for others is not hung
            lost: ValuesLostError | None = None
            try:
                if self._member.is_on_ring:
                    await self._member.look()
                    if self._mending.done():
                        self._mending.result()
                        self._mending = self._loop.create_task(self._mend())
                elif self._me.life or not self._makes_ring or self._has_entered.is_set():
                    await self._member.join(self._entries(self._me.place))
            except (GoneError, ElsewhereError):
                pass
            except ValuesLostError as error:
                lost = error  # unless the peer that does not answer was only slow
            if self._member.is_on_ring:
                self._has_entered.set()
            elif not await self._may_be_made():
                lost = ValuesLostError(self._why_lost())
            if lost is None:
                gives_up_at = self._loop.time() + PATIENCE_S
            elif self._loop.time() > gives_up_at:
                raise lost
            await asyncio.sleep(_LOOK_S if self._has_entered.is_set() else _RETRY_S)

    async def _mend(self) -> None:
        with contextlib.suppress(ElsewhereError):  # it learns that it was taken over
            await self._member.mend()

    async def _may_be_made(self) -> bool:
        """Returns whether the first peer may still be about to make the ring."""
        if self._has_entered.is_set():
            return False
        makes: bool | None = await self._answer(self._first, "makes_ring")
        # One that does not answer may not have started yet.
        return self._me.life == 0 if makes is None else makes

    def _why_lost(self) -> str:
        if self._me.life or self._has_entered.is_set():
            return (
                f"{self._me.name}: no peer is on the ring any more, so the values are lost; more "
                "replicas= survive more crashes at a time"
            )
        return (
            f"{self._me.name}: there is no ring. {self._first.name}, which makes it, has crashed. Another "
            "peer that may have had values has crashed, too, or does not answer, so no new ring is made: "
            "start the program again"
        )

    def _entries(self, place: int) -> list[Contact]:
        """Returns the peers to ask for the owner of a place: first who has it if all are there."""
        if not (self._me.life or self._has_entered.is_set()):
            return self._others()[:1]  # the others wait, too
        everybody = [self._me, *self._others()]
        return sorted(everybody, key=lambda each: distance(place, each.place))

    async def _find(self, place: int) -> tuple[Contact, list[Contact]]:
        first = [self._me] if self._member.ring.knows_all() else []
        return await self._member.find(place, [*first, *self._entries(place)])

    async def _at_owner(self, key: Key, method: str, *args: Any) -> Any:
        """Calls a method of the peer that owns a key by then."""
        await self._has_entered.wait()
        gives_up_at = self._loop.time() + PATIENCE_S
        while True:
            try:
                if key not in self._owners:
                    self._owners[key], _ = await self._find(key_place(key))
                return await self._call(self._owners[key], method, *args)
            except (GoneError, ElsewhereError) as error:
                self._owners.pop(key, None)
                if self._stops.is_set():
                    raise courier.CallCancelledError(f"{self._me.name} is to end") from error
                if self._loop.time() > gives_up_at:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _answer(self, to: Contact, method: str, *args: Any) -> Any:
        """Returns what a method of a peer returns; None if that is gone."""
        try:
            return await self._call(to, method, *args)
        except GoneError:
            return None

    async def _call(self, to: Contact, method: str, *args: Any) -> Any:
        if to.name == self._me.name:
            return await getattr(self, method)(*args)
        client = self._peers[to.name]
        task = self._loop.create_task(getattr(client.aio, method)(*args))
        try:
            while not (await asyncio.wait({task}, timeout=PING_S))[0]:
                if method == "neighbours":
                    raise GoneError(f"{to.name} does not answer")
                await courier.with_timeout(client, PING_S).aio.neighbours()
            return task.result()
        except _LOST as error:
            raise GoneError(f"{to.name}: {error}") from error
        finally:
            task.cancel()

    # Code of the user.

    async def _user(self, method: str, *args: Any, check: Check | None = None) -> Any:
        """Calls a method of the user in the thread of the steps, as `run_user_code`."""
        call = functools.partial(
            run_user_code, self._me.name, self._job, method, *args, check=check
        )
        self._is_in_user_code = True
        try:
            result = await self._in_thread(self._stepping, call)
        finally:
            self._is_in_user_code = False
        lp.heartbeat()
        if self._stops.is_set():
            raise asyncio.CancelledError
        return result

    async def _in_thread(self, thread: ThreadPoolExecutor, function: Callable[[], Any]) -> Any:
        context = contextvars.copy_context()
        return await self._loop.run_in_executor(thread, context.run, function)

    def _ask_for_job(self, method: str, *args: Any) -> Any:
        """Calls a method of this peer for its job, from a thread of that."""
        if not self._has_entered.is_set():
            raise RuntimeError(f"{self._me.name}: there are values after start() and initial()")
        asked: Coroutine[Any, Any, Any] = getattr(self, method)(*args)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
