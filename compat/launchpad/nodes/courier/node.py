"""The node most programs are made of: an object that other nodes can call."""

from collections.abc import Mapping
from typing import Any

import launchpad_lite as lp
from courier import Client as CourierClient
from launchpad.nodes.base import OriginalClassNode
from launchpad_lite import CourierHandle

__all__ = ["COURIER_PORT_NAME", "CourierClient", "CourierHandle", "CourierNode"]

COURIER_PORT_NAME = "courier"


class CourierNode(OriginalClassNode, lp.CourierNode[Any]):
    """As that of launchpad-lite; a subclass may override `run`."""

    @property
    def _courier_kwargs(self) -> Mapping[str, Any]:
        return self._server_options
