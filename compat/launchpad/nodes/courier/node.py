"""The node most programs are made of: an object that other nodes can call."""

from collections.abc import Callable, Mapping
from typing import Any

import launchpad_lite as lp
from courier import Client as CourierClient
from launchpad.nodes.base import OriginalClassNode
from launchpad_lite import CourierHandle

__all__ = ["COURIER_PORT_NAME", "CourierClient", "CourierHandle", "CourierNode"]

COURIER_PORT_NAME = "courier"


class CourierNode(OriginalClassNode, lp.CourierNode[Any]):
    """As that of launchpad-lite; a subclass may override `run`."""

    def __init__(
        self,
        constructor: Callable[..., Any],
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            constructor,
            *args,
            courier_kwargs=courier_kwargs,
            courier_client_kwargs=courier_client_kwargs,
            **kwargs,
        )
        self._courier_kwargs = dict(courier_kwargs or {})
        self._client_kwargs = dict(courier_client_kwargs or {})
