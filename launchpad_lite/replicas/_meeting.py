"""Where replicas find each other, and learn that one of them is lost: on replica 0."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from launchpad_lite.replicas.errors import ReplicaLostError


class Generation(NamedTuple):
    """Replicas that work together, until one of them is lost.

    Attributes:
        number: Which one; later ones have larger numbers.
        members: Which replicas take part, in order.
        infos: What each of them has said of itself.
    """

    number: int
    members: tuple[int, ...]
    infos: tuple[Any, ...]


class Ended(NamedTuple):
    """The end of a generation.

    Attributes:
        rank: Whose loss has ended it, or whose return.
        is_back: Whether it was lost before, and has come back.
    """

    rank: int
    is_back: bool = False


class _Seat:
    """Of one replica, from its arrival until its generation ends."""

    def __init__(self, info: Any) -> None:
        loop = asyncio.get_running_loop()
        self.info = info
        self.begun: asyncio.Future[Generation] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()


class Meeting:
    """Begins a generation whenever all replicas are there. Runs on the event loop of its node."""

    def __init__(
        self, size: int, life: int = 0, least: int | None = None, patience_s: float = 0.0
    ) -> None:
        """Makes one that nobody attends.

        Args:
            size: How many replicas there are.
            life: How often replica 0 was started again: no number of an earlier life comes again.
            least: How many are enough after a loss; all by default.
            patience_s: Seconds for which the others are waited for even then.
        """
        self._size = size
        self._first = self._number = life << 32
        self._least = least or size
        self._patience_s = patience_s
        self._seats: dict[int, _Seat] = {}
        self._has_gone = asyncio.Event()

    async def attend(self, rank: int, info: Any) -> AsyncIterator[Ended | None]:
        """Takes part, as long as the stream is read.

        Args:
            rank: Who comes; takes the place of an earlier life of it.
            info: What the others are to know of it.

        Yields:
            None at once; then why the generation ends, if it does.
        """
        before = self._seats.get(rank)
        if before is not None:
            self._end(before, rank)
        self._end_generation(Ended(rank, is_back=True))  # one without it
        seat = self._seats[rank] = _Seat(info)
        try:
            self._begin()
            yield None
            yield await seat.ended
        finally:
            if self._seats.get(rank) is seat:
                self._end(seat, rank)

    async def begin(self, rank: int) -> Generation:
        """Returns the generation of somebody who attends, once all have come.

        Raises:
            ReplicaLostError: It does not attend any more: this is another life of replica 0, say.
        """
        if rank not in self._seats:
            raise ReplicaLostError(f"replica {rank} does not attend")
        return await asyncio.shield(self._seats[rank].begun)

    async def leave(self, rank: int) -> None:
        """Says that a replica is through, and its stream ends without a loss.

        Returns to replica 0 when nobody attends any more: until then, it serves the others.
        """
        self._seats.pop(rank, None)
        self._has_gone.set()
        while rank == 0 and self._seats:
            self._has_gone.clear()
            await self._has_gone.wait()

    def _begin(self, *, after: int | None = None) -> None:
        """Begins a generation if all wait for it; or, after some time, those who are enough.

        Args:
            after: Which generation was the last one when that time began; None: it did not.
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
        """Ends the generation of somebody who is gone, or its wait for one."""
        self._seats = {other: its for other, its in self._seats.items() if its is not seat}
        self._has_gone.set()
        if seat.begun.done():
            self._end_generation(Ended(rank))
        else:
            seat.begun.cancel()

    def _end_generation(self, why: Ended) -> None:
        for rank, seat in list(self._seats.items()):
            if seat.begun.done():  # they come again, to another seat
                if not seat.ended.done():  # cancelled, where it is about to go as well
                    seat.ended.set_result(why)
                del self._seats[rank]
