"""Nodes that run Python code and serve nothing."""

from typing import Any

import launchpad_lite as lp
from launchpad.nodes.base import OriginalClassNode, OriginalNode


class PyNode(OriginalNode, lp.PyNode):
    """As that of launchpad-lite."""


class PyClassNode(OriginalClassNode, lp.PyClassNode):
    """As that of launchpad-lite; a subclass may override `run`."""

    @property
    def _constructor(self) -> Any:
        return self._function
