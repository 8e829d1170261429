"""`MultiThreadingColocation`, at the original's path."""

from launchpad_lite import MultiThreadingColocation

__all__ = ["MultiThreadingColocation"]
