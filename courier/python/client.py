"""Clients, where programs of the original Launchpad import them from."""

from courier import Client, list_methods

__all__ = ["Client", "list_methods"]
