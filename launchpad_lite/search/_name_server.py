"""The name server as a node."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.search._joining import JoinInfo
from launchpad_lite.search._messages import Life, Load, Member, View
from launchpad_lite.search._registry import Registry
from launchpad_lite.search._timing import Timing

_NO_LOAD = Load()


class NameServer:
    """Knows brokers, workers and models. It keeps nothing: it learns all by their next heartbeats."""

    def __init__(self, timing: Timing, *, announce: Callable[[], object] = lambda: None) -> None:
        """Makes one that knows nobody.

        Args:
            timing: Of the search.
            announce: Is called when its node serves.
        """
        self._timing = timing
        self._announce = announce
        self._registry = Registry(
            silence_s=timing.silence_s,
            version=lp.__version__,
            now=time.monotonic(),
        )

    def set_courier_server(self, server: Any) -> None:
        """Begins to serve. For its node."""
        server.start()
        self._announce()

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
        return self._registry.view(time.monotonic())

    @courier.idempotent
    async def place(self, role: str, who: Life, avoid: Collection[str] = ()) -> str:
        """As `Registry.place`."""
        return self._registry.place(role, who, avoid, time.monotonic())

    @courier.idempotent
    async def leave(self, role: str, who: Life) -> None:
        """As `Registry.leave`."""
        self._registry.leave(role, who)

    @courier.grpc_service("search.v1.NameServer", "Register", "Beat", "Place", "Leave")
    async def serve_foreign(self, method: str, request: bytes) -> bytes:
        """Answers workers in other languages."""
        from launchpad_lite.search import _foreign  # loads protobuf

        return await _foreign.NAME_SERVER[method](self, request)

    @courier.idempotent
    async def timing(self) -> Timing:
        """Returns how long the parts of the search wait."""
        return self._timing

    @courier.idempotent
    async def close(self) -> None:
        """Says that the search is over: all parts end by themselves."""
        self._registry.close()


def make_name_server(me: Any, timing: Timing, folder: str | None) -> NameServer:
    """Returns a name server for a node.

    Args:
        me: A client of it.
        timing: Of the search.
        folder: Where to write what workers from outside need to join, until the program stops; None:
            nowhere.

    """

    def announce() -> None:
        if folder is not None:
            path = JoinInfo.of(me).write(Path(folder))
            lp.register_stop_handler(lambda: path.unlink(missing_ok=True))

    return NameServer(timing, announce=announce)
