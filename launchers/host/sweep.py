"""The last safeguard: ends processes of a program that no other part can find any more.

The reaper is the parent of the agent, and only waits for its end. Both adopt the processes that
workers leave behind. On a system without adoption, a mark in the environment shows these.
"""

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launchpad_lite.parts.marks import MARK, marked

#: Seconds for which this looks for processes that start while others are ended.
_GIVE_UP_S = 2.0
#: Seconds between SIGTERM and SIGKILL. A tracker of shared memory ignores SIGTERM, and frees the
#: memory when its users have gone.
_TERMINATE_S = 0.25
_PAUSE_S = 0.01
#: Looked up once, because each worker needs it.
LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
#: Positions in `/proc/PID/stat`, after the name; and the flag of a process that exits.
_PARENT, _FLAGS = 1, 6
_PF_EXITING = 0x4
#: Makes the reaper end its agent by force, if the agent was stopped or is stuck.
FORCE_SIGNAL = signal.SIGQUIT
#: Signals that the reaper takes one at a time.
_AWAITED = frozenset((signal.SIGCHLD, signal.SIGTERM, FORCE_SIGNAL))


def end_marked(mark: str, *, spare: tuple[int, ...] = ()) -> None:
    """Ends by force all processes of this user that carry a mark, except those to spare."""
    give_up_at = time.monotonic() + _GIVE_UP_S
    while found := [pid for pid in marked(MARK, mark) if pid not in spare]:
        signal_all(found, signal.SIGKILL)
        if time.monotonic() > give_up_at:
            return
        time.sleep(_PAUSE_S)


@functools.cache  # workers have it from the agent: each would look for it in all of sys.path
def _title_setter() -> Callable[[str], object] | None:
    try:
        import setproctitle
    except ImportError:
        return None
    setter: Callable[[str], object] = setproctitle.setproctitle
    return setter


def name_process(name: str, title: str = "") -> None:
    """Names this process for `ps -o comm` (15 bytes), and with the extra `names` also its command line."""
    # Else it would write over the environment, whose mark shows that the process is ours.
    os.environ["SPT_NOENV"] = "1"
    if (set_title := _title_setter()) is not None:
        set_title(title or name)
    del os.environ["SPT_NOENV"]
    if sys.platform == "linux":
        LIBC.prctl(_PR_SET_NAME, name.encode()[:15])


def adopt_orphans() -> None:
    """Makes this process the parent of all its descendants that lose theirs (Linux)."""
    if sys.platform == "linux":
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(*, clock: Callable[[], float] = time.monotonic) -> None:
    """Ends all children of this process, and then their children, which it adopts.

    So it also finds processes that have left their session and cleared their environment.
    """
    if sys.platform != "linux":
        return
    kill_at = clock() + _TERMINATE_S
    give_up_at = math.inf
    told: set[int] = set()
    while found := set(_children(os.getpid())):
        now = clock()
        if now < kill_at:
            signal_all(found - told, signal.SIGTERM)
            told |= found
        elif now < give_up_at:
            # Counted from the first SIGKILL, because this process may have stood still until then.
            give_up_at = min(give_up_at, now + _GIVE_UP_S)
            signal_all(found, signal.SIGKILL)
        else:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_PAUSE_S)


def signal_all(pids: Iterable[int], signum: int) -> None:
    """Signals processes, as far as they are there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def is_exiting(pid: int) -> bool:
    """Returns whether a process exits (Linux): it cannot be waited for yet, but nothing stops its end."""
    try:
        fields = process_status(pid)
    except OSError:
        return False
    return bool(int(fields[_FLAGS]) & _PF_EXITING)


def process_status(pid: int) -> list[bytes]:
    """Returns the fields of `/proc/PID/stat` (Linux) after the name, which may hold any text."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if int(process_status(int(folder.name))[_PARENT]) == parent:
                    yield int(folder.name)


def children_of(pid: int) -> Iterator[int]:
    """Yields the children of a process (Linux), without a look at all others; none if it has ended."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or the system does not tell
                yield from map(int, (thread / "children").read_bytes().split())


def fork_under_reaper(mark: str) -> None:
    """Makes this process the reaper and returns in the agent, its child.

    When the agent has ended, the reaper ends what it left, and then itself with the same exit code.
    Call this before the process opens anything but the link to the launcher, which only the agent
    uses. The agent goes on if the reaper ends.
    """
    # As in the agent: the launcher handles Ctrl-C and the end of the terminal.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems drop ignored signals
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
    """Waits for the end of the agent, passes requests to end on to it, and ends what it left."""
    name_process("launchpad-reap", "launchpad reaper")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    adopt_orphans()
    # One at a time, so that the number of a process that was waited for is never signalled.
    while (ended := os.waitpid(agent, os.WNOHANG))[0] == 0:
        signum = signal.sigwait(_AWAITED)
        if signum == signal.SIGTERM:
            os.kill(agent, signal.SIGTERM)
        elif signum == FORCE_SIGNAL:
            os.kill(agent, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(ended[1])
    end_children()
    end_marked(mark, spare=(os.getpid(),))
    return code if code >= 0 else 128 - code
