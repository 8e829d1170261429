"""Replicas that share no memory exchange arrays over courier, through one leader of each group.

Small things go to the first leader, which answers all. Large arrays go around a ring, by streams
between neighbours, in pieces, so that each leader sends and receives at the same time, and each
stream carries an array at most twice.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import courier
from courier.lowlevel import ByteStream, Duplex, open_stream
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas._mailbox import STREAM_IS_TAKEN, Box, Join
from launchpad_lite.replicas._operations import ArrayOperation, blocks, share
from launchpad_lite.replicas.errors import ReplicaLostError

#: Bytes that are received before they are combined: they stay in the caches of a core.
_PIECE_BYTES = 1 << 18
#: From here on, and with more than two cores, another thread sends: TLS keeps both busy.
_ASIDE_BYTES, _ASIDE_CORES = 1 << 23, 2


class Courier:
    """The mailboxes of all replicas, as one of them calls them. `interrupt` is thread-safe."""

    def __init__(self, rank: int, generation: int, box: Box, peers: Sequence[Any]) -> None:
        self.rank = rank
        self._generation = generation
        self._box = box
        self._peers = peers
        #: Guards what `interrupt` sets, and what it looks at.
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self._waits_for: Future[Any] | None = None
        self._streams: Sequence[ByteStream] = ()

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
        put: Future[None] = self._peers[rank].futures.replica_put(self._generation, key, item)
        put.add_done_callback(lambda _: None)  # after an error no caller waits: it is not logged
        return put

    def ring(self, after: int, before: int) -> Duplex:
        """Opens the streams to the replica after this one, and from the one before."""
        out = open_stream(self._peers[after], "replica_stream", self._generation)
        into = self.take(STREAM_IS_TAKEN)
        out.where, into.where = f"replica {after}", f"replica {before}"
        with self._lock:
            if self.error is not None:
                raise self.error
            self._streams = out, into
        Duplex(out, out).receive(memoryview(bytearray(1)))  # it was taken
        return Duplex(out, into)

    def take(self, key: Any) -> Any:
        return self._box.take(self._generation, key)

    def wait(self, future: Future[Any], rank: int) -> Any:
        """Waits for the answer of a replica; ReplicaLostError: it does not answer any more."""
        with self._lock:
            self._waits_for = future
            error = self.error
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
            error = self.error = self.error or error
            waits_for = self._waits_for
        self.close()
        if waits_for is not None:
            waits_for.cancel()
        self._box.fail(error)

    def close(self) -> None:
        for stream in self._streams:
            stream.shut()


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
        self._streams: Duplex | None = None

    def meet(self, item: Any, join: Join) -> Any:
        """Exchanges items with all leaders; returns the result of `join` at the first of them."""
        self._turn += 1
        return self._courier.meet(self._turn, self._ranks[0], item, join, len(self._ranks))

    def all_gather(self, item: Any) -> dict[int, Any]:
        self._turn += 1
        others = [rank for rank in self._ranks if rank != self._courier.rank]
        puts = [self._courier.put(rank, (self._turn, self._courier.rank), item) for rank in others]
        items = {rank: self._courier.take((self._turn, rank)) for rank in others}
        for put, rank in zip(puts, others, strict=True):
            self._courier.wait(put, rank)
        return {**items, self._courier.rank: item}

    def all_reduce(self, array: Array, operation: ArrayOperation) -> None:
        """Combines the arrays of all leaders, in place.

        For each part, a partial result goes around once, and then the result. A piece comes back as
        a result only where its partial results have been, so that its memory may change by then.
        """
        size, at = len(self._ring), self._at
        shares = [share(len(array), index, size) for index in range(size)]
        parts = [array[begin:end] for begin, end in shares]
        with self._open_streams(array) as streams:
            streams.send(_bytes_of(parts[at]))
            for step in range(2 * size - 2):
                for piece in _pieces(parts[(at - step - 1) % size]):
                    if step < size - 1:
                        got = self._room[: piece.nbytes].view(piece.dtype)
                        streams.receive(_bytes_of(got))
                        operation.combine([piece, got], piece, last=step == size - 2)
                    else:
                        streams.receive(_bytes_of(piece))
                    if step < 2 * size - 3:
                        streams.send(_bytes_of(piece))

    def broadcast(self, array: Array, source: int) -> None:
        """Copies the array of one leader to all, in place: along the ring."""
        size = len(self._ring)
        hops = (self._at - self._ring.index(source)) % size
        with self._open_streams(array) as streams:
            for piece in _pieces(array):
                if hops:
                    streams.receive(_bytes_of(piece))
                if hops < size - 1:
                    streams.send(_bytes_of(piece))

    @contextlib.contextmanager
    def _open_streams(self, array: Array) -> Iterator[Duplex]:
        """Opens the streams, if they are not; at the end of the context, all is sent."""
        import numpy as np

        try:
            if self._streams is None:
                neighbours = [self._ring[(self._at + step) % len(self._ring)] for step in (1, -1)]
                self._streams = self._courier.ring(*neighbours)
                self._room = np.empty(_PIECE_BYTES, np.uint8)
            has_cores = len(os.sched_getaffinity(0)) > _ASIDE_CORES
            with self._streams.sending(aside=has_cores and array.nbytes >= _ASIDE_BYTES):
                yield self._streams
        except courier.CourierError as failure:
            raise ReplicaLostError(str(failure)) from failure


def _bytes_of(array: Array) -> memoryview:
    return array.view("u1").data


def _pieces(part: Array) -> Iterator[Array]:
    return (part[begin:end] for begin, end in blocks(len(part), part.itemsize, _PIECE_BYTES))
