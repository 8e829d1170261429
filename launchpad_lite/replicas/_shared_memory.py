"""Memory that the replicas of one machine share, and their meetings.

Each replica has memory without a name (memfd), and a pipe by which others wake it: its *bell*. The
others open both by `/proc/PID/fd/N`, which works for processes of the same user that see each
other. Nothing is left of them when the processes are gone, however they end. Before a replica
sleeps, it polls for a moment, and rarely while that is in vain: there may be more of them than cores.

One replica of a group is its *chief*: the others report to its bell, and it answers to theirs. A
replica reads memory of another only after a message from it, directly or by the chief, so the
kernel has ordered both.
"""

import contextlib
import mmap
import os
import secrets
import select
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from courier.lowlevel import Spin
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas.errors import ReplicaLostError

#: Bytes that a replica can offer to all others between two meetings.
SLOT_BYTES = 1 << 18
#: Larger arrays pass in chunks of this size.
CHUNK_BYTES = 1 << 20
#: While some read the last result, others combine the present chunk, or fill the next one.
CHUNKS = 3
_SLOTS = 2

_MARK_BYTES = 16
#: The table of buffers in a memory, after its mark: the descriptor and the size of each.
_BUFFER = struct.Struct("<qq")
_TABLE_BYTES = 1 << 18
_MAX_BUFFERS = _TABLE_BYTES // _BUFFER.size - 1
_CHUNKS_AT = _TABLE_BYTES + _SLOTS * SLOT_BYTES
_MEMORY_BYTES = _CHUNKS_AT + CHUNKS * CHUNK_BYTES

#: A report, or its answer: sender or answer, buffer, and digest of the call. Short enough that the
#: kernel keeps it in one piece.
DIGEST_BYTES = 16
MESSAGE = struct.Struct(f"<HxxI{DIGEST_BYTES}s")
_READ_BYTES = 128 * MESSAGE.size
#: In place of a rank or an answer: the sender cannot go on.
GIVEN_UP = 0xFFFF


class ReplicaReport(NamedTuple):
    """The report of a replica to its chief, or the chief's answer.

    `code` is the index of the sender, or the answer. `buffer` is the number of that with the array,
    from 1; 0 means none. `digest` is that of the call.
    """

    code: int
    buffer: int = 0
    digest: bytes = bytes(DIGEST_BYTES)


class MemoryPlace(NamedTuple):
    """The place of a replica's memory and bell, for other processes of the same machine.

    `memory` and `bell` are descriptors in the process `pid`; others write to that end of the bell.
    The memory begins with `mark`, so that no replica takes another process for this one.
    """

    pid: int
    memory: int
    bell: int
    mark: bytes


