"""`CacherNode`, which the original never published."""

from launchpad_lite import CacherNode

__all__ = ["CacherNode"]
