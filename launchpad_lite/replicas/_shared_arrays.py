"""Operations on arrays by the replicas of one machine, in the memory that they share.

Nothing here compares calls: the caller passes the first meeting of each operation, which does.
"""

import struct
from collections.abc import Callable, Sequence

from launchpad_lite.replicas import _payload
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas._operations import ArrayOperation, blocks, share
from launchpad_lite.replicas._shared_memory import (
    CHUNK_BYTES,
    SLOT_BYTES,
    ReplicaReport,
    SharedGroup,
)

#: The size of a payload, in a slot; the payload follows if it is small.
_HEAD = struct.Struct("<q")
_HEAD_BYTES = 64
_SMALL_BYTES = SLOT_BYTES - _HEAD_BYTES
#: Meets all others, which make the same call.
Enter = Callable[[], None]


class SharedArrays:
    """The arrays of one group of replicas. For one thread."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        #: Counts used slots and chunks, so that a replica fills only those that no other reads.
        self._turn = 0
        self._number = 0

    def next_turn(self) -> None:
        """Begins a turn: each replica may offer one thing, then all meet, then all may read."""
        self._turn += 1

    def offer_small(self, array: Array) -> list[Array]:
        """Offers an array of at most SLOT_BYTES to the others; returns the offers of all."""
        slots = [self._group.slot(index, self._turn) for index in range(len(self._group))]
        offers = [_as(slot, array) for slot in slots]
        offers[self._group.index][:] = array
        return offers

    def offer(self, payload: _payload.Payload) -> Array:
        """Offers a payload of any size to the others; returns what `collect` needs."""
        import numpy as np

        slot = self._group.slot(self._group.index, self._turn)
        nbytes = _payload.written_bytes(payload)
        slot[: _HEAD.size] = memoryview(_HEAD.pack(nbytes))
        is_small = nbytes <= _SMALL_BYTES
        memory = slot[_HEAD_BYTES:] if is_small else np.empty(nbytes, np.uint8)
        _payload.write(payload, memory)
        return memory

    def collect(self, offered: Array) -> list[_payload.Payload]:
        """Returns the offers of all in this turn; the memory belongs to the caller."""
        import numpy as np

        payloads: list[_payload.Payload] = []
        for index in range(len(self._group)):
            slot = self._group.slot(index, self._turn)
            (nbytes,) = _HEAD.unpack(slot[: _HEAD.size].tobytes())
            if nbytes <= _SMALL_BYTES:
                memory = slot[_HEAD_BYTES : _HEAD_BYTES + nbytes].copy()
            else:
                is_mine = index == self._group.index
                memory = offered if is_mine else np.empty(nbytes, np.uint8)
                self.broadcast(memory, index, self.meet)
            payloads.append(_payload.read(memory))
        return payloads

    def meet(self) -> None:
        """Waits until all replicas of the group are here."""
        self._group.meet(ReplicaReport(0), lambda _: True)

    def all_reduce(
        self, array: Array, operation: ArrayOperation, buffer: int, enter: Enter, *, last: bool
    ) -> None:
        """Combines the arrays of all, in place; `enter` makes the first meeting.

        `buffer` is the number of that with the array, in all replicas; 0: there is none.
        """
        if buffer:
            enter()
            self._reduce_in_place(array, operation, buffer, last)
        else:
            parts = self._parts(array)
            self._give(0, parts[0])
            enter()
            self._reduce_in_chunks(parts, operation, last)

    def broadcast(self, array: Array, source: int, enter: Enter) -> None:
        """Copies the array of the replica with the index `source` to the others, in place."""
        is_source = source == self._group.index
        parts = self._parts(array) or [array]
        for step, part in enumerate(parts):  # while a chunk is read, the next one is filled
            chunk = self._chunk(source, step, part)
            if is_source:
                chunk[:] = part
            (self.meet if step else enter)()
            if not is_source:
                part[:] = chunk
        self._number += len(parts)

    def _parts(self, array: Array) -> list[Array]:
        return [array[a:b] for a, b in blocks(len(array), array.itemsize, CHUNK_BYTES)]

    def _chunk(self, index: int, step: int, like: Array) -> Array:
        return _as(self._group.chunk(index, self._number + step), like)

    def _reduce_in_chunks(
        self, parts: Sequence[Array], operation: ArrayOperation, last: bool
    ) -> None:
        # The first chunk is there. At the same time one is filled, the one before combined, the one
        # before that read.
        for step in range(1, len(parts) + 2):
            if step >= 2:
                for part, chunk in self._shares_of_others(step - 2, parts[step - 2], 0):
                    part[:] = chunk
            if step < len(parts):
                self._give(step, parts[step])
            if step <= len(parts):
                self._combine(step - 1, parts[step - 1], operation, last)
                self.meet()
        self._number += len(parts)

    def _give(self, step: int, part: Array) -> None:
        """Fills a chunk with the parts that others combine."""
        for own, chunk in self._shares_of_others(step, part, self._group.index):
            chunk[:] = own

    def _shares_of_others(self, step: int, part: Array, index: int) -> list[tuple[Array, Array]]:
        """Returns the parts that the others combine, in an array and in the chunk of one."""
        chunk = self._chunk(index, step, part)
        begin, end = share(len(part), self._group.index, len(self._group))
        return [(part[:begin], chunk[:begin]), (part[end:], chunk[end:])]

    def _combine(self, step: int, part: Array, operation: ArrayOperation, last: bool) -> None:
        """Combines this replica's share of a chunk, into the chief's chunk and the own array."""
        begin, end = share(len(part), self._group.index, len(self._group))
        arrays = [self._chunk(index, step, part)[begin:end] for index in range(len(self._group))]
        out, own = arrays[0], part[begin:end]
        arrays[self._group.index] = own
        operation.combine(arrays, out, last=last, copies=[own])

    def _reduce_in_place(
        self, array: Array, operation: ArrayOperation, buffer: int, last: bool
    ) -> None:
        begin, end = share(len(array), self._group.index, len(self._group))
        arrays = []
        for index in range(len(self._group)):
            is_mine = index == self._group.index
            its = array if is_mine else _as(self._group.buffer(index, buffer), array)
            arrays.append(its[begin:end])
        operation.combine(arrays, arrays[0], last=last, copies=arrays[1:])
        self.meet()


def _as(memory: Array, like: Array) -> Array:
    return memory[: like.nbytes].view(like.dtype)
