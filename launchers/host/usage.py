"""How much of its host each worker uses."""

import collections
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TypedDict

from launchers.host.sweep import children_of, process_status

_MIB = 1 << 20
#: The shortest time of which it is told how many cores were busy: ticks of the clock take 10 ms.
_SHORTEST_S = 0.5
#: Looks at GPUs, which block this thread, take at most one part in so many of the time.
_REST = 100
#: Positions in what `process_status` returns: a letter, two in ticks of a clock, one in pages.
_STATE, _USER, _SYSTEM, _MEMORY = 0, 11, 12, 21


class Usage(TypedDict):
    """What one worker and its child processes use: cores kept busy since the last look; memory.

    None: not known; of GPU memory, also: none. Memory that several of them share counts for each.
    `kernel_state` is that of the worker, as in `/proc/PID/stat`; "": not known.
    """

    cpu: float | None
    memory_mib: float | None
    gpu_memory_mib: float | None
    kernel_state: str


UNKNOWN: Usage = {"cpu": None, "memory_mib": None, "gpu_memory_mib": None, "kernel_state": ""}


class UsageMeter:
    """Measures workers, each from one `look` to the next. Used by one thread."""

    def __init__(self) -> None:
        #: When each process was measured last, the CPU seconds that it had used, and cores kept busy.
        self._seen: dict[int, tuple[float, float, float]] = {}
        self._gpu_bytes: Mapping[int, int] = {}  # by process
        self._gpus_due_at = 0.0

    def look(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """Returns what workers use, by name, with their child processes; those that have gone are left out."""
        now = time.monotonic()
        before, self._seen = self._seen, {}
        if now >= self._gpus_due_at:
            found = _gpu_bytes()
            took_s = math.inf if found is None else time.monotonic() - now
            self._gpu_bytes, self._gpus_due_at = found or {}, now + _REST * took_s
        usage: dict[str, Usage] = {}
        for name, pid in pids.items():
            cpu, memory_bytes, gpu_bytes, kernel_state = 0.0, 0, 0, ""
            with contextlib.suppress(OSError):
                for each, used_s, held_bytes, state in _measure(pid):
                    looked_at, used_before_s, busy = before.get(each, (-1.0, used_s, 0.0))
                    if now - looked_at >= _SHORTEST_S:
                        busy = (used_s - used_before_s) / (now - looked_at)
                        looked_at, used_before_s = now, used_s
                    self._seen[each] = looked_at, used_before_s, busy
                    cpu += busy
                    memory_bytes += held_bytes
                    gpu_bytes += self._gpu_bytes.get(each, 0)
                    kernel_state = kernel_state or state  # of the first, the worker
                usage[name] = {
                    "cpu": round(cpu, 3),
                    "memory_mib": round(memory_bytes / _MIB, 1),
                    "gpu_memory_mib": round(gpu_bytes / _MIB, 1) or None,
                    "kernel_state": kernel_state,
                }
        return usage


def _gpu_bytes() -> Mapping[int, int] | None:
    """Returns the bytes of GPU memory that processes hold; None without NVML or `nvidia-ml-py`.

    Ends NVML again: workers are forked from this process, without its open files.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, another one of this name, or no driver
        return None
    found = collections.Counter[int]()
    with contextlib.suppress(Exception):  # numbers must not end the agent
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(Exception):  # one device may fail
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                    found[process.pid] += process.usedGpuMemory or 0  # None: not known
    with contextlib.suppress(Exception):
        pynvml.nvmlShutdown()
    return found


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
