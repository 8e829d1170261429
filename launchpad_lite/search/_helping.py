"""A broker whose workers wait helps another one, for which it is a worker with many tasks."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

import courier
from launchpad_lite.search._messages import Life, TaskOutcome, TaskProgress, first_of
from launchpad_lite.search._queue import Queue
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import LOST

#: Seconds until a broker that does not answer is called again.
_RETRY_S = 0.2


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event; returns whether it was set in time."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


class Helping:
    """Has workers of this broker run tasks of one other broker. For the event loop of the broker."""

    def __init__(
        self,
        me: Life,
        name: str,
        peer: Any,
        queue: Queue,
        timing: Timing,
        wanted: Callable[[str], tuple[Collection[str], int]],
        hand_out: Callable[[], None],
    ) -> None:
        self._me = me
        #: The broker that is helped.
        self._name = name
        self._peer = courier.with_timeout(peer, 2 * timing.beat_s)
        self._queue = queue
        self._timing = timing
        #: Returns kinds and number of the tasks that are wanted from that broker now.
        self._wanted = wanted
        #: Gives new tasks to workers.
        self._hand_out = hand_out
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
            kinds, count = self._wanted(self._name)
            try:
                if self._unsent or count:
                    await self._exchange(kinds, count)
                if self._tokens and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._timing.beat_s
                    await self._beat()
            except LOST:
                await asyncio.sleep(_RETRY_S)
                if self._unsent:
                    self.woken.set()

    async def _exchange(self, kinds: Collection[str], count: int) -> None:
        sent = [
            each._replace(token=self._tokens.get(each.id, "")) for each in first_of(self._unsent)
        ]
        held = [each for each in self._tokens if each not in {outcome.id for outcome in sent}]
        found = await self._peer.aio.work(self._me, held, sent, kinds, count, 0.0, helps=True)
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
        self._hand_out()

    async def _beat(self) -> None:
        await self._give_back()
        progress, self._progress = self._progress, []
        stops = await self._peer.aio.beat(self._me, self._tokens, progress)
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
            await self._peer.aio.give_back(self._me, stuck)
