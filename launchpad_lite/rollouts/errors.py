"""The errors of rollouts.

RolloutsError
├── GeneratorsGoneError  nobody makes rollouts any more   (RuntimeError)
├── PromptsFailedError   no prompt gets its rollouts      (RuntimeError)
├── TrainerReplacedError another trainer reads batches    (RuntimeError)
└── WeightsError         parameters that cannot be used   (ValueError)
"""

from launchpad_lite.errors import LaunchpadError

__all__ = [
    "GeneratorsGoneError",
    "PromptsFailedError",
    "RolloutsError",
    "TrainerReplacedError",
    "WeightsError",
]


class RolloutsError(LaunchpadError):
    """The root of all errors of rollouts."""


class GeneratorsGoneError(RolloutsError, RuntimeError):
    """A batch can never come: no generator is left, or all are held up. The message names them."""


class PromptsFailedError(RolloutsError, RuntimeError):
    """A batch would never come: one prompt after another fails. The message has the last error."""


class TrainerReplacedError(RolloutsError, RuntimeError):
    """Another trainer, or another loop of this one, reads batches by now."""


class WeightsError(RolloutsError, ValueError):
    """Parameters that were published have another structure than before, or a NaN."""
