"""Modules that programs of the original Launchpad import."""
