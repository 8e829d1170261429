"""Servers for objects."""

from typing import Any

import courier
from courier import batched_handler
from launchpad.nodes.base import running_node

__all__ = ["batched_handler", "make_courier_server"]


def make_courier_server(
    instance: Any, *courier_args: Any, port: int | None = None, **courier_kwargs: Any
) -> courier.Server:
    """Returns a server of an object's public methods, not started.

    In a node, at the port of one of its addresses, it is the server that handles of the node reach.
    `courier_args` are a name, which has no effect, and then the port; without it, a free one is
    taken. `courier_kwargs` are those of `courier.Server`.
    """
    if len(courier_args) > 1:
        port = courier_args[1]
    port = port or 0
    hidden = ("set_courier_server",)
    if (node := running_node()) is not None:
        for address in node.addresses:
            if address.resolve().endswith(f":{port}"):
                make = node.runtime.make_server
                return make(address, instance, hidden=hidden, **courier_kwargs)
    return courier.Server(instance, port=port, hidden=hidden, **courier_kwargs)
