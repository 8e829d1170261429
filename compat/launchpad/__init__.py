"""The names of DeepMind's Launchpad, over launchpad-lite: its programs run unchanged.

launchpad-lite documents their meaning; modules here document only differences.
"""

from launchpad import _origin  # noqa: F401 - before anything of another launchpad is imported

# isort: split
import courier.python  # noqa: F401 - stands in for a package of its errors
from launchpad import address, context, program, stopping
from launchpad.address import (
    AbstractAddressBuilder,
    Address,
    SimpleLocalAddressBuilder,
    get_port_from_address,
)
from launchpad.context import LaunchType, is_local_launch, is_local_launch_or_test
from launchpad.flags import LAUNCH_TYPE
from launchpad.launch.launch import launch
from launchpad.nodes.cacher.node import CacherNode
from launchpad.nodes.courier.courier_utils import batched_handler
from launchpad.nodes.courier.node import CourierClient, CourierHandle, CourierNode
from launchpad.nodes.dereference import Deferred, maybe_dereference
from launchpad.nodes.multi_processing_colocation.node import MultiProcessingColocation
from launchpad.nodes.multi_threading_colocation.node import MultiThreadingColocation
from launchpad.nodes.python.local_multi_processing import PythonProcess
from launchpad.nodes.python.node import PyClassNode, PyNode
from launchpad.nodes.python.xm_docker import DockerConfig
from launchpad.nodes.reverb.node import ReverbNode
from launchpad.program import Program, make_program
from launchpad.program_stopper.program_stopper import make_program_stopper
from launchpad.stopping import (
    register_stop_handler,
    stop,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)

__all__ = [
    "LAUNCH_TYPE",
    "AbstractAddressBuilder",
    "Address",
    "CacherNode",
    "CourierClient",
    "CourierHandle",
    "CourierNode",
    "Deferred",
    "DockerConfig",
    "LaunchType",
    "MultiProcessingColocation",
    "MultiThreadingColocation",
    "Program",
    "PyClassNode",
    "PyNode",
    "PythonProcess",
    "ReverbNode",
    "SimpleLocalAddressBuilder",
    "address",
    "batched_handler",
    "context",
    "get_port_from_address",
    "is_local_launch",
    "is_local_launch_or_test",
    "launch",
    "make_program",
    "make_program_stopper",
    "maybe_dereference",
    "program",
    "register_stop_handler",
    "stop",
    "stop_event",
    "stopping",
    "unregister_stop_handler",
    "wait_for_stop",
]
