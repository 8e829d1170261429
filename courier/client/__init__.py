"""The side that calls."""
