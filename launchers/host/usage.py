"""How much of its host each worker uses."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import TypedDict

from launchers.host.sweep import process_status

_MIB = 1 << 20
#: Positions in what `process_status` returns: two in ticks of a clock, one in pages.
_USER, _SYSTEM, _MEMORY = 11, 12, 21


class Usage(TypedDict):
    """What one worker uses: cores kept busy since the last look; main memory. None: not known."""

    cpu: float | None
    memory_mib: float | None


class UsageMeter:
    """Measures workers, each from one `look` to the next. Used by one thread."""

    def __init__(self) -> None:
        #: When each process was measured last, and the CPU seconds that it had used.
        self._seen: dict[int, tuple[float, float]] = {}

    def look(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """Returns what workers use, by name; those that have gone are left out."""
        now = time.monotonic()
        before, self._seen = self._seen, {}
        usage: dict[str, Usage] = {}
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                used_s, memory_bytes = _measure(pid)
                looked_at, used_before_s = before.get(pid, (-1.0, used_s))
                self._seen[pid] = now, used_s
                usage[name] = {
                    "cpu": round((used_s - used_before_s) / (now - looked_at), 3),
                    "memory_mib": round(memory_bytes / _MIB, 1),
                }
        return usage


def _measure(pid: int) -> tuple[float, int]:
    """Returns CPU seconds of a process, and bytes that it holds; OSError if it has ended."""
    if sys.platform != "linux":
        import psutil

        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            return times.user + times.system, process.memory_info().rss
        except psutil.Error as error:
            raise ProcessLookupError(str(error)) from error
    # The same figures, many times faster: an idle program should cost next to nothing.
    fields = process_status(pid)
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[_MEMORY]) * os.sysconf("SC_PAGE_SIZE")
