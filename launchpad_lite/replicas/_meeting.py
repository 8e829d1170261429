"""Where replicas find each other, and learn that one of them is lost: on replica 0."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple


class Generation(NamedTuple):
    """Replicas that work together, until one of them is lost.

    Attributes:
        number: Which one; counts from 1.
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

    def __init__(self, size: int) -> None:
        """Makes one that nobody attends.

        Args:
            size: How many replicas there are.
        """
        self._size = size
        self._number = 0
        self._seats: dict[int, _Seat] = {}

    async def attend(self, rank: int, info: Any) -> AsyncIterator["Generation | Lost"]:
        """Takes part, as long as the stream is read.

        Args:
            rank: Who comes; takes the place of an earlier life of it.
            info: What the others are to know of it.

        Yields:
            The generation, when all have come; then that it has ended, if it does.
        """
        before = self._seats.get(rank)
        if before is not None:
            self._end(before, rank)
        seat = self._seats[rank] = _Seat(info)
        try:
            self._begin_if_all_wait()
            yield await seat.begun
            yield await seat.ended
        finally:
            if self._seats.get(rank) is seat:
                self._end(seat, rank)

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
                its.ended.set_result(Lost(rank))
                del self._seats[other]
