"""For launchers that supervise nodes themselves: a running program, which obeys the state machine of its life.

A launcher implements `Host`, which hides where and how nodes run. `Host.perform` gets the actions that are
imported from here; the host posts the events.
"""

from typing import TYPE_CHECKING

from courier.lowlevel import later

# Loaded at first use, so that a launcher starts its agent before it loads the rest.
if TYPE_CHECKING:
    from launchers.supervision.supervised_program import Host, SupervisedProgram
    from launchpad_lite.life.events import (
        Answered,
        Ask,
        DumpStacks,
        Ended,
        Event,
        HostLost,
        Kill,
        NodeAction,
        Request,
        RequestStop,
        ServersLost,
        ServersMoved,
        Start,
        StopAsked,
        Terminate,
    )
else:
    __getattr__, __dir__ = later(
        globals(),
        {
            ".supervised_program": "Host SupervisedProgram",
            "launchpad_lite.life.events": "Answered Ask DumpStacks Ended Event HostLost Kill NodeAction Request RequestStop "
            "ServersLost ServersMoved Start StopAsked Terminate",
        },
    )

__all__ = [
    "Answered",
    "Ask",
    "DumpStacks",
    "Ended",
    "Event",
    "Host",
    "HostLost",
    "Kill",
    "NodeAction",
    "Request",
    "RequestStop",
    "ServersLost",
    "ServersMoved",
    "Start",
    "StopAsked",
    "SupervisedProgram",
    "Terminate",
]
