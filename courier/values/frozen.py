"""Memory that many processes of one host map, and that does not change meanwhile.

Sharing costs fresh pages (filling them takes several times as long as a copy), so memory is reused
when it has no reader left. Each mapping, here and elsewhere, goes through a descriptor that was
opened for it alone and holds a shared lock (flock). The kernel drops a lock with the last mapping
behind it, also that of a process that was killed: the process that gets the exclusive lock may
write again.
"""

import collections
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Sequence

#: Whether this system has memory without a name.
AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")

#: Memories that wait for reuse: readers may read two old versions and get a third.
_MAX_IDLE = 2
_IDLE_S = 15.0


def sealed_memory(name: str, size: int) -> int:
    """Returns the descriptor of memory that neither shrinks nor grows."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _Memory:
    __slots__ = ("__weakref__", "descriptor", "idle_since", "owner", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = sealed_memory("courier-shared", size)
        self.owner = os.getpid()
        self.idle_since = 0.0
        _open.add(self)

    def is_looked_at(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return False

    def lend(self) -> int:
        """Returns a descriptor for mapping it, here or elsewhere, which the caller closes."""
        # Opened again, because a lock belongs to what `open` returns.
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, buffer: memoryview, offset: int) -> None:
        # Not through a mapping, which would fault for each page, and clear it first. Measured for
        # 64 MiB of fresh pages: 35 ms instead of 54.
        while buffer:
            written = os.pwrite(self.descriptor, buffer, offset)
            buffer, offset = buffer[written:], offset + written


_open: "weakref.WeakSet[_Memory]" = weakref.WeakSet()
#: Memories without a value. Finalisers change it, so it has no lock.
_idle: collections.deque[_Memory] = collections.deque()


def _take(size: int) -> _Memory:
    for _ in range(len(_idle)):
        try:
            memory = _idle.popleft()
        except IndexError:
            break
        if size <= memory.size <= 2 * size and not memory.is_looked_at():
            return memory
        _idle.append(memory)
    return _Memory(size)


def _give_back(memory: _Memory) -> None:
    # A forked child shares the parent's lock: each would believe that it is the only reader.
    if memory.owner != os.getpid():
        os.close(memory.descriptor)
        return
    memory.idle_since = time.monotonic()
    _idle.append(memory)
    if len(_idle) > _MAX_IDLE:
        _drop_oldest()


def _drop_oldest() -> None:
    try:
        os.close(_idle.popleft().descriptor)
    except IndexError:
        return  # another thread was faster


def tidy(idle_s: float = _IDLE_S) -> bool:
    """Frees memory unused for so many seconds; returns whether some is left, in use or not."""
    while _idle and time.monotonic() - _idle[0].idle_since >= idle_s:
        _drop_oldest()
    return bool(_open)


def _survive_fork() -> None:
    while _idle:
        _drop_oldest()


os.register_at_fork(after_in_child=_survive_fork)


class Frozen:
    """Copies of buffers that never change again."""

    __slots__ = ("__weakref__", "_memory", "lend", "size", "views")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Copies buffers, each to the beginning of a page; raises OSError without memory."""
        sizes = [-(-len(buffer) // mmap.PAGESIZE) * mmap.PAGESIZE for buffer in buffers]
        self.size = sum(sizes)
        self._memory = _take(self.size)
        self.lend = self._memory.lend
        weakref.finalize(self, _give_back, self._memory)
        self.views: list[memoryview] = []
        descriptor = self._memory.lend()
        try:
            offset = 0
            for buffer, size in zip(buffers, sizes, strict=True):
                self._memory.write(buffer, offset)
                memory = mmap.mmap(descriptor, size, offset=offset)
                _frozen[id(memory)] = (weakref.ref(self), offset)
                weakref.finalize(memory, _frozen.pop, id(memory))
                self.views.append(memoryview(memory)[: len(buffer)])
                offset += size
        finally:
            os.close(descriptor)


#: By the memory of a buffer: the whole memory, and the offset in it.
_frozen: dict[int, tuple["weakref.ref[Frozen]", int]] = {}


def frozen_of(buffer: object) -> tuple[Frozen, int] | None:
    """Returns the frozen memory of a buffer that begins at a page of it, and the offset."""
    if not _frozen or not isinstance(buffer, memoryview):
        return None
    memory = buffer.obj
    while isinstance(memory, memoryview):
        memory = memory.obj
    found = _frozen.get(id(memory))
    if found is None:
        return None
    whole = found[0]()
    return None if whole is None else (whole, found[1])
