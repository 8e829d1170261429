"""The last safeguard: ends what a program started and no other part can find any more.

The agent and the warden, its parent, which does nothing but wait for its end,
adopt what workers start and leave behind. So all is found, whichever of them
ends: by descent and, where the system knows no adoption, by a mark in the
environment of all that the program started.
"""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: In the environment of the agent and so of all that it starts: tells what is ours.
MARK = "LAUNCHPAD_LITE_PROGRAM"
#: Seconds for which processes are looked for that come while others are ended.
_GIVE_UP_S = 2.0
#: Seconds between SIGTERM and SIGKILL: a tracker of shared memory, which ignores SIGTERM, gives the
#: memory back when those have gone that it works for.
_TERMINATE_S = 0.25
_PAUSE_S = 0.01
#: Looked up once, because each worker needs it.
LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36
#: Where these stand in `/proc/PID/stat`, after the name; and what the flags of a dying process have.
_PARENT, _FLAGS = 1, 6
_PF_EXITING = 0x4
#: Has the warden end its agent by force: one that was stopped, or is stuck.
FORCE_SIGNAL = signal.SIGQUIT
#: Signals that the warden takes one at a time.
_AWAITED = frozenset((signal.SIGCHLD, signal.SIGTERM, FORCE_SIGNAL))


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
        import psutil

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
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(parent: int, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Ends all children of a process, and theirs as they become its children.

    So those are found, too, that have left their session and cleared their environment.

    Args:
        parent: This process, which adopts orphans.
        clock: Returns seconds.
    """
    if sys.platform != "linux":
        return
    kill_at = clock() + _TERMINATE_S
    give_up_at = math.inf
    told: set[int] = set()
    while found := set(_children(parent)):
        now = clock()
        if now < kill_at:
            _signal_all(found - told, signal.SIGTERM)
            told |= found
        elif now < give_up_at:
            # From the first time on: this process may have stood still until then.
            give_up_at = min(give_up_at, now + _GIVE_UP_S)
            _signal_all(found, signal.SIGKILL)
        else:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_PAUSE_S)


def _signal_all(pids: set[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def is_exiting(pid: int) -> bool:
    """Returns whether a process is on its way out (Linux): it cannot be waited for yet, and is lost."""
    try:
        fields = process_status(pid)
    except OSError:
        return False
    return bool(int(fields[_FLAGS]) & _PF_EXITING)


def process_status(pid: int) -> list[bytes]:
    """Returns what the system (Linux) tells of a process, after its name, which may hold anything.

    Raises:
        OSError: It has gone.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if int(process_status(int(folder.name))[_PARENT]) == parent:
                    yield int(folder.name)


def fork_under_warden(mark: str) -> None:
    """Makes this process the warden and returns in the agent, a child of its.

    The warden ends with the agent, with the same exit code, once it has ended what the agent left.
    To be called before there is anything but the link to the launcher, which is the agent's alone.
    The agent does not need it to go on.
    """
    # As in the agent: Ctrl-C and the end of the terminal are for the launcher.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems lose what is ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        return
    code = 1
    try:
        code = _keep_watch(agent, mark)
    finally:
        os._exit(code)


def _keep_watch(agent: int, mark: str) -> int:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    adopt_orphans()
    code = os.waitstatus_to_exitcode(_await(agent))
    end_children(os.getpid())
    end_marked(mark, spare=(os.getpid(),))
    return code if code >= 0 else 128 - code


def _await(agent: int) -> int:
    """Waits for the agent, tells it to end or ends it as asked, and returns its status."""
    # One at a time, so that the number of a process that was waited for is never signalled.
    while (ended := os.waitpid(agent, os.WNOHANG))[0] == 0:
        signum = signal.sigwait(_AWAITED)
        if signum == signal.SIGTERM:
            os.kill(agent, signal.SIGTERM)
        elif signum == FORCE_SIGNAL:
            os.kill(agent, signal.SIGKILL)
    return ended[1]
