"""Servers, where programs of the original Launchpad import them from."""

from courier import Server

__all__ = ["Server"]
