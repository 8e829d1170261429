"""Engines: distributed algorithms whose workers go on together, made of nodes, handles and calls.

from launchpad_lite import engines

`engines.simulate` shows what a barrier does with many workers, without running any.
"""

from launchpad_lite.engines._jobs import Broadcast
from launchpad_lite.engines._servers import Progress
from launchpad_lite.engines.barriers import ASP, BSP, PSP, SSP, Barrier
from launchpad_lite.engines.bounds import mean_bound, variance_bound
from launchpad_lite.engines.errors import (
    EmptyError,
    EngineError,
    OrderError,
    SpillError,
    TaskError,
    UnknownKeyError,
    UpdateError,
    ValuesLostError,
)
from launchpad_lite.engines.map_reduce import Dataset, MapReduce, MapReduceHandle
from launchpad_lite.engines.parameter_server import (
    ParameterServer,
    ParameterServerClient,
    ParameterServerHandle,
    Versioned,
)
from launchpad_lite.engines.peer_to_peer import PeerToPeer, PeerToPeerClient, PeerToPeerHandle
from launchpad_lite.engines.simulator import (
    Churn,
    Evaluation,
    SimulatedModel,
    Simulation,
    Stragglers,
    WorkerTrace,
    simulate,
)

__all__ = [
    "ASP",
    "BSP",
    "PSP",
    "SSP",
    "Barrier",
    "Broadcast",
    "Churn",
    "Dataset",
    "EmptyError",
    "EngineError",
    "Evaluation",
    "MapReduce",
    "MapReduceHandle",
    "OrderError",
    "ParameterServer",
    "ParameterServerClient",
    "ParameterServerHandle",
    "PeerToPeer",
    "PeerToPeerClient",
    "PeerToPeerHandle",
    "Progress",
    "SimulatedModel",
    "Simulation",
    "SpillError",
    "Stragglers",
    "TaskError",
    "UnknownKeyError",
    "UpdateError",
    "ValuesLostError",
    "Versioned",
    "WorkerTrace",
    "mean_bound",
    "simulate",
    "variance_bound",
]
