"""Where replicas find each other, and learn that one of them is lost: on replica 0."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple


class Generation(NamedTuple):
    """Replicas that work together, until one of them is lost.

    Attributes:
        number: Which one; later ones have larger numbers.
        infos: What each replica has said of itself, by rank.
    """

    number: int
    infos: tuple[Any, ...]


class Lost(NamedTuple):
    """The end of a generation.

    Attributes:
        rank: Who was lost first.
    """

    rank: int


class _Seat:
    """Of one replica, from its arrival until its generation ends."""

    def __init__(self, info: Any) -> None:
        loop = asyncio.get_running_loop()
        self.info = info
        self.begun: asyncio.Future[Generation] = loop.create_future()
        self.ended: asyncio.Future[Lost] = loop.create_future()


class Meeting:
    """Begins a generation whenever all replicas are there. Runs on the event loop of its node."""

    def __init__(self, size: int, life: int = 0) -> None:
        """Makes one that nobody attends.

        Args:
            size: How many replicas there are.
            life: How often replica 0 was started again: no number of an earlier life comes again.
        """
        self._size = size
        self._number = life << 32
        self._seats: dict[int, _Seat] = {}

    async def attend(self, rank: int, info: Any) -> AsyncIterator[Lost | None]:
        """Takes part, as long as the stream is read.

        Args:
            rank: Who comes; takes the place of an earlier life of it.
            info: What the others are to know of it.

        Yields:
            None at once; then who was lost, if the generation ends.
        """
        before = self._seats.get(rank)
        if before is not None:
            self._end(before, rank)
        seat = self._seats[rank] = _Seat(info)
        try:
            self._begin_if_all_wait()
            yield None
            yield await seat.ended
        finally:
            if self._seats.get(rank) is seat:
                self._end(seat, rank)

    async def begin(self, rank: int) -> Generation:
        """Returns the generation of somebody who attends, once all have come."""
        return await asyncio.shield(self._seats[rank].begun)

    async def leave(self, rank: int) -> None:
        """Says that a replica is through, and its stream ends without a loss."""
        self._seats.pop(rank, None)

    def _begin_if_all_wait(self) -> None:
        waiting = [
            self._seats[rank]
            for rank in range(self._size)
            if rank in self._seats and not self._seats[rank].begun.done()
        ]
        if len(waiting) == self._size:
            self._number += 1
            generation = Generation(self._number, tuple(seat.info for seat in waiting))
            for seat in waiting:
                seat.begun.set_result(generation)

    def _end(self, seat: _Seat, rank: int) -> None:
        """Ends the generation of somebody who is gone, or its wait for one."""
        self._seats = {other: its for other, its in self._seats.items() if its is not seat}
        if not seat.begun.done():
            seat.begun.cancel()
            return
        for other, its in list(self._seats.items()):
            if its.begun.done():  # they come again, to another seat
                if not its.ended.done():  # cancelled, where it is about to go as well
                    its.ended.set_result(Lost(rank))
                del self._seats[other]
