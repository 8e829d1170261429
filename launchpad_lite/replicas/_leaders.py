"""Replicas that share no memory exchange arrays over courier, through one leader of each group.

Small things go to the first leader, which answers all. Large arrays go around a ring, in chunks, so
that each leader sends and receives at the same time, and each connection carries an array once in
each direction at most twice.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import courier
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas._mailbox import Box, Join
from launchpad_lite.replicas._operations import ArrayOperation, blocks, share
from launchpad_lite.replicas.errors import ReplicaLostError

_CHUNK_BYTES = 1 << 22
#: Items that a leader has sent, and others have not received, at most.
_MOST_OPEN = 8
#: Chunks of its own part that a leader sends before the first one comes.
_AHEAD = 4


class Courier:
    """The mailboxes of all replicas, as one of them calls them. `interrupt` is thread-safe."""

    def __init__(self, rank: int, generation: int, box: Box, peers: Sequence[Any]) -> None:
        self.rank = rank
        self._generation = generation
        self._box = box
        self._peers = peers
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._waits_for: Future[Any] | None = None

    def meet(self, turn: int, host: int, item: Any, join: Join, size: int) -> Any:
        """Takes part in the meeting at the replica `host`; returns its result.

        It is made by `join` from the items of all, by rank. All that take part give the same
        `turn`.
        """
        if host == self.rank:
            answer = self._box.meet(self._generation, turn, host, item, (join, size))
        else:
            meet = self._peers[host].futures.replica_meet
            answer = meet(self._generation, turn, self.rank, item)
        return self.wait(answer, host)

    def put(self, rank: int, key: Any, item: Any) -> Future[None]:
        """Sends something to a replica. It must not change until the future is done."""
        put = self._peers[rank].futures.replica_put
        return put(self._generation, key, item)  # type: ignore[no-any-return]

    def take(self, key: Any) -> Any:
        return self._box.take(self._generation, key)

    def wait(self, future: Future[Any], rank: int) -> Any:
        """Waits for the answer of a replica; ReplicaLostError: it does not answer any more."""
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

        `ring` is `ranks` with those of one machine next to each other.
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
        self._turn += 1
        others = [rank for rank in self._ranks if rank != self._courier.rank]
        with _OpenPuts(self._courier) as puts:
            for rank in others:
                puts.send(rank, (self._turn, self._courier.rank), item)
            items = {rank: self._courier.take((self._turn, rank)) for rank in others}
        return {**items, self._courier.rank: item}

    def all_reduce(self, array: Array, operation: ArrayOperation) -> None:
        """Combines the arrays of all leaders, in place.

        For each part, a partial result goes around once, and then the result. A chunk comes back as
        a result only where its partial results have been, so that its memory may change by then.
        """
        self._turn += 1
        size, at = len(self._ring), self._at
        after = self._ring[(at + 1) % size]
        shares = [share(len(array), index, size) for index in range(size)]
        parts = [array[begin:end] for begin, end in shares]
        own = enumerate(_chunks(parts[at]))
        with _OpenPuts(self._courier) as puts:

            def send_own(count: int | None) -> None:
                for number, chunk in itertools.islice(own, count):
                    puts.send(after, (self._turn, 0, number), chunk)

            send_own(_AHEAD)
            for step in range(2 * size - 2):
                for number, chunk in enumerate(_chunks(parts[(at - step - 1) % size])):
                    got = self._courier.take((self._turn, step, number))
                    if step < size - 1:
                        operation.combine([chunk, got], chunk, last=step == size - 2)
                    else:
                        chunk[:] = got
                    if step < 2 * size - 3:
                        puts.send(after, (self._turn, step + 1, number), chunk)
                    send_own(1)
                send_own(None)  # it may have one chunk more than others

    def broadcast(self, array: Array, source: int) -> None:
        """Copies the array of one leader to all, in place: along the ring."""
        self._turn += 1
        size = len(self._ring)
        hops = (self._at - self._ring.index(source)) % size
        with _OpenPuts(self._courier) as puts:
            for number, chunk in enumerate(_chunks(array)):
                if hops:
                    chunk[:] = self._courier.take((self._turn, number))
                if hops < size - 1:
                    puts.send(self._ring[(self._at + 1) % size], (self._turn, number), chunk)


class _OpenPuts:
    """Items on their way to other leaders. The end of the context waits until all have arrived."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._open: deque[tuple[Future[None], int]] = deque()

    def __enter__(self) -> "_OpenPuts":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            while self._open and kind is None:
                self._courier.wait(*self._open[0])
                self._open.popleft()
        finally:
            for put, _ in self._open:
                put.add_done_callback(_read)  # after an error no caller waits for it

    def send(self, rank: int, key: Any, item: Any) -> None:
        """Sends an item, which must not change until it has arrived; waits while many are open."""
        self._open.append((self._courier.put(rank, key, item), rank))
        while len(self._open) > _MOST_OPEN:
            self._courier.wait(*self._open[0])
            self._open.popleft()


def _read(future: Future[None]) -> None:
    if not future.cancelled():
        future.exception()


def _chunks(part: Array) -> Iterator[Array]:
    return (part[begin:end] for begin, end in blocks(len(part), part.itemsize, _CHUNK_BYTES))
