"""Waiting in event loops for some time."""

import asyncio
import contextlib


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event; returns whether it was set in time."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), max(0.0, seconds))
    return event.is_set()
