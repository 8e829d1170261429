"""Memory for received bytes, which is used again when the last view of it is freed.

The kernel clears each fresh page at its first use, which takes longer than to receive bytes into a
page that is there: 64 MiB in fresh pages cost 16,384 page faults.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable

#: Unused memory that is kept: so many bytes in all, and this part of what a process may have.
_MAX_IDLE_BYTES, _MAX_IDLE_PART = 256 << 20, 1 / 16
_IDLE_S = 15.0
#: Sizes are rounded to steps, so that more messages fit: by a thirty-second, and by 64 KiB at least.
_STEP_BITS, _LEAST_STEP_BYTES = 6, 1 << 16

#: Unused memory by its size, the newest last, each with the time since when. Finalisers change it,
#: also while other code does: it has no lock, and its keys stay.
_idle: dict[int, list[tuple[float, mmap.mmap]]] = {}
#: Who calls `tidy`, and what to call when there is something to tidy again; without them, no memory
#: is kept.
_tidiers: dict[object, Callable[[], object]] = {}


def begin(tidier: object, wake: Callable[[], object] = lambda: None) -> None:
    """Notes that `tidy` will be called, until `end`.

    Args:
        tidier: Who calls it: as long as it returns true, and after `wake`.
        wake: Called when memory is kept, in finalisers; one that calls `tidy` anyway needs none.
    """
    _tidiers[tidier] = wake


def end(tidier: object) -> None:
    _tidiers.pop(tidier, None)
    if not _tidiers:
        tidy(0.0)


def take(size_bytes: int) -> memoryview:
    """Returns writable memory, with any bytes in it. Thread-safe."""
    step = max(_LEAST_STEP_BYTES, 1 << (size_bytes.bit_length() - _STEP_BITS))
    size = -(-size_bytes // step) * step
    try:
        entry = _idle[size].pop()
        # More references: the collector destroys an object that still has a view, whose finaliser
        # may use it after the finaliser of the memory.
        memory = entry[1] if sys.getrefcount(entry[1]) <= 2 else _fresh(size)
    except (KeyError, IndexError):
        memory = _fresh(size)
    # All views refer to this object, and it alone to the memory.
    lease = (ctypes.c_char * size_bytes).from_buffer(memory)
    weakref.finalize(lease, _give_back, memory).atexit = False
    return memoryview(lease).cast("B")


def _fresh(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        tidy(0.0)  # what is kept may be what is missing
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer page faults: measured 16 ms instead of 85 ms for 64 fresh MiB.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap) -> None:
    size, (limit, _) = len(memory), resource.getrlimit(resource.RLIMIT_DATA)
    is_limited = limit != resource.RLIM_INFINITY
    most = min(_MAX_IDLE_BYTES, limit * _MAX_IDLE_PART) if is_limited else _MAX_IDLE_BYTES
    if size + sum(each * len(_idle[each]) for each in list(_idle)) > most:
        tidy(0.0)  # the newest is the likeliest to be wanted again
    if size <= most and _tidiers:
        _idle.setdefault(size, []).append((time.monotonic(), memory))
        for wake in list(_tidiers.values()):
            wake()


def tidy(idle_s: float = _IDLE_S) -> bool:
    """Frees memory that was not used for so many seconds; returns whether some is left."""
    limit = time.monotonic() - idle_s
    for size in list(_idle):
        with contextlib.suppress(IndexError):  # another thread was faster
            while _idle[size][0][0] <= limit:
                _idle[size].pop(0)
    return any(_idle[size] for size in list(_idle))


def _survive_fork() -> None:
    _tidiers.clear()
    tidy(0.0)


os.register_at_fork(after_in_child=_survive_fork)
