"""The process of this machine's agent; it can start before it is known what it runs.

It takes as long to start as all else until the first node runs, and as few as possible of our modules
are imported here: while it starts, its launcher imports the others.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

from courier.lowlevel import loaded_module, require_running_clock
from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.marks import MARK

#: The launchers that need it.
_LAUNCHERS = ("local_mp", "test_mp")
# With -c, the working directory stands in sys.path: until it is removed, only built-in modules may be
# imported, because a json.py of the user would shadow the library's. The import of the agent takes time, so
# the process ends before it if the launcher has gone. Imported modules stay, so garbage collection is off.
# The reaper is forked while there is little memory to share, which both would copy.
_BOOT = """\
import gc, sys
gc.disable()
sys.path[:] = eval(sys.argv.pop())
launcher = int(sys.argv.pop())
import os
if os.getppid() != launcher:
    sys.exit()
from launchers.host.sweep import MARK, fork_under_reaper
fork_under_reaper(os.environ[MARK])
from launchers.host.agent import main
main(launcher)
"""


class AgentProcess(NamedTuple):
    """The process, and the value of `MARK` in all that it starts."""

    process: "subprocess.Popen[bytes]"
    mark: str


class _Early(threading.local):
    """The process that the launch of a thread is to take."""

    agent: AgentProcess | None = None


_early = _Early()


def check_standard_library() -> None:
    """Raises an error if the script has changed Python so that this process could not hear agents."""
    require_running_clock()
    if getattr(loaded_module("gevent.monkey"), "saved", None):
        raise LaunchError(
            "gevent has patched the standard library: agents could not be heard. Launch from a script "
            "that is not patched, or with threads: launcher='local_mt'"
        )


def occupy_standard_descriptors() -> None:
    """Opens those of 0, 1 and 2 that are closed, as a service may have them.

    Otherwise files or sockets of ours would get these numbers, and prints would write to them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _start() -> AgentProcess:
    check_standard_library()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = repr([str(folder) for folder in sys.path])
    command = [sys.executable, *flags, "-c", _BOOT, str(os.getpid()), path]
    mark = os.urandom(16).hex()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: mark},
            # Ctrl-C in the terminal must reach only the launcher, which stops the program in order.
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        from launchpad_lite.life.result import advice_on

        text = f"cannot start the agent of localhost: {error}{advice_on(error)}"
        raise LaunchError(text) from error
    return AgentProcess(process, mark)


def take_agent() -> AgentProcess:
    """Returns the process that `agent_ahead` has started for this thread, or else a new one."""
    taken, _early.agent = _early.agent, None
    return taken or _start()


@contextlib.contextmanager
def agent_ahead(launcher: object) -> Iterator[None]:
    """Starts the agent for the launch of a search in a block, if its launcher needs one.

    If the launch does not take it, it ends with the block.
    """
    if launcher not in _LAUNCHERS or _early.agent is not None:
        yield
        return
    occupy_standard_descriptors()
    _early.agent = _start()
    try:
        yield
    finally:
        if (unused := _early.agent) is not None:
            _early.agent = None
            with unused.process as process:
                assert process.stdin is not None
                process.stdin.close()  # its agent ends when its input does
                process.terminate()  # or before, while it imports
