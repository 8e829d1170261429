"""The last belt: ends what a program started and nobody else can find any more.

Workers and what they start carry a mark in their environment. A warden, a
process that does nothing but wait for the end of the agent, ends by it what
left its process group or outlived an agent that was killed.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

#: In the environment of the agent and so of all that it starts: tells what is ours.
MARK = "LAUNCHPAD_LITE_PROGRAM"
#: Seconds for which processes are looked for that come while others are ended.
_GIVE_UP_S = 2.0
_PAUSE_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


def end_marked(mark: str, *, spare: tuple[int, ...] = ()) -> None:
    """Ends by force all processes of this user that carry a mark.

    Args:
        mark: Value of `MARK` in their environment.
        spare: Processes that stay.
    """
    give_up_at = time.monotonic() + _GIVE_UP_S
    while found := [pid for pid in _marked(mark) if pid not in spare]:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > give_up_at:
            return
        time.sleep(_PAUSE_S)


def _marked(mark: str) -> Iterator[int]:
    if sys.platform != "linux":
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark:
                    yield process.pid
        return
    # The same, many times faster: it is done at the end of every program.
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def adopt_orphans() -> None:
    """Makes this process the parent of all its descendants that lose theirs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(parent: int, *, spare: int) -> None:
    """Ends by force all children of a process, and theirs as they become its children.

    So those are found, too, that have left their session and cleared their environment.

    Args:
        parent: This process, which adopts orphans.
        spare: A child that stays.
    """
    if sys.platform != "linux":
        return
    give_up_at = time.monotonic() + _GIVE_UP_S
    while found := [pid for pid in _children(parent) if pid != spare]:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > give_up_at:
            return
        time.sleep(_PAUSE_S)


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, ...
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    yield int(folder.name)


class Warden:
    """The process that outlives the agent, however that ends, and then ends what is left."""

    def __init__(self, mark: str) -> None:
        """Forks it; to be called before there is anything that it must not inherit."""
        agent = os.getpid()
        read_end, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _keep_watch(read_end, self._lifeline, agent, mark)
            finally:
                os._exit(0)
        os.close(read_end)

    def abandon(self) -> None:
        """In a forked worker: lets go of what tells the warden that the agent lives."""
        os.close(self._lifeline)

    def dismiss(self) -> None:
        """Has it end what is left, and itself."""
        os.close(self._lifeline)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _keep_watch(read_end: int, lifeline: int, agent: int, mark: str) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # The link to the launcher, above all: it ends with the agent.
    for fd in range(3, max(read_end, lifeline) + 1):
        if fd != read_end:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.read(read_end, 1)
    end_marked(mark, spare=(os.getpid(), agent))
