"""How the launcher reaches an agent, and that of this machine."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

from launchers.host.link import MARKER, LinkReader, Reach
from launchers.host.sweep import FORCE_SIGNAL, end_marked
from launchpad_lite.process.agent_process import take_agent


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


def start_agent_here() -> AgentLink:
    """Starts the agent of this machine; it gets ready while the caller continues."""
    process, mark = take_agent()
    reach = cast("Reach", process)
    return AgentLink(
        reach,
        LinkReader(reach.stdout.fileno(), MARKER),
        tidy=lambda: end_marked(mark),
        force=lambda: process.send_signal(FORCE_SIGNAL),
    )
