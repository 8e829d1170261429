"""What can go wrong with an engine.

EngineError
├── UnknownKeyError     there is no value of this key                            (KeyError)
├── UpdateError         an update is not what the engine can apply               (ValueError)
└── ValuesLostError     a server ended, and no checkpoint has what it held       (RuntimeError)
"""

from launchpad_lite.errors import LaunchpadError

__all__ = ["EngineError", "UnknownKeyError", "UpdateError", "ValuesLostError"]


class EngineError(LaunchpadError):
    """The root of all errors of engines."""


class UnknownKeyError(EngineError, KeyError):
    """There is no value of this key; the message names the node and similar keys."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class UpdateError(EngineError, ValueError):
    """An update is for a key that was not scheduled, or cannot be applied to its value."""


class ValuesLostError(EngineError, RuntimeError):
    """A server of values ended and started again, and no checkpoint has what it held."""
