"""The stacks of a worker's threads, which it writes when asked, or on a signal.

A signal also works if a worker runs no Python code for long. But the threads run on while it reads
their stacks, which crashes the worker in rare cases. So it is for workers that do not answer. The
text goes to memory, so that nothing stays on a disk by accident.
"""

import contextlib
import faulthandler
import os
import signal

from launchpad_lite.process.stacks import describe_threads

#: A signal that programs do not use for themselves.
STACKS_SIGNAL: int = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGINFO  # type: ignore[attr-defined]
)
_MAX_BYTES = 1 << 20


def open_stacks() -> int:
    """Returns a descriptor of memory, for a worker to write to and its agent to read."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("launchpad-stacks")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_stacks_on_signal(fd: int) -> None:
    """Makes a worker write the stacks of all its threads whenever `STACKS_SIGNAL` comes."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def write_stacks(fd: int) -> None:
    """Writes the stacks of all threads of a worker, from a thread that runs Python code."""
    with contextlib.suppress(OSError):
        os.write(fd, f"{describe_threads()}\n".encode(errors="replace"))


def has_stacks(fd: int) -> bool:
    """Returns whether anything was written."""
    return os.fstat(fd).st_size > 0


def read_stacks(fd: int) -> bytes:
    """Returns what was written."""
    return os.pread(fd, _MAX_BYTES, 0)
