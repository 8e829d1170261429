"""Calls, and how methods run. Knows no transport."""
