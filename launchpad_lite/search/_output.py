"""What trials print: `trials/<number>/log` in the folder of a search."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from launchpad_lite._private_files import make_folder, make_own_folder, open_private, open_to_read
from launchpad_lite.search._messages import Life
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.tasks import RunningTrial

#: Of the end of a log.
_MOST_BYTES = 4000
_MOST_LINES = 40
_C = ctypes.CDLL(None)


class TrialOutput:
    """Takes what this process, its C code and processes below it print, one trial after the other.

    A folder with a log takes a third of a millisecond, so only a trial that prints gets one.
    """

    def __init__(self, worker: Life) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        #: The folder of all trials.
        self._trials: Path | None = None
        #: Where a trial prints first. Empty, it is renamed for the next one.
        self._aside: Path | None = None
        #: Where that belongs.
        self._log = Path()

    @contextlib.contextmanager
    def of(self, trial: RunningTrial) -> Iterator[None]:
        """Takes what is printed in a block, if the folder of the search is here."""
        before = [os.dup(1), os.dup(2)]
        with contextlib.suppress(SearchError, OSError):
            out = self._open(trial._folder_of(trial.number))
            _print_to(out, out)
            os.close(out)
        try:
            yield
        finally:
            _print_to(*before)
            for each in before:
                os.close(each)
            self.keep()

    def _open(self, folder: Path) -> int:
        if folder.parent != self._trials:
            folder.parents[1].stat()  # raises if it is not here
            self._trials = make_own_folder(folder.parent)
        log = folder / "log"
        if log.exists():
            out = open_private(log)
            os.write(out, f"--- run again by {self._worker.name}\n".encode())
            return out
        aside = folder.with_name(f".{folder.name}-{self._worker.life}")
        with self._lock:
            if self._aside is not None:
                self._aside.rename(aside)
            self._aside, self._log = aside, log
            return open_private(aside)

    def keep(self) -> None:
        """Gives the log its place once the trial has printed."""
        with self._lock, contextlib.suppress(OSError):
            if self._aside is not None and self._aside.stat().st_size:
                make_folder(self._log.parent)
                self._aside.rename(self._log)
                self._aside = None

    def close(self) -> None:
        """Leaves no empty file behind."""
        self.keep()
        if self._aside is not None:
            self._aside.unlink(missing_ok=True)


def _print_to(*outputs: int) -> None:
    """Has this process print to two descriptors, once what it has printed is where that belongs."""
    for stream, output, number in zip((sys.stdout, sys.stderr), outputs, (1, 2), strict=True):
        with contextlib.suppress(Exception):  # the user's own
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it flushes, too
        _C.fflush(None)
        os.dup2(output, number)


def last_lines(folder: str, number: int, *, was_lost: bool) -> str:
    """Returns what a trial of a search has printed last; nothing if that cannot be read here.

    If its worker `was_lost`, it may have ended before the log had its place.
    """
    log = Path(folder, "trials", str(number), "log")
    with contextlib.suppress(OSError):
        if was_lost and not log.exists():
            for aside in log.parents[1].glob(f".{number}-*"):
                make_folder(log.parent)
                aside.rename(log)
        with os.fdopen(open_to_read(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_MOST_LINES:]
            return "\n".join([f"\nThe end of {log}:", *lines])
    return ""
