"""The errors of replicas."""

from launchpad_lite.errors import LaunchpadError


class ReplicaError(LaunchpadError, RuntimeError):
    """Replicas cannot go on."""


class CollectiveMismatchError(ReplicaError):
    """Replicas called different collectives, in another order, or with other shapes.

    The message names the replicas, and where each of them made its call.
    """


class ReplicaLostError(ReplicaError):
    """A replica has ended or cannot be reached, so its calls cannot go on."""


class InterruptedTraining(KeyboardInterrupt):
    """A signal, or the failure of another node, ends a replica between two steps."""


class InputSplitError(ReplicaError, ValueError):
    """A batch cannot be divided among the replicas of a worker."""


class UnsupportedCollectiveError(ReplicaError, NotImplementedError):
    """A replicator does not have this."""
