"""Finds the limit that a running task exceeds, and ends its process."""

import contextlib
import math
import os
from collections.abc import Callable
from typing import NoReturn

from launchpad_lite.search._messages import Limits


def look(
    limits: Limits, ran_s: float, idle_s: float, memory: Callable[[], int]
) -> tuple[str, float]:
    """Returns the limit that a running task exceeds, as text, and the seconds until the next check.

    It was idle since it has shown progress, or begun; `memory` returns the bytes that it uses.
    """
    timeout_s, progress_s = limits.timeout_s or math.inf, limits.progress_timeout_s or math.inf
    if ran_s >= timeout_s:
        return f"it ran longer than timeout_s={timeout_s:g}", 0.0
    if idle_s >= progress_s:
        return f"it showed no progress within progress_timeout_s={progress_s:g}", 0.0
    most = limits.memory_bytes
    if most and (used := memory()) > most:
        return f"it used {used:,} bytes, more than memory_bytes={most:,}", 0.0
    return "", min(timeout_s - ran_s, progress_s - idle_s)


def memory_here() -> int:
    """Returns the bytes of main memory that this process and those below it use."""
    import psutil  # slow to import

    here = psutil.Process()
    try:
        return sum(each.memory_info().rss for each in (here, *here.children(recursive=True)))
    except psutil.Error:  # one has just ended
        return 0


def end_process(why: str) -> NoReturn:
    """Ends this process at once, and asks its children to end. Its supervisor starts it again."""
    import psutil

    os.write(2, f"{why}\n".encode(errors="replace"))  # streams may be locked
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.terminate()  # not by force: trackers of shared memory free it
    os._exit(os.EX_TEMPFAIL)
