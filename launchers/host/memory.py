"""How much memory there is, and whether the kernel ended a process because none was left."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def count_memory_kills() -> int:
    """Returns how many processes, of this group if known, were ended for lack of memory."""
    counts = [
        _count(folder / ("memory.events" if is_unified else "memory.oom_control"))
        for folder, is_unified in _own_groups()
    ]
    own = [count for count in counts if count is not None]
    return sum(own) if own else _count(Path("/proc/vmstat")) or 0


def _own_groups() -> Iterator[tuple[Path, bool]]:
    """Yields the folders of this process's control groups for memory, and whether each is of version 2."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2: one tree for all
                yield _CGROUPS / path.strip("/"), True
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.strip("/"), False


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        if found:
            return int(found[1])
    return None


def memory_bytes() -> int:
    """Returns how much main memory the processes of this control group may have."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group, is_unified in _own_groups():
        file = "memory.max" if is_unified else "memory.limit_in_bytes"
        # The limits of all parent groups apply, too.
        for folder in (group, *group.parents):
            if folder.is_relative_to(_CGROUPS):
                limits += _limit(folder / file)
    return min(limits)


def _limit(file: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        return [int(file.read_text())]  # "max" means no limit
    return []
