"""Event loops on which time passes at once."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Clock(selectors.SelectSelector):
    """Lets the time pass that others would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing happens any more"
        self.now += timeout
        return []


def simulate(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that waits for nothing but time and its own tasks."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()
