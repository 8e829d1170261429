"""Checks that nodes can be pickled, under another path of the original."""

from launchpad.launch.serialization import (
    check_nodes_are_serializable,
    enable_lru_cache_pickling_once,
)

__all__ = ["check_nodes_are_serializable", "enable_lru_cache_pickling_once"]
