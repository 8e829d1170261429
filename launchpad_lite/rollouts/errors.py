"""The errors of rollouts."""

from launchpad_lite.errors import LaunchpadError


class RolloutsError(LaunchpadError):
    """The root of all errors of rollouts."""


class EnvironmentTakenError(RolloutsError, RuntimeError):
    """A rollout that was given up calls its environment, which another one has by now."""


class GeneratorsGoneError(RolloutsError, RuntimeError):
    """A batch can never come: no generator, environment or reward is left, or all are held up."""


class InferenceError(RolloutsError, RuntimeError):
    """An inference engine refuses a request. The message has what it answers."""


class ItemError(RolloutsError, ValueError):
    """An item has another structure than the first one of its table, or is not made of arrays."""


class PromptsFailedError(RolloutsError, RuntimeError):
    """A batch would never come: one prompt after another fails. The message has the last error."""


class ReplayTimeoutError(RolloutsError, TimeoutError):
    """An insert or a sample waited too long. The message names the limiter and its numbers."""


class TrainerReplacedError(RolloutsError, RuntimeError):
    """Another trainer, or another loop of this one, reads batches by now."""


class UnknownTableError(RolloutsError, ValueError):
    """No table has this name. The message has the known names."""


class WeightsError(RolloutsError, ValueError):
    """Parameters that were published have another structure than before, or a NaN."""
