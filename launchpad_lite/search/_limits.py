"""When a running task has to end: which limit it exceeds."""

import math
from collections.abc import Callable

from launchpad_lite.search._messages import Limits

#: Seconds between two looks at the memory of a task.
_LOOK_S = 0.2


def look(
    limits: Limits, ran_s: float, idle_s: float, memory: Callable[[], int]
) -> tuple[str, float]:
    """Returns which limit a running task exceeds, for people, and the seconds until the next look.

    Args:
        limits: Of it.
        ran_s: Seconds since its code began.
        idle_s: Seconds since it has shown progress, or begun.
        memory: Returns the bytes that it uses.
    """
    timeout_s, progress_s = limits.timeout_s or math.inf, limits.progress_timeout_s or math.inf
    if ran_s >= timeout_s:
        return f"it ran longer than timeout_s={timeout_s:g}", 0.0
    if idle_s >= progress_s:
        return f"it showed no progress within progress_timeout_s={progress_s:g}", 0.0
    most = limits.memory_bytes
    if most and (used := memory()) > most:
        return f"it used {used:,} bytes, more than memory_bytes={most:,}", 0.0
    return "", min(timeout_s - ran_s, progress_s - idle_s, _LOOK_S if most else math.inf)


def memory_here() -> int:
    """Returns the bytes of main memory that this process and those below it use."""
    import psutil  # takes a while

    here = psutil.Process()
    try:
        return sum(each.memory_info().rss for each in (here, *here.children(recursive=True)))
    except psutil.NoSuchProcess:  # one has just ended
        return 0
