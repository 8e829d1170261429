"""Operations on arrays by the replicas of one machine, in the memory that they share.

Nothing here compares calls: the caller passes the first meeting of each operation, which does.
"""

import enum
import struct
from collections.abc import Callable, Sequence

from launchpad_lite.replicas import _payload
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas._operations import ArrayOperation, blocks, share
from launchpad_lite.replicas._shared_memory import (
    CHUNK_BYTES,
    SLOT_BYTES,
    OwnMemory,
    ReplicaReport,
    SharedGroup,
)

#: Before a payload in a slot: the descriptor of its memory, or -1 if it is in the slot; and its
#: size.
_HEAD = struct.Struct("<qq")
_HEAD_BYTES = 64


class Answer(enum.IntEnum):
    """The result of the first meeting of a call."""

    #: All make the same call.
    SAME = 0
    #: The same call, and their arrays lie at the same place of the same buffer.
    PLACED = 1
    #: The same call; some arrays lie in buffers, but not all at the same place.
    MIXED = 2
    #: They make different calls.
    DIFFERENT = 3


#: Meets all others; takes the place of the own array.
Enter = Callable[[tuple[int, int]], Answer]


class SharedArrays:
    """The arrays of one group of replicas. For one thread."""

    def __init__(self, own: OwnMemory, group: SharedGroup) -> None:
        self._own = own
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

    def offer(self, payload: _payload.Payload) -> None:
        slot = self._group.slot(self._group.index, self._turn)
        nbytes = _payload.written_bytes(payload)
        if nbytes <= SLOT_BYTES - _HEAD_BYTES:
            descriptor, memory = -1, slot[_HEAD_BYTES:]
        else:
            descriptor, memory = self._own.lend(nbytes)
        _payload.write(payload, memory)
        slot[: _HEAD.size] = memoryview(_HEAD.pack(descriptor, nbytes))

    def collect(self) -> list[_payload.Payload]:
        """Returns the offers of all in this turn; the memory belongs to the caller."""
        heads = [
            _HEAD.unpack(self._group.slot(index, self._turn)[: _HEAD.size].tobytes())
            for index in range(len(self._group))
        ]
        payloads: list[_payload.Payload] = [
            _payload.read(self._copy(index, *head)) for index, head in enumerate(heads)
        ]
        if any(descriptor >= 0 for descriptor, _ in heads):
            self.meet()
            self._own.take_back()
        return payloads

    def meet(self) -> None:
        """Waits until all replicas of the group are here."""
        self._group.meet(ReplicaReport(0), lambda _: 0)

    def all_reduce(
        self, array: Array, operation: ArrayOperation, enter: Enter, *, last: bool
    ) -> None:
        """Combines the arrays of all, in place; `enter` makes the first meeting."""
        place = self._own.find(array)
        parts = self._parts(array)
        if not place[0]:
            self._give(0, parts[0])
        answer = enter(place)
        if answer is Answer.PLACED:
            self._reduce_in_place(array, operation, place, last)
        else:
            self._reduce_in_chunks(parts, operation, last, answer is Answer.SAME)

    def broadcast(self, array: Array, source: int, enter: Enter) -> None:
        """Copies the array of the replica with the index `source` to all, in place."""
        is_source = source == self._group.index
        if array.nbytes <= SLOT_BYTES:
            slot = _as(self._group.slot(source, self._turn), array)
            if is_source:
                slot[:] = array
            enter((0, 0))
            array[:] = slot
            return
        place = self._own.find(array)
        parts = self._parts(array)
        if is_source:
            self._fill(0, parts[0])
        if enter(place) is Answer.PLACED:
            if not is_source:
                array[:] = self._placed(source, place, array)
            self.meet()  # the source may change it from now on
        else:
            self._pass_chunks(parts, source)

    def _copy(self, index: int, descriptor: int, nbytes: int) -> Array:
        if descriptor >= 0:
            return self._group.copy_lent(index, descriptor, nbytes)
        slot = self._group.slot(index, self._turn)
        copy: Array = slot[_HEAD_BYTES : _HEAD_BYTES + nbytes].copy()
        return copy

    def _parts(self, array: Array) -> list[Array]:
        return [array[a:b] for a, b in blocks(len(array), array.itemsize, CHUNK_BYTES)]

    def _chunk(self, index: int, step: int, like: Array) -> Array:
        return _as(self._group.chunk(index, self._number + step), like)

    def _fill(self, step: int, part: Array) -> None:
        self._chunk(self._group.index, step, part)[:] = part

    def _reduce_in_chunks(
        self, parts: Sequence[Array], operation: ArrayOperation, last: bool, has_begun: bool
    ) -> None:
        # At the same time one chunk is filled, the one before combined, the one before that read.
        for step in range(1 if has_begun else 0, len(parts) + 2):
            if step >= 2:
                for part, chunk in self._shares_of_others(step - 2, parts[step - 2], 0):
                    part[:] = chunk
            if step < len(parts):
                self._give(step, parts[step])
            if 1 <= step <= len(parts):
                self._combine(step - 1, parts[step - 1], operation, last)
            if step <= len(parts):
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
        self, array: Array, operation: ArrayOperation, place: tuple[int, int], last: bool
    ) -> None:
        begin, end = share(len(array), self._group.index, len(self._group))
        arrays = [self._placed(index, place, array)[begin:end] for index in range(len(self._group))]
        operation.combine(arrays, arrays[0], last=last, copies=arrays[1:])
        self.meet()

    def _placed(self, index: int, place: tuple[int, int], like: Array) -> Array:
        number, offset = place
        return _as(self._group.buffer(index, number)[offset:], like)

    def _pass_chunks(self, parts: Sequence[Array], source: int) -> None:
        # The first chunk is there. While it is read, the next one is filled.
        for step, part in enumerate(parts):
            if source == self._group.index:
                if step + 1 < len(parts):
                    self._fill(step + 1, parts[step + 1])
            else:
                part[:] = self._chunk(source, step, part)
            if step + 1 < len(parts):
                self.meet()
        self._number += len(parts)


def _as(memory: Array, like: Array) -> Array:
    return memory[: like.nbytes].view(like.dtype)
