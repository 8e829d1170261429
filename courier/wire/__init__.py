"""Connections: addresses, handshake, frames."""
