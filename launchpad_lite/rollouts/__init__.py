"""Rollouts for reinforcement learning: generators, a trainer, and weights between them.

from launchpad_lite import rollouts

Generators work ahead of the trainer within a bound of staleness; nothing hangs without saying for
whom it waits.
"""

from launchpad_lite.rollouts.errors import (
    GeneratorsGoneError,
    PromptsFailedError,
    RolloutsError,
    TrainerReplacedError,
    WeightsError,
)
from launchpad_lite.rollouts.results import (
    FailedPrompt,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutStatus,
)
from launchpad_lite.rollouts.rollouts import Rollouts, RolloutsClient, RolloutsHandle
from launchpad_lite.rollouts.weights import (
    VersionedWeights,
    Weights,
    WeightsClient,
    WeightsHandle,
)

__all__ = [
    "FailedPrompt",
    "GeneratorsGoneError",
    "PromptsFailedError",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "RolloutStatus",
    "Rollouts",
    "RolloutsClient",
    "RolloutsError",
    "RolloutsHandle",
    "TrainerReplacedError",
    "VersionedWeights",
    "Weights",
    "WeightsClient",
    "WeightsError",
    "WeightsHandle",
]
