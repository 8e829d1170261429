"""Replicas that share no memory exchange arrays over courier, through one leader of each group.

Small things go to the first leader, which answers all. Large arrays go around a ring, in chunks, so
that each leader sends and receives at the same time, and each connection carries an array once in
each direction at most twice.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import courier
from launchpad_lite.replicas._mailbox import Box, Join
from launchpad_lite.replicas._operations import ArrayOperation, blocks, share
from launchpad_lite.replicas.errors import ReplicaLostError

if TYPE_CHECKING:
    import concurrent.futures

    import numpy as np

    Array = np.ndarray[Any, Any]

_CHUNK_BYTES = 1 << 20
#: Chunks that a leader has sent, and its neighbour has not received, at most.
_IN_FLIGHT = 8


class Courier:
    """The mailboxes of all replicas, as one of them calls them. `interrupt` is thread-safe."""

    def __init__(self, rank: int, generation: int, box: Box, peers: Sequence[Any]) -> None:
        self.rank = rank
        self._generation = generation
        self._box = box
        self._peers = peers
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._waits_for: concurrent.futures.Future[Any] | None = None

    def meet(self, turn: int, host: int, item: Any, join: Join, size: int) -> Any:
        """Takes part in the meeting at a replica; returns its result.

        Args:
            turn: The number of the meeting, the same for all that take part.
            host: The replica that it is at.
            item: The item of this replica.
            join: Makes the result of the items, by rank.
            size: How many replicas take part.
        """
        if host == self.rank:
            answer = self._box.meet(self._generation, turn, host, item, (join, size))
        else:
            meet = self._peers[host].futures.replica_meet
            answer = meet(self._generation, turn, self.rank, item)
        return self.wait(answer, host)

    def put(self, rank: int, key: Any, item: Any) -> "concurrent.futures.Future[None]":
        """Sends something to a replica. It must not change until the future is done."""
        put: concurrent.futures.Future[None] = self._peers[rank].futures.replica_put(
            self._generation, key, item
        )
        put.add_done_callback(_read)  # after an error no caller waits for it
        return put

    def take(self, key: Any) -> Any:
        """Waits for an item from another replica."""
        return self._box.take(self._generation, key)

    def wait(self, future: "concurrent.futures.Future[Any]", rank: int) -> Any:
        """Waits for the answer of a replica.

        Raises:
            ReplicaLostError: It does not answer any more.
        """
        with self._lock:
            self._waits_for = future
            error = self._error
        try:
            if error is not None:
                raise error
            return future.result()
        except courier.CourierError as failure:
            raise ReplicaLostError(f"replica {rank}: {failure}") from failure
        finally:
            self._waits_for = None

    def interrupt(self, error: Exception) -> None:
        """Ends all waits here with an error."""
        with self._lock:
            self._error = error
            waits_for = self._waits_for
        if waits_for is not None:
            waits_for.cancel()
        self._box.fail(error)


class Leaders:
    """The leaders of the groups of replicas, which share memory. For one thread."""

    def __init__(self, courier: Courier, ranks: Sequence[int], ring: Sequence[int]) -> None:
        """Makes it; sends nothing.

        Args:
            courier: Of this replica.
            ranks: Of all leaders, in order.
            ring: The same, with those of one machine next to each other.
        """
        self._courier = courier
        self._ranks = ranks
        self._ring = ring
        self._at = ring.index(courier.rank)
        self._turn = 0

    def meet(self, item: Any, join: Join) -> Any:
        """Exchanges items with all leaders; returns the result of `join` at the first of them."""
        self._turn += 1
        return self._courier.meet(self._turn, self._ranks[0], item, join, len(self._ranks))

    def all_gather(self, item: Any) -> dict[int, Any]:
        """Returns the value of each leader, by rank."""
        self._turn += 1
        others = [rank for rank in self._ranks if rank != self._courier.rank]
        key = (self._turn, self._courier.rank)
        sent = [(self._courier.put(rank, key, item), rank) for rank in others]
        items = {rank: self._courier.take((self._turn, rank)) for rank in others}
        for future, rank in sent:
            self._courier.wait(future, rank)
        return {**items, self._courier.rank: item}

    def all_reduce(self, array: "Array", operation: ArrayOperation) -> None:
        """Combines the arrays of all leaders, in place.

        For each part, a partial result goes around once, and then the result.
        """
        self._turn += 1
        size, at = len(self._ring), self._at
        parts = [array[begin:end] for begin, end in self._shares(len(array))]
        sending = _Sending(self._courier, self._ring[(at + 1) % size], self._turn)
        for chunk in _chunks(parts[at]):
            sending.send(0, chunk)
        for step in range(2 * size - 2):
            for number, chunk in enumerate(_chunks(parts[(at - step - 1) % size])):
                got = self._courier.take((self._turn, step, number))
                if step < size - 1:
                    operation.combine([chunk, got], chunk, last=step == size - 2)
                else:
                    chunk[:] = got
                if step < 2 * size - 3:
                    sending.send(step + 1, chunk)
        sending.finish()

    def broadcast(self, array: "Array", source: int) -> None:
        """Copies the array of one leader to all, in place: along the ring."""
        self._turn += 1
        size = len(self._ring)
        hops = (self._at - self._ring.index(source)) % size
        sending = _Sending(self._courier, self._ring[(self._at + 1) % size], self._turn)
        for number, chunk in enumerate(_chunks(array)):
            if hops:
                chunk[:] = self._courier.take((self._turn, 0, number))
            if hops < size - 1:
                sending.send(0, chunk)
        sending.finish()

    def _shares(self, length: int) -> Iterator[tuple[int, int]]:
        size = len(self._ring)
        return (share(length, index, size) for index in range(size))


class _Sending:
    """Chunks on their way to the next leader."""

    def __init__(self, courier: Courier, rank: int, turn: int) -> None:
        self._courier = courier
        self._rank = rank
        self._turn = turn
        self._step = -1
        self._number = 0
        self._futures: deque[concurrent.futures.Future[None]] = deque()

    def send(self, step: int, chunk: "Array") -> None:
        """Sends the next chunk of a step.

        A caller that waits for the answers knows that the memory of the chunks may change. Within a
        ring that is known before: a result comes back only where its partial results have been.
        """
        self._number = self._number + 1 if step == self._step else 0
        self._step = step
        key = (self._turn, step, self._number)
        self._futures.append(self._courier.put(self._rank, key, chunk))
        while len(self._futures) > _IN_FLIGHT:
            self._courier.wait(self._futures.popleft(), self._rank)

    def finish(self) -> None:
        """Waits until all has arrived."""
        while self._futures:
            self._courier.wait(self._futures.popleft(), self._rank)


def _read(future: "concurrent.futures.Future[None]") -> None:
    if not future.cancelled():
        future.exception()


def _chunks(part: "Array") -> "Iterator[Array]":
    return (part[begin:end] for begin, end in blocks(len(part), part.itemsize, _CHUNK_BYTES))
