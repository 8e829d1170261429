"""The meeting on replica 0: replicas find each other there, and learn when one is lost."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from launchpad_lite.replicas.errors import ReplicaLostError


class Generation(NamedTuple):
    """Replicas that work together, until one of them is lost.

    Later generations have larger numbers. `members` are in order, with the `info` of each.
    """

    number: int
    members: tuple[int, ...]
    infos: tuple[Any, ...]


class GenerationEnd(NamedTuple):
    """The end of a generation: a replica was lost, or has come back after an earlier loss."""

    rank: int
    is_back: bool = False


class _Seat:
    def __init__(self, info: Any) -> None:
        loop = asyncio.get_running_loop()
        self.info = info
        self.begun: asyncio.Future[Generation] = loop.create_future()
        self.ended: asyncio.Future[GenerationEnd] = loop.create_future()


class Meeting:
    """Begins a generation whenever all replicas are there. Runs on the event loop of its node."""

    def __init__(
        self, size: int, life: int = 0, least: int | None = None, patience_s: float = 0.0
    ) -> None:
        """Makes one without replicas, of which there are `size`.

        No number comes again of an earlier `life`, which is how often replica 0 was started again.
        After a loss, `least` replicas suffice; all by default. They wait for the others for
        `patience_s`.
        """
        self._size = size
        self._first = self._number = life << 32
        self._least = least or size
        self._patience_s = patience_s
        self._seats: dict[int, _Seat] = {}
        self._has_gone = asyncio.Event()

    async def attend(self, rank: int, info: Any) -> AsyncIterator[GenerationEnd | None]:
        """Takes part, as long as the stream is read.

        The replica takes the place of an earlier life of it. Yields None at once; then the reason,
        if the generation ends. The others get `info`.
        """
        before = self._seats.get(rank)
        if before is not None:
            self._end(before, rank)
        self._end_generation(GenerationEnd(rank, is_back=True))  # one without it
        seat = self._seats[rank] = _Seat(info)
        try:
            self._begin()
            yield None
            yield await seat.ended
        finally:
            if self._seats.get(rank) is seat:
                self._end(seat, rank)

    async def begin(self, rank: int) -> Generation:
        """Returns the generation of a replica that attends, once all have come."""
        if rank not in self._seats:
            raise ReplicaLostError(f"replica {rank} does not attend")
        return await asyncio.shield(self._seats[rank].begun)

    async def leave(self, rank: int) -> None:
        """Notes that a replica has finished; the end of its stream is then no loss.

        Returns to replica 0 when no replica attends any more: until then, it serves the others.
        """
        self._seats.pop(rank, None)
        self._has_gone.set()
        while rank == 0 and self._seats:
            self._has_gone.clear()
            await self._has_gone.wait()

    def _begin(self, *, after: int | None = None) -> None:
        """Begins a generation if all replicas wait for it; or, after some time, if enough do.

        `after` is the last generation when that time began; None: it did not begin.
        """
        are_enough = after == self._number
        waiting = {
            rank: seat for rank, seat in sorted(self._seats.items()) if not seat.begun.done()
        }
        is_enough = len(waiting) >= self._least and 0 in waiting  # which has the snapshot
        if len(waiting) == self._size or (are_enough and is_enough):
            self._number += 1
            infos = tuple(seat.info for seat in waiting.values())
            generation = Generation(self._number, tuple(waiting), infos)
            for seat in waiting.values():
                seat.begun.set_result(generation)
        elif after is None and is_enough and self._number > self._first:
            begin = functools.partial(self._begin, after=self._number)
            asyncio.get_running_loop().call_later(self._patience_s, begin)

    def _end(self, seat: _Seat, rank: int) -> None:
        """Ends the generation of a replica that is gone, or its wait for one."""
        self._seats = {other: its for other, its in self._seats.items() if its is not seat}
        self._has_gone.set()
        if seat.begun.done():
            self._end_generation(GenerationEnd(rank))
        else:
            seat.begun.cancel()

    def _end_generation(self, why: GenerationEnd) -> None:
        for rank, seat in list(self._seats.items()):
            if seat.begun.done():  # they come again, and get another seat
                if not seat.ended.done():  # cancelled if it is about to leave, too
                    seat.ended.set_result(why)
                del self._seats[rank]
