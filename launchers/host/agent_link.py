"""How the launcher reaches an agent, and the start of the one of this machine.

It imports little, so that the agent is on its way before the launcher loads what supervises it.
"""

import math
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import NamedTuple

from courier._clock import require_running_clock
from courier._modules import loaded_module
from launchers.host.link import MARKER, FrameReader, Reach
from launchers.host.sweep import FORCE_SIGNAL, MARK, end_marked
from launchpad_lite._result import advice_on
from launchpad_lite.errors import LaunchError

# With -c, the working directory stands in sys.path: nothing but built-in modules may be imported
# before it is gone, or a json.py of the user's would be. What follows takes its time, and a launcher
# that has gone by now wants nothing of it. What is imported stays, so there is no garbage to look for.
_BOOT = """\
import gc, sys
gc.disable()
sys.path[:] = eval(sys.argv.pop())
launcher = int(sys.argv.pop())
import os
if os.getppid() != launcher:
    sys.exit()
from launchers.host.agent import main
main(launcher)
"""


class AgentLink(NamedTuple):
    """How the launcher reaches an agent.

    Attributes:
        process: Its input and output are the agent's; it ends with the agent.
        frames: What comes from there.
        silence_s: Seconds after which an agent that says nothing is taken for lost.
        via: Command that reaches the host, and ends when its connection does; "" for this machine.
        keeps_logs: Whether the agent keeps the output of nodes in files that are the launcher's too.
        tidy: Called after an agent that could not clean up.
        force: Has the agent end by force, and all that it leaves; None where only the agent itself is there.
        explain: Says what was complained of on the way, if anything.
        release: Called at the very end.
        failure_code: How the agent ends if a node of it has failed, where that is looked at.
    """

    process: Reach
    frames: FrameReader
    silence_s: float = math.inf
    via: str = ""
    keeps_logs: bool = True
    tidy: Callable[[], None] = lambda: None
    force: Callable[[], None] | None = None
    explain: Callable[[], str] = lambda: ""
    release: Callable[[], None] = lambda: None
    failure_code: int = 0


def check_standard_library() -> None:
    """Raises an error if agents cannot be heard with what the script has made of Python."""
    require_running_clock()
    if getattr(loaded_module("gevent.monkey"), "saved", None):
        raise LaunchError(
            "gevent has patched the standard library: agents could not be heard. Launch from a script "
            "that is not patched, or with threads: launcher='local_mt'"
        )


def start_agent_here(name: str) -> AgentLink:
    """Starts the agent of this machine; it comes up while the caller continues.

    Raises:
        LaunchError: It cannot be started.
    """
    check_standard_library()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = repr([str(folder) for folder in sys.path])
    command = [sys.executable, *flags, "-c", _BOOT, str(os.getpid()), path]
    mark = uuid.uuid4().hex
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: mark},
            # Ctrl-C in the terminal is for the launcher, which stops the program in order.
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"cannot start the agent of {name}: {error}{advice_on(error)}") from error
    assert process.stdout is not None
    frames = FrameReader(process.stdout.fileno(), MARKER)
    return AgentLink(
        process,
        frames,
        tidy=lambda: end_marked(mark),
        force=lambda: process.send_signal(FORCE_SIGNAL),
    )
