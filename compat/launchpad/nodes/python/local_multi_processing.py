"""`PythonProcess`, at the original's path."""

from launchpad_lite import PythonProcess

__all__ = ["PythonProcess"]
