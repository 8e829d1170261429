"""Programs: those of launchpad-lite."""

from launchpad_lite import Program, make_program

__all__ = ["Program", "make_program"]
