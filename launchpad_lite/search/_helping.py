"""A broker whose workers wait helps another one, for which it is a worker with many tasks."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(eq=False)
class Helping:
    """Has workers of this broker run tasks of one other broker. For the event loop of the broker."""

    me: Life
    #: The broker that is helped, and a client of it.
    name: str
    peer: Any
    queue: Queue
    timing: Timing
    #: Returns kinds and number of the tasks that are wanted from that broker now.
    wanted: Callable[[str], tuple[Collection[str], int]]
    #: Gives new tasks to workers.
    hand_out: Callable[[], None]
    #: The tokens of its tasks, by id.
    tokens: dict[str, str] = field(default_factory=dict)
    #: Those of these tasks that had no worker at the last heartbeat.
    waited: set[str] = field(default_factory=set)
    unsent: list[TaskOutcome] = field(default_factory=list)
    progress: list[TaskProgress] = field(default_factory=list)
    #: Set when there may be something to do.
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        beat_at = 0.0
        while True:
            if self.tokens:
                await is_set_within(self.woken, max(0.0, beat_at - time.monotonic()))
            else:
                await self.woken.wait()
            self.woken.clear()
            outcomes, progress = self.queue.collect(self.name, "")
            self.unsent += outcomes
            self.progress += progress
            kinds, count = self.wanted(self.name)
            try:
                if self.unsent or count:
                    await self._exchange(kinds, count)
                if self.tokens and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self.timing.beat_s
                    await self._beat()
            except LOST:
                await asyncio.sleep(_RETRY_S)
                if self.unsent:
                    self.woken.set()

    async def _exchange(self, kinds: Collection[str], count: int) -> None:
        sent = [each._replace(token=self.tokens.get(each.id, "")) for each in first_of(self.unsent)]
        held = [each for each in self.tokens if each not in {outcome.id for outcome in sent}]
        found = await self.peer.aio.work(self.me, held, sent, kinds, count, 0.0, helps=True)
        del self.unsent[: len(sent)]
        if self.unsent or self.queue.has_news(self.name):
            self.woken.set()  # not all went into one call
        self.queue.acknowledge(self.name, [outcome.id for outcome in sent])
        for outcome in sent:
            self.tokens.pop(outcome.id, None)
        if found is None:
            return  # the search is over
        self.tokens.update({each.id: each.token for each in found})
        self.queue.adopt(self.name, found)
        self.hand_out()

    async def _beat(self) -> None:
        await self._give_back()
        progress, self.progress = self.progress, []
        stops = await self.peer.aio.beat(self.me, self.tokens, progress)
        self.queue.stop(self.name, stops)
        for each in self.queue.missing(self.name, stops):
            self.tokens.pop(each, None)  # a model has sent it here, and gets the outcome

    async def _give_back(self) -> None:
        """Gives back tasks that wait since the last heartbeat: their broker may have a worker."""
        waiting = self.queue.waiting(self.name)
        stuck = {each: self.tokens.pop(each) for each in waiting if each in self.waited}
        self.waited = set(waiting).difference(stuck)
        if stuck:
            self.queue.cancel(self.name, stuck)
            await self.peer.aio.give_back(self.me, stuck)
