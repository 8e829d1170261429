"""`MultiThreadingColocation`, at the original's path."""

import launchpad_lite as lp
from launchpad.nodes.base import OriginalNode


class MultiThreadingColocation(OriginalNode, lp.MultiThreadingColocation):
    """As that of launchpad-lite."""
