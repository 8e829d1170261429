"""How much of its host each worker uses."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TypedDict

from launchers.host.sweep import children_of, process_status

_MIB = 1 << 20
#: The shortest time of which it is told how many cores were busy: ticks of the clock take 10 ms.
_SHORTEST_S = 0.5
#: Positions in what `process_status` returns: a letter, two in ticks of a clock, one in pages.
_STATE, _USER, _SYSTEM, _MEMORY = 0, 11, 12, 21


class Usage(TypedDict):
    """What one worker and its child processes use: cores kept busy since the last look; main memory.

    None: not known. Memory that several of them share counts for each. `kernel_state` is that of the
    worker, as in `/proc/PID/stat`; "": not known.
    """

    cpu: float | None
    memory_mib: float | None
    kernel_state: str


UNKNOWN: Usage = {"cpu": None, "memory_mib": None, "kernel_state": ""}


class UsageMeter:
    """Measures workers, each from one `look` to the next. Used by one thread."""

    def __init__(self) -> None:
        #: When each process was measured last, the CPU seconds that it had used, and cores kept busy.
        self._seen: dict[int, tuple[float, float, float]] = {}

    def look(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """Returns what workers use, by name, with their child processes; those that have gone are left out."""
        now = time.monotonic()
        before, self._seen = self._seen, {}
        usage: dict[str, Usage] = {}
        for name, pid in pids.items():
            cpu, memory_bytes, kernel_state = 0.0, 0, ""
            with contextlib.suppress(OSError):
                for each, used_s, held_bytes, state in _measure(pid):
                    looked_at, used_before_s, busy = before.get(each, (-1.0, used_s, 0.0))
                    if now - looked_at >= _SHORTEST_S:
                        busy = (used_s - used_before_s) / (now - looked_at)
                        looked_at, used_before_s = now, used_s
                    self._seen[each] = looked_at, used_before_s, busy
                    cpu += busy
                    memory_bytes += held_bytes
                    kernel_state = kernel_state or state  # of the first, the worker
                usage[name] = {
                    "cpu": round(cpu, 3),
                    "memory_mib": round(memory_bytes / _MIB, 1),
                    "kernel_state": kernel_state,
                }
        return usage


def _measure(pid: int) -> Iterator[tuple[int, float, int, str]]:
    """Yields each process of a worker: its CPU seconds, the bytes that it holds, and its state.

    The first is the worker itself: OSError if it has ended.
    """
    if sys.platform != "linux":
        import psutil

        try:
            worker = psutil.Process(pid)
            for process in (worker, *worker.children(recursive=True)):
                times = process.cpu_times()
                yield process.pid, times.user + times.system, process.memory_info().rss, ""
        except psutil.Error as error:
            raise ProcessLookupError(str(error)) from error
        return
    # The same figures, many times faster: an idle program should cost next to nothing.
    fields = process_status(pid)
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    memory_bytes = int(fields[_MEMORY]) * os.sysconf("SC_PAGE_SIZE")
    yield pid, ticks / os.sysconf("SC_CLK_TCK"), memory_bytes, fields[_STATE].decode()
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            yield from _measure(child)
