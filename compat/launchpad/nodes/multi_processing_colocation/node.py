"""`MultiProcessingColocation`, at the original's path."""

from launchpad_lite import MultiProcessingColocation

__all__ = ["MultiProcessingColocation"]
