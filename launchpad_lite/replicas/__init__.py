"""Replicas: write one replica, train on many. After TF-Replicator (arXiv 1902.00465)."""

from launchpad_lite.replicas._kept import State
from launchpad_lite.replicas._progress import Report
from launchpad_lite.replicas.asynchronous import MultiWorkerAsyncReplicator
from launchpad_lite.replicas.errors import (
    CollectiveMismatchError,
    InputSplitError,
    ReplicaError,
    ReplicaLostError,
    UnsupportedCollectiveError,
)
from launchpad_lite.replicas.replicators import (
    InputReplication,
    MultiGpuReplicator,
    MultiWorkerReplicator,
    NonReplicator,
    Replicator,
    TpuReplicator,
)

__all__ = [
    "CollectiveMismatchError",
    "InputReplication",
    "InputSplitError",
    "MultiGpuReplicator",
    "MultiWorkerAsyncReplicator",
    "MultiWorkerReplicator",
    "NonReplicator",
    "ReplicaError",
    "ReplicaLostError",
    "Replicator",
    "Report",
    "State",
    "TpuReplicator",
    "UnsupportedCollectiveError",
]
