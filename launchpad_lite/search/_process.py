"""The process of a worker: its machine and devices, the limits of its task, the output of a trial.

That goes to `trials/<number>/log` in the folder of the search.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from launchpad_lite.parts.devices import VISIBLE_DEVICES, machine_name, visible_devices
from launchpad_lite.parts.log_file import end_of
from launchpad_lite.parts.private_files import make_own_folder, open_private, open_to_read
from launchpad_lite.search._messages import Life, Limits, WorkerMachine
from launchpad_lite.search.tasks import RunningTrial

#: The devices that this process sees from now on: CUDA reads the variable once.
_pinned: tuple[str, ...] = ()


def machine_here() -> WorkerMachine:
    """Returns what workers of this process may use here."""
    return _machine()._replace(pinned=_pinned)


@functools.cache
def _machine() -> WorkerMachine:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # there is no limit of a container
        memory_bytes = min(memory_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    cpus = len(os.sched_getaffinity(0))
    return WorkerMachine(machine_name(), cpus, memory_bytes, visible_devices()[0])


def pin(devices: tuple[str, ...]) -> bool:
    """Restricts this process to these devices, finally; returns False if it sees others already."""
    global _pinned
    if devices and not _pinned:
        _machine()  # read before the variable changes
        os.environ[VISIBLE_DEVICES] = ",".join(devices)
        _pinned = devices
    return not devices or devices == _pinned


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


#: Bytes of the end of a log.
_MOST_BYTES = 4000
_MOST_LINES = 40
_C = ctypes.CDLL(None)


class TrialOutput:
    """Redirects output of this process, its C code and its children, one trial after the other.

    A folder with a log takes a third of a millisecond, so only a trial that prints gets one.
    """

    def __init__(self, worker: Life) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        #: Where this process prints outside of trials.
        self._before: tuple[int, int] | None = None
        #: The folder of the search, once it was found here. All paths are texts, which takes half the time.
        self._kept: str | None = None
        #: Where a trial prints first, and the final path of that; empty: it is there.
        self._aside, self._log = "", ""

    @contextlib.contextmanager
    def of(self, trial: RunningTrial) -> Iterator[None]:
        """Redirects output in a block, if the folder of the search is here."""
        self._before = self._before or (os.dup(1), os.dup(2))
        if trial._kept is not None:
            with contextlib.suppress(OSError):
                out = self._open(str(trial._kept), trial.number)
                _print_to(out, out)
                os.close(out)
        try:
            yield
        finally:
            _print_to(*self._before)
            self.close()

    def _open(self, kept: str, number: int) -> int:
        trials = f"{kept}/trials"
        if kept != self._kept:
            Path(kept).stat()  # raises if it is not here
            make_own_folder(Path(trials))
            self._kept = kept
        log = f"{trials}/{number}/log"
        if os.access(log, os.F_OK):
            out = open_private(Path(log))
            os.write(out, f"--- run again by {self._worker.name}\n".encode())
            return out
        with self._lock:
            self._aside, self._log = f"{trials}/.{number}-{self._worker.life}", log
            return open_private(Path(self._aside))

    def keep(self) -> None:
        """Moves the log to its final path once the trial has printed."""
        with self._lock, contextlib.suppress(OSError):
            if self._aside and Path(self._aside).stat().st_size:
                make_own_folder(Path(self._log).parent)
                Path(self._aside).rename(self._log)
                self._aside = ""

    def close(self) -> None:
        """Ends the log of a trial: an empty one goes."""
        self.keep()
        if self._aside:
            Path(self._aside).unlink(missing_ok=True)
            self._aside = ""


def _print_to(out: int, error: int) -> None:
    """Flushes what this process has printed, and has it print to descriptors."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's own
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it flushes, too
    _C.fflush(None)
    os.dup2(out, 1)
    os.dup2(error, 2)


def last_lines(folder: str, number: int, *, was_lost: bool) -> str:
    """Returns the last output of a trial of a search; nothing if that cannot be read here.

    If its worker `was_lost`, it may have ended before the log was moved to its path.
    """
    log = Path(folder, "trials", str(number), "log")
    with contextlib.suppress(OSError):
        if was_lost and not log.exists():
            for aside in log.parents[1].glob(f".{number}-*"):
                make_own_folder(log.parent)
                aside.rename(log)
        with os.fdopen(open_to_read(log), "rb") as file:
            lines = end_of(file, _MOST_BYTES).decode(errors="replace").splitlines()[-_MOST_LINES:]
            return "\n".join([f"\nThe end of {log}:", *lines]) if lines else ""
    return ""
