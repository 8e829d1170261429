"""A running node: its addresses, clients and state."""
