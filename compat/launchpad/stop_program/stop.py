"""`stop`, at the original's path."""

from launchpad.stopping import stop

__all__ = ["stop"]
