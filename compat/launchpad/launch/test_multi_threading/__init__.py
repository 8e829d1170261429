"""Paths of the original."""
