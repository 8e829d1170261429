"""Where the threads of a worker are: it writes that down when asked, or on a signal.

What it writes when asked is for people, and begins with code of the user. A signal also reaches one
that runs no Python code for long, but the threads go on while they are looked at, which seldom ends
in a crash: it is for those who do not answer.

The text goes to memory that agent and worker share, so that nothing is left on a disk unless
it is to be kept.
"""

import contextlib
import faulthandler
import os
import signal

from launchpad_lite._stacks import describe_threads

#: Not one of those that programs use for themselves.
STACKS_SIGNAL: int = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGINFO  # type: ignore[attr-defined]
)
_MAX_BYTES = 1 << 20


def open_stacks() -> int:
    """Returns a descriptor of memory, for a worker to write to and its agent to read.

    Raises:
        OSError: Too many files are open.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("launchpad-stacks")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_stacks_on_signal(fd: int) -> None:
    """In a worker: has the stacks of all threads written whenever `STACKS_SIGNAL` comes."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def write_stacks(fd: int) -> None:
    """In a worker, in a thread that runs Python code: writes the stacks of all threads."""
    with contextlib.suppress(OSError):
        os.write(fd, f"{describe_threads()}\n".encode(errors="replace"))


def has_stacks(fd: int) -> bool:
    """Returns whether anything was written."""
    return os.fstat(fd).st_size > 0


def read_stacks(fd: int) -> bytes:
    """Returns what was written."""
    return os.pread(fd, _MAX_BYTES, 0)
