"""How much of its host each worker uses."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import psutil

_MIB = 1 << 20


class Usage(TypedDict):
    """What one worker uses.

    `cpu`: cores that its process kept busy since it was looked at before. `memory_mib`: main memory
    that it holds. None: not known.
    """

    cpu: float | None
    memory_mib: float | None


class UsageMeter:
    """Measures workers, each from one look to the next. Used by one thread."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def look(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """Returns what workers use, by name; those that have gone are left out.

        Args:
            pids: Their processes.
        """
        import psutil

        known = {pid: process for pid, process in self._processes.items() if pid in pids.values()}
        self._processes = known
        usage: dict[str, Usage] = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = known.get(pid) or known.setdefault(pid, psutil.Process(pid))
                with process.oneshot():
                    usage[name] = {
                        "cpu": round(process.cpu_percent() / 100, 3),
                        "memory_mib": round(process.memory_info().rss / _MIB, 1),
                    }
        return usage
