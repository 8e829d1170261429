"""Rollouts for reinforcement learning: generators, a trainer, weights between them, and replay.

from launchpad_lite import rollouts

Generators work ahead of the trainer within a bound of staleness; nothing hangs without saying for
whom it waits.
"""

from launchpad_lite.rollouts.errors import (
    EnvironmentTakenError,
    GeneratorsGoneError,
    InferenceError,
    ItemError,
    PromptsFailedError,
    ReplayTimeoutError,
    RolloutsError,
    TrainerReplacedError,
    UnknownTableError,
    WeightsError,
)
from launchpad_lite.rollouts.inference import HttpEngine
from launchpad_lite.rollouts.joining import join
from launchpad_lite.rollouts.replay import (
    NStepWriter,
    ReplayBatch,
    ReplayClient,
    ReplayHandle,
    ReplayNode,
    SequenceWriter,
    Table,
)
from launchpad_lite.rollouts.results import (
    FailedPrompt,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutStatus,
    TableInfo,
)
from launchpad_lite.rollouts.rollouts import Rollouts, RolloutsClient, RolloutsHandle
from launchpad_lite.rollouts.weights import VersionedWeights, Weights, WeightsClient, WeightsHandle

__all__ = [
    "EnvironmentTakenError",
    "FailedPrompt",
    "GeneratorsGoneError",
    "HttpEngine",
    "InferenceError",
    "ItemError",
    "NStepWriter",
    "PromptsFailedError",
    "ReplayBatch",
    "ReplayClient",
    "ReplayHandle",
    "ReplayNode",
    "ReplayTimeoutError",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "RolloutStatus",
    "Rollouts",
    "RolloutsClient",
    "RolloutsError",
    "RolloutsHandle",
    "SequenceWriter",
    "Table",
    "TableInfo",
    "TrainerReplacedError",
    "UnknownTableError",
    "VersionedWeights",
    "Weights",
    "WeightsClient",
    "WeightsError",
    "WeightsHandle",
    "join",
]
