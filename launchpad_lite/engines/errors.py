"""The errors of engines."""

from launchpad_lite.errors import LaunchpadError


class EngineError(LaunchpadError):
    """The root of all errors of engines."""


class EmptyError(EngineError, ValueError):
    """`reduce` was called on a dataset without items."""


class SpillError(EngineError, OSError):
    """Data that does not fit into memory could not be written to disk; the message says where."""


class TaskError(EngineError, RuntimeError):
    """A partition could not be computed; the message names worker, stage and partition."""


class OrderError(TaskError, TypeError):
    """Keys of a sort cannot be compared with each other; the message names the partition."""


class UnknownKeyError(EngineError, KeyError):
    """There is no value of this key; the message names the node and similar keys."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class UpdateError(EngineError, ValueError):
    """An update is for a key that was not scheduled, or cannot be applied to its value."""


class ValuesLostError(EngineError, RuntimeError):
    """A server of values ended and started again, and no checkpoint has what it held."""
