"""The end of a program: that of launchpad-lite, from every thread of a node."""

from launchpad_lite import (
    register_stop_handler,
    stop,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)

__all__ = [
    "register_stop_handler",
    "stop",
    "stop_event",
    "unregister_stop_handler",
    "wait_for_stop",
]
