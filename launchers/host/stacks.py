"""What outlives a worker: the stacks of its threads, which it writes when asked or on a signal, and its newest calls.

A signal also works if a worker runs no Python code for long. But the threads run on while it reads
their stacks, which crashes the worker in rare cases. So it is for workers that do not answer. The
text goes to memory, so that nothing stays on a disk by accident.
"""

import contextlib
import faulthandler
import os
import signal
import time

from courier.lowlevel import call_records
from launchpad_lite.process.stacks import describe_threads

#: A signal that programs do not use for themselves.
STACKS_SIGNAL: int = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGINFO  # type: ignore[attr-defined]
)
_MAX_BYTES = 1 << 20
#: How many of its last calls a worker that died leaves.
_MAX_CALLS = 200


def open_stacks() -> int:
    """Returns a descriptor of memory, for a worker to write to and its agent to read.

    The records of its calls come first; its stacks are written behind them.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("launchpad-stacks")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, call_records.MEMORY_BYTES)
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def last_calls(fd: int) -> list[str]:
    """Returns the last calls of a worker that has ended, as text, the oldest first."""
    now = time.perf_counter()
    try:
        return [each.describe(now) for each in call_records.calls_in(fd, _MAX_CALLS)]
    except (OSError, ValueError):  # no memory is left
        return []


def write_stacks_on_signal(fd: int) -> None:
    """Makes a worker write the stacks of all its threads whenever `STACKS_SIGNAL` comes."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def write_stacks(fd: int) -> None:
    """Writes the stacks of all threads of a worker, from a thread that runs Python code."""
    with contextlib.suppress(OSError):
        os.write(fd, f"{describe_threads()}\n".encode(errors="replace"))


def has_stacks(fd: int) -> bool:
    return os.fstat(fd).st_size > call_records.MEMORY_BYTES


def read_stacks(fd: int) -> bytes:
    return os.pread(fd, _MAX_BYTES, call_records.MEMORY_BYTES)