class OwnMemory:
    """The memory that one replica shares. `interrupt` is thread-safe."""

    def __init__(self) -> None:
        """Makes it; OSError: this system has no such memory."""
        if sys.platform != "linux":
            raise OSError("memory is shared on Linux only")
        self._descriptors = contextlib.ExitStack()
        self._descriptor, self.memory = self._make(_MEMORY_BYTES)
        self.bell, self._rung = self._keep(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        (self.interruption,) = self._keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        mark = secrets.token_bytes(_MARK_BYTES)
        self.memory[:_MARK_BYTES] = mark
        self.place = MemoryPlace(os.getpid(), self._descriptor, self._rung, mark)
        #: The numbers of buffers that are in use, by their addresses; and how many were made.
        self._numbers: dict[int, int] = {}
        self._made = 0

    def buffer(self, nbytes: int) -> Array:
        """Returns zeroed memory that others can open. It is freed after its last use.

        Others cannot open those after the first _MAX_BUFFERS.
        """
        import numpy as np

        self._made += 1
        number = self._made  # not used again: others may know the memory that had it
        if nbytes == 0 or number > _MAX_BUFFERS:
            return np.zeros(nbytes, np.uint8)
        descriptor, memory = self._make(nbytes)
        array = np.frombuffer(memory, np.uint8)
        at = number * _BUFFER.size
        self.memory[at : at + _BUFFER.size] = _BUFFER.pack(descriptor, nbytes)
        self._numbers[_address(array)] = number
        weakref.finalize(memory, self._numbers.pop, _address(array))
        return array

    def find(self, array: Array) -> int:
        """Returns the number of the buffer that begins with an array; 0: there is none."""
        return self._numbers.get(_address(array), 0)

    def numbers(self) -> set[int]:
        """Returns the numbers of the buffers that are in use."""
        return set(self._numbers.values())

    def interrupt(self) -> None:
        """Ends `wait` of this replica."""
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self.interruption, 1)

    def close(self) -> None:
        self._descriptors.close()

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        descriptor = os.memfd_create("launchpad-replica", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors.callback(weakref.finalize(memory, os.close, descriptor))
        return descriptor, memory

    def _keep(self, *descriptors: int) -> tuple[int, ...]:
        for descriptor in descriptors:
            self._descriptors.callback(os.close, descriptor)
        return descriptors


class SharedGroup:
    """Replicas of one machine that see each other's memory. For one thread.

    `index` is that of this replica among `ranks`, which are of all of them; 0 is the chief.
    """

    def __init__(
        self, own: OwnMemory, ranks: Sequence[int], places: Sequence[MemoryPlace], rank: int
    ) -> None:
        """Opens the memory of the others, whose places have the order of `ranks`."""
        import numpy as np

        self.ranks = ranks
        self.index = ranks.index(rank)
        self._own = own
        self._places = places
        self._descriptors = contextlib.ExitStack()
        self._bells: dict[int, int] = {}
        #: From descriptors of processes to the index of the replica.
        self._processes: dict[int, int] = {}
        self._ended: set[int] = set()
        self._buffers: dict[tuple[int, int], Array] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._memories = [self._open(index) for index in range(len(ranks))]
            undo.pop_all()
        self._spin = Spin()
        self._poll = select.poll()
        for descriptor in (own.bell, own.interruption, *self._processes):
            self._poll.register(descriptor, select.POLLIN)
        arrays = [np.frombuffer(memory, np.uint8) for memory in self._memories]
        self._slots = [
            list(array[_TABLE_BYTES:_CHUNKS_AT].reshape(_SLOTS, SLOT_BYTES)) for array in arrays
        ]
        self._chunks = [list(array[_CHUNKS_AT:].reshape(CHUNKS, CHUNK_BYTES)) for array in arrays]

    def __len__(self) -> int:
        return len(self.ranks)

    def slot(self, index: int, turn: int) -> Array:
        """Returns a replica's slot in one turn, as bytes. Fill it only after the turn before."""
        return self._slots[index][turn % _SLOTS]

    def chunk(self, index: int, number: int) -> Array:
        return self._chunks[index][number % CHUNKS]

    def buffer(self, index: int, number: int) -> Array:
        """Returns a buffer of another replica, as bytes; both have reported its number."""
        import numpy as np

        if (index, number) not in self._buffers:
            mine = self._own.numbers()  # who has freed its own will not ask for those of others
            for key in [key for key in self._buffers if key[1] not in mine]:
                del self._buffers[key]
            at = number * _BUFFER.size
            descriptor, nbytes = _BUFFER.unpack(self._memories[index][at : at + _BUFFER.size])
            try:
                memory = _map(self._places[index].pid, descriptor, nbytes)
            except (FileNotFoundError, ProcessLookupError) as error:
                raise self._lost(index) from error
            self._buffers[index, number] = np.frombuffer(memory, np.uint8)
        return self._buffers[index, number]

    def meet(
        self, report: ReplicaReport, decide: Callable[[Sequence[ReplicaReport]], bool]
    ) -> bool:
        """Waits until all replicas of the group are here; returns the answer.

        The chief makes it from all reports by `decide`, before it answers. Raises ReplicaLostError
        if a replica is lost or cannot go on, InterruptedError after `OwnMemory.interrupt`.
        """
        if self.index:
            self._ring(0, report._replace(code=self.index))
            return bool(self._hear(lambda _: True, MESSAGE.size)[0].code)
        reports = {0: report}
        while len(reports) < len(self):
            found = self._hear(lambda index: index not in reports, _READ_BYTES)
            reports.update({each.code: each for each in found})
        answer = decide([reports[index] for index in range(len(self))])
        for index in self._bells:
            self._ring(index, ReplicaReport(answer))
        return answer

    def give_up(self) -> None:
        """Tells the others that this replica cannot go on. Never raises."""
        for index in self._bells:
            with contextlib.suppress(OSError, ReplicaLostError):  # the lost ones cannot be told
                self._ring(index, ReplicaReport(GIVEN_UP, self.ranks[self.index]))

    def close(self) -> None:
        """Closes all descriptors. Arrays stay valid."""
        self._descriptors.close()

    def _open(self, index: int) -> mmap.mmap:
        if index == self.index:
            return self._own.memory
        place = self._places[index]
        if 0 not in (index, self.index):
            return _map_marked(place)  # neither is the chief
        # First: while the process lives, its number belongs to no other.
        process = os.pidfd_open(place.pid)
        self._descriptors.callback(os.close, process)
        memory = _map_marked(place)
        self._bells[index] = _open(place.pid, place.bell, os.O_WRONLY | os.O_NONBLOCK, "pipe:")
        self._descriptors.callback(os.close, self._bells[index])
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(process, select.POLLIN)
        if poll.poll(0):
            raise ProcessLookupError(f"process {place.pid} has ended")
        self._processes[process] = index
        return memory

    def _ring(self, index: int, report: ReplicaReport) -> None:
        try:
            os.write(self._bells[index], MESSAGE.pack(*report))
        except BrokenPipeError as error:  # it ended since the last meeting
            raise self._lost(index) from error

    def _lost(self, index: int) -> ReplicaLostError:
        pid = self._places[index].pid
        return ReplicaLostError(f"replica {self.ranks[index]}: its process {pid} has ended")

    def _hear(self, missing: Callable[[int], bool], nbytes: int) -> list[ReplicaReport]:
        self._wait(missing)
        found = [
            ReplicaReport(*each) for each in MESSAGE.iter_unpack(os.read(self._own.bell, nbytes))
        ]
        for report in found:
            if report.code == GIVEN_UP:
                raise ReplicaLostError(f"replica {report.buffer} cannot go on")
        return found

    def _wait(self, missing: Callable[[int], bool]) -> None:
        """Waits for a message on the own bell, if the report of an index is `missing`."""
        while True:
            lost = [index for index in self._ended if missing(index)]
            poll = self._poll.poll
            found = poll(0) if lost else self._spin.look(poll) or poll()
            ready = {descriptor for descriptor, _ in found}
            if self._own.bell in ready:
                return  # first of all: its sender may have ended since
            if self._own.interruption in ready:
                raise InterruptedError
            if lost:
                raise self._lost(lost[0])
            for process in ready & self._processes.keys():
                self._ended.add(self._processes[process])
                self._poll.unregister(process)


def _map_marked(place: MemoryPlace) -> mmap.mmap:
    memory = _map(place.pid, place.memory, _MEMORY_BYTES)
    if memory[:_MARK_BYTES] != place.mark:
        raise ProcessLookupError(f"process {place.pid} is another one here")
    return memory


def _map(pid: int, descriptor: int, nbytes: int) -> mmap.mmap:
    opened = _open(pid, descriptor, os.O_RDWR, "/memfd:")
    try:
        if os.fstat(opened).st_size < nbytes or os.fstat(opened).st_uid != os.geteuid():
            raise ProcessLookupError(f"process {pid} is another one here")
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _open(pid: int, descriptor: int, flags: int, kind: str) -> int:
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    # To open anything else might wait, or have effects.
    if not str(path.readlink()).startswith(kind):
        raise ProcessLookupError(f"process {pid} is another one here")
    return os.open(path, flags | os.O_CLOEXEC)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
