"""The limits of a program's life, for launches with others than users get: `timing=Timing(...)`."""

from launchpad_lite.life.timing import Timing

__all__ = ["Timing"]
