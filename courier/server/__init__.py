"""The side that answers."""
