"""How the launcher reaches an agent, and how it starts the agent of this machine.

It imports little, so that the agent starts before the launcher loads its supervisor.
"""

import math
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import NamedTuple

from courier.lowlevel import loaded_module, require_running_clock
from launchers.host.link import MARKER, LinkReader, Reach
from launchers.host.sweep import FORCE_SIGNAL, MARK, end_marked
from launchpad_lite.errors import LaunchError
from launchpad_lite.life.result import advice_on

# With -c, the working directory stands in sys.path: until it is removed, only built-in modules may be
# imported, because a json.py of the user would shadow the library's. The import of the agent takes time, so
# the process ends before it if the launcher has gone. Imported modules stay, so garbage collection is off.
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
    """How the launcher reaches an agent."""

    process: Reach  # its input and output are the agent's; it ends with the agent
    frames: LinkReader  # reads the frames of the agent
    silence_s: float = math.inf  # seconds of silence after which the agent counts as lost
    #: Command that reaches the host, and ends when its connection does; "" for this machine.
    via: str = ""
    #: Whether the agent keeps the output of nodes in files that are the launcher's too.
    keeps_logs: bool = True
    tidy: Callable[[], None] = lambda: None  # cleans up after an agent that could not do so
    #: Ends the agent by force, and all that it leaves; None where this process does not reach the
    #: reaper.
    force: Callable[[], None] | None = None
    #: Returns the error output of the programs on the way, if any.
    explain: Callable[[], str] = lambda: ""
    release: Callable[[], None] = lambda: None  # called at the very end
    #: Exit code of the agent if one of its nodes has failed; in a pod, the cluster reads it.
    failure_code: int = 0


def check_standard_library() -> None:
    """Raises an error if the script has changed Python so that this process could not hear agents."""
    require_running_clock()
    if getattr(loaded_module("gevent.monkey"), "saved", None):
        raise LaunchError(
            "gevent has patched the standard library: agents could not be heard. Launch from a script "
            "that is not patched, or with threads: launcher='local_mt'"
        )


def start_agent_here(name: str) -> AgentLink:
    """Starts the agent of this machine; it gets ready while the caller continues."""
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
            # Ctrl-C in the terminal must reach only the launcher, which stops the program in order.
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"cannot start the agent of {name}: {error}{advice_on(error)}") from error
    assert process.stdout is not None
    frames = LinkReader(process.stdout.fileno(), MARKER)
    return AgentLink(
        process,
        frames,
        tidy=lambda: end_marked(mark),
        force=lambda: process.send_signal(FORCE_SIGNAL),
    )
