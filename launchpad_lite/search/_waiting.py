"""Events of event loops: waiting for them for some time, and setting them when the program stops."""

import asyncio
import contextlib
from collections.abc import Iterator

import launchpad_lite as lp


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event; returns whether it was set in time."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


@contextlib.contextmanager
def set_at_stop(event: asyncio.Event) -> Iterator[None]:
    """Sets an event of the running loop when the program stops, in a block."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    lp.register_stop_handler(stop)
    try:
        yield
    finally:
        lp.unregister_stop_handler(stop)
