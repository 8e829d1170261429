"""Refuses to mix with the original Launchpad, whose import package has the same name."""

from launchpad_lite.launching import refuse_original

refuse_original()
