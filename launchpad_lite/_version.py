"""The version of launchpad-lite: the one place it is written, read by the build and by the code."""

__version__ = "0.1.0"
