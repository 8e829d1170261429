"""The name server as a node."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

import courier
import launchpad_lite as lp
from launchpad_lite.search._messages import Life, Load, Member, View
from launchpad_lite.search._registry import Registry
from launchpad_lite.search._timing import Timing
from launchpad_lite.search._waiting import is_set_within, set_at_stop

_LOGGER = logging.getLogger(__name__)
_NO_LOAD = Load()
#: Seconds between two looks whether all have left.
_LOOK_S = 0.05


class NameServer:
    """Knows brokers, workers and models. It keeps nothing: it learns all by their next heartbeats."""

    def __init__(self, timing: Timing) -> None:
        """Makes one that knows nobody.

        Args:
            timing: Of the search.
        """
        self._timing = timing
        self._registry = Registry(
            silence_s=timing.silence_s, version=lp.__version__, now=time.monotonic()
        )
        self._is_closed = False

    @courier.idempotent
    async def register(self, member: Member) -> None:
        """As `Registry.register`."""
        self._registry.register(member, time.monotonic())

    @courier.idempotent
    async def beat(self, role: str, who: Life, load: Load = _NO_LOAD, broker: str = "") -> View:
        """As `Registry.beat`."""
        return self._registry.beat(role, who, load, broker, time.monotonic())

    @courier.idempotent
    async def view(self) -> View:
        """As `Registry.view`."""
        return self._registry.view()

    @courier.idempotent
    async def place(self, role: str, who: Life, avoid: Collection[str] = ()) -> str:
        """As `Registry.place`."""
        return self._registry.place(role, who, avoid)

    @courier.idempotent
    async def claim(
        self, who: Life, machine: str, devices: Sequence[str], share: float
    ) -> str | None:
        """As `Registry.claim`."""
        return self._registry.claim(who, machine, devices, share, time.monotonic())

    @courier.idempotent
    async def leave(self, role: str, who: Life) -> None:
        """As `Registry.leave`."""
        self._registry.leave(role, who)

    @courier.idempotent
    async def timing(self) -> Timing:
        """Returns how long the parts of the search wait."""
        return self._timing

    @courier.idempotent
    async def close(self) -> None:
        """Says that the search is over: all parts end by themselves."""
        self._registry.close()
        self._is_closed = True

    async def run(self) -> None:
        """Runs until the search is over, or the program stops."""
        is_asked = asyncio.Event()
        with set_at_stop(is_asked):
            while not is_asked.is_set() and not self._has_ended():
                for name in self._registry.expire(time.monotonic()):
                    _LOGGER.warning("%s was silent for %g s", name, self._timing.silence_s)
                pause_s = _LOOK_S if self._is_closed else self._timing.beat_s
                await is_set_within(is_asked, pause_s)

    def _has_ended(self) -> bool:
        """Returns whether all that needs it has left, after the search."""
        return self._is_closed and not self._registry.is_used
