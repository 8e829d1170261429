"""launchpad_lite: describe a distributed program once as a graph, run it anywhere.

import launchpad_lite as lp

program = lp.Program("consumer_producers")
with program.group("producer"):
    producer = program.add_node(lp.CourierNode(Range, 0, 10))
program.add_node(lp.CourierNode(Consumer, [producer]), label="consumer")
lp.launch(program).wait()
"""

from launchpad_lite import _own_packages  # noqa: F401 - before what it looks at is imported

# isort: split
from typing import TYPE_CHECKING

from courier import Client as CourierClient, Remote, batched_handler
from launchpad_lite import _exit, _flags  # noqa: F401 - flags, and the script's end, before the user's own
from launchpad_lite._address import Address
from launchpad_lite._deferred import Deferred, maybe_dereference
from launchpad_lite._policies import Liveness, RestartPolicy
from launchpad_lite._process import PythonProcess
from launchpad_lite._program import Program, make_program
from launchpad_lite._resources import Resources
from launchpad_lite._result import NodeFailure, Outcome, ProgramResult, Restart
from launchpad_lite._runtime import (
    checkpoint_here,
    current_node,
    heartbeat,
    register_stop_handler,
    restart_count,
    restart_node,
    save_checkpoint,
    stop,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)
from launchpad_lite._set_up import set_up
from launchpad_lite._version import __version__
from launchpad_lite.errors import (
    CheckpointError,
    CommandError,
    LauncherLoadError,
    LaunchError,
    LaunchpadError,
    MissingExtraError,
    NodeFailedError,
    NoProgramError,
    ProgramError,
    ProgramPathError,
    UnknownLauncherError,
    UnresolvedAddressError,
)
from launchpad_lite.nodes.base import Handle, Node
from launchpad_lite.nodes.cacher import CacherNode
from launchpad_lite.nodes.courier import CourierHandle, CourierNode
from launchpad_lite.nodes.external import ExternalNode
from launchpad_lite.nodes.pool import Pool
from launchpad_lite.nodes.python import PyClassNode, PyNode

# Loaded at the first use: what only a process that launches needs, and nodes that few programs have.
if TYPE_CHECKING:
    from launchpad_lite._checkpoints import Checkpoints
    from launchpad_lite._command_line import run_script as main
    from launchpad_lite._launch import launch, plan
    from launchpad_lite._plan import LaunchPlan
    from launchpad_lite._render import render_mermaid, render_svg
    from launchpad_lite.launching import RunningProgram
    from launchpad_lite.nodes.colocation import (
        ColocationNode,
        MultiProcessingColocation,
        MultiThreadingColocation,
    )
    from launchpad_lite.nodes.command import CommandNode, Endpoint
    from launchpad_lite.nodes.reverb import ReverbNode
else:
    _LATER = {
        "Checkpoints": ("_checkpoints", "Checkpoints"),
        "ColocationNode": ("nodes.colocation", "ColocationNode"),
        "CommandNode": ("nodes.command", "CommandNode"),
        "Endpoint": ("nodes.command", "Endpoint"),
        "LaunchPlan": ("_plan", "LaunchPlan"),
        "MultiProcessingColocation": ("nodes.colocation", "MultiProcessingColocation"),
        "MultiThreadingColocation": ("nodes.colocation", "MultiThreadingColocation"),
        "ReverbNode": ("nodes.reverb", "ReverbNode"),
        "RunningProgram": ("launching", "RunningProgram"),
        "launch": ("_launch", "launch"),
        "main": ("_command_line", "run_script"),
        "plan": ("_launch", "plan"),
        "render_mermaid": ("_render", "render_mermaid"),
        "render_svg": ("_render", "render_svg"),
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module, attribute = _LATER[name]
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*globals(), *_LATER]


__all__ = [
    "Address",
    "CacherNode",
    "CheckpointError",
    "Checkpoints",
    "ColocationNode",
    "CommandError",
    "CommandNode",
    "CourierClient",
    "CourierHandle",
    "CourierNode",
    "Deferred",
    "Endpoint",
    "ExternalNode",
    "Handle",
    "LaunchError",
    "LaunchPlan",
    "LauncherLoadError",
    "LaunchpadError",
    "Liveness",
    "MissingExtraError",
    "MultiProcessingColocation",
    "MultiThreadingColocation",
    "NoProgramError",
    "Node",
    "NodeFailedError",
    "NodeFailure",
    "Outcome",
    "Pool",
    "Program",
    "ProgramError",
    "ProgramPathError",
    "ProgramResult",
    "PyClassNode",
    "PyNode",
    "PythonProcess",
    "Remote",
    "Resources",
    "Restart",
    "RestartPolicy",
    "ReverbNode",
    "RunningProgram",
    "UnknownLauncherError",
    "UnresolvedAddressError",
    "__version__",
    "batched_handler",
    "checkpoint_here",
    "current_node",
    "heartbeat",
    "launch",
    "main",
    "make_program",
    "maybe_dereference",
    "plan",
    "register_stop_handler",
    "render_mermaid",
    "render_svg",
    "restart_count",
    "restart_node",
    "save_checkpoint",
    "set_up",
    "stop",
    "stop_event",
    "unregister_stop_handler",
    "wait_for_stop",
]
