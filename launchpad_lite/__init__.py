"""launchpad_lite: describe a distributed program once as a graph, run it anywhere.

import launchpad_lite as lp

program = lp.Program("consumer_producers")
with program.group("producer"):
    producer = program.add_node(lp.CourierNode(Range, 0, 10))
program.add_node(lp.CourierNode(Consumer, [producer]), label="consumer")
lp.launch(program).wait()
"""

from launchpad_lite.parts import own_packages as _own_packages  # noqa: F401 - before what it looks at is imported

# isort: split
from typing import TYPE_CHECKING

from courier.lowlevel import later
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
from launchpad_lite.process import exit as _exit, flags as _flags  # noqa: F401 - flags, and the script's end, before the user's own

# Loaded at the first use: a launch starts its agent before it needs most of them.
if TYPE_CHECKING:
    from courier import Client as CourierClient, batched_handler
    from launchpad_lite.cli.command_line import run_script as main
    from launchpad_lite.graph.deferred import Deferred, maybe_dereference
    from launchpad_lite.graph.program import Program, make_program
    from launchpad_lite.graph.python_process import PythonProcess
    from launchpad_lite.graph.resources import Resources
    from launchpad_lite.insight import metrics
    from launchpad_lite.insight.metrics import log
    from launchpad_lite.launching import RunningProgram
    from launchpad_lite.launching.launch import launch, plan
    from launchpad_lite.life.policies import Liveness, RestartPolicy
    from launchpad_lite.life.result import NodeFailure, Outcome, ProgramResult, Restart
    from launchpad_lite.nodes.base import Handle, Node
    from launchpad_lite.nodes.cacher import CacherNode
    from launchpad_lite.nodes.colocation import (
        ColocationNode,
        MultiProcessingColocation,
        MultiThreadingColocation,
    )
    from launchpad_lite.nodes.command import CommandNode, Endpoint
    from launchpad_lite.nodes.courier import CourierHandle, CourierNode
    from launchpad_lite.nodes.external import ExternalNode
    from launchpad_lite.nodes.pool import Pool
    from launchpad_lite.nodes.python import PyClassNode, PyNode
    from launchpad_lite.nodes.reverb import ReverbNode
    from launchpad_lite.planning.plan import LaunchPlan
    from launchpad_lite.planning.render import render_mermaid, render_svg
    from launchpad_lite.process.set_up import set_up
    from launchpad_lite.worker.address import Address
    from launchpad_lite.worker.checkpoints import Checkpoints
    from launchpad_lite.worker.runtime import (
        checkpoint_here,
        current_node,
        heartbeat,
        register_stop_handler,
        restart_count,
        save_checkpoint,
        stop,
        stop_event,
        unregister_stop_handler,
        wait_for_stop,
    )
else:
    __getattr__, __dir__ = later(
        globals(),
        {
            "courier": "CourierClient=Client batched_handler",
            ".cli.command_line": "main=run_script",
            ".graph.deferred": "Deferred maybe_dereference",
            ".graph.program": "Program make_program",
            ".graph.python_process": "PythonProcess",
            ".graph.resources": "Resources",
            ".insight": "metrics",
            ".insight.metrics": "log",
            ".launching": "RunningProgram",
            ".launching.launch": "launch plan",
            ".life.policies": "Liveness RestartPolicy",
            ".life.result": "NodeFailure Outcome ProgramResult Restart",
            ".nodes.base": "Handle Node",
            ".nodes.cacher": "CacherNode",
            ".nodes.colocation": "ColocationNode MultiProcessingColocation MultiThreadingColocation",
            ".nodes.command": "CommandNode Endpoint",
            ".nodes.courier": "CourierHandle CourierNode",
            ".nodes.external": "ExternalNode",
            ".nodes.pool": "Pool",
            ".nodes.python": "PyClassNode PyNode",
            ".nodes.reverb": "ReverbNode",
            ".planning.plan": "LaunchPlan",
            ".planning.render": "render_mermaid render_svg",
            ".process.set_up": "set_up",
            ".worker.address": "Address",
            ".worker.checkpoints": "Checkpoints",
            ".worker.runtime": "checkpoint_here current_node heartbeat register_stop_handler restart_count "
            "save_checkpoint stop stop_event unregister_stop_handler wait_for_stop",
        },
    )

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
    "log",
    "main",
    "make_program",
    "maybe_dereference",
    "metrics",
    "plan",
    "register_stop_handler",
    "render_mermaid",
    "render_svg",
    "restart_count",
    "save_checkpoint",
    "set_up",
    "stop",
    "stop_event",
    "unregister_stop_handler",
    "wait_for_stop",
]
