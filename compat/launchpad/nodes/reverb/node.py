"""Replay buffers as nodes."""

from collections.abc import Callable
from typing import Any

import launchpad_lite as lp
from launchpad.nodes.base import OriginalNode
from launchpad_lite.nodes.reverb import ReverbHandle

__all__ = ["ReverbHandle", "ReverbNode"]


class ReverbNode(OriginalNode, lp.ReverbNode):
    """As that of launchpad-lite; with a period for checkpoints and no folder, Reverb takes one of its own."""

    def __init__(
        self,
        priority_tables_fn: Callable[[], Any],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: float | None = None,
    ) -> None:
        if checkpoint_ctor is None and checkpoint_time_delta_minutes is not None:
            checkpoint_ctor = _checkpointer_of_reverb
        super().__init__(priority_tables_fn, checkpoint_ctor, checkpoint_time_delta_minutes)


def _checkpointer_of_reverb() -> Any:
    import reverb

    return reverb.checkpointers.default_checkpointer()
