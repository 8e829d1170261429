"""The buffer of rollouts as a node: serves generators and the trainer."""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from courier.lowlevel import credentials
from launchpad_lite.parts.joining import JoinInfo
from launchpad_lite.parts.waiting import is_set_within
from launchpad_lite.rollouts._buffer import (
    BufferRules,
    HandedBatch,
    MemberLife,
    PromptOrder,
    RolloutBuffer,
    RolloutOrder,
)
from launchpad_lite.rollouts.results import RolloutStatus

#: Seconds between two looks at silent nodes and at limits of time.
_TICK_S = 0.5
_RATES = ("rollouts_per_s", "size_per_s", "steps_per_s")

_LOGGER = logging.getLogger(__name__)


class UnknownSessionError(Exception):
    """This buffer has started again: the trainer has to begin again."""


def _passed_on(method: Callable[..., Any]) -> Any:
    """Returns a method of the node that calls this one of its buffer, and serves all whom that may serve."""

    @functools.wraps(method)
    async def call(node: "BufferNode", *args: Any) -> Any:
        result = method(node._buffer, *args)
        node._wake()
        return result

    return courier.idempotent(call)


class BufferNode:
    """Passes prompts to generators, and rollouts to the trainer. For its event loop."""

    def __init__(
        self,
        prompts: Sequence[Any],
        order: PromptOrder,
        rules: BufferRules,
        folder: str | None = None,
        me: Any = None,
        for_generators: Any = None,
    ) -> None:
        self._prompts = prompts
        self._for_generators = for_generators
        if folder is not None:
            path = JoinInfo(me.address, *credentials(me)).write(Path(folder))
            lp.register_stop_handler(lambda: path.unlink(missing_ok=True))
        # With threads, this node may start again with the same object. Environments may know the
        # leases of its lives before.
        order, leases = dataclasses.replace(order), lp.restart_count() << 32
        self._buffer = RolloutBuffer(rules, order, leases)
        #: By role, who waits for an order, and the order; the first come first.
        self._takers: dict[str, dict[asyncio.Future[RolloutOrder], MemberLife]] = {
            role: {} for role in rules.members
        }
        #: Set when a batch may be complete.
        self._made = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        #: For which nodes the trainer waits, and why, as of the last look.
        self._waits: list[tuple[str, str]] = []
        lp.metrics.view("rollouts", self._seen)
        lp.metrics.view("rollouts/groups-by-staleness", lambda: self._seen().staleness)

    def _wake(self) -> None:
        """Serves all whom something new may serve."""
        self._start()
        self._made.set()
        self._made = asyncio.Event()
        self._serve()

    def _serve(self) -> None:
        now = time.monotonic()
        for role, takers in self._takers.items():
            for taker, member in list(takers.items()):
                if taker.done():
                    continue
                if (order := self._buffer.take(member, now)) is not None:
                    taker.set_result(order)
                elif not self._buffer.has_work(role):
                    break

    def _start(self) -> None:
        """Starts the clock, with the first call: a node without `run` does not keep a program alive."""
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self._buffer.tick(now := time.monotonic())
            self._waits = self._buffer.waits_for(now)
            status = self._buffer.status(now)
            if rates := {name: rate for name in _RATES if (rate := getattr(status, name))}:
                lp.log(rates, status.step)  # prints a line every 10 s
            self._wake()
            await asyncio.sleep(_TICK_S)

    # Called by generators, environments and rewards.

    @courier.idempotent
    async def beat(self, member: MemberLife, held: Mapping[str, str], threads: int) -> bool:
        self._start()
        hangs = self._buffer.note(member, time.monotonic(), held, threads)
        self._serve()
        return hangs

    async def take(self, member: MemberLife, wait_s: float) -> tuple[RolloutOrder, bytes] | None:
        """Returns a rollout to make and its prompt, pickled; None if there is none in time."""
        give_up_at = time.monotonic() + wait_s
        while True:
            order = self._buffer.take(member, time.monotonic())
            if order is None and (order := await self._order(member, give_up_at)) is None:
                return None
            try:
                return order, courier.dumps(self._prompts[order.prompt.index])
            except Exception as error:  # noqa: BLE001 - of the user's sequence, or prompt
                await self.fail(order.token, f"prompts[{order.prompt.index}]: {error!r}")

    async def _order(self, member: MemberLife, give_up_at: float) -> RolloutOrder | None:
        takers, taker = self._takers[member.role], asyncio.get_running_loop().create_future()
        takers[taker] = member
        try:
            await asyncio.wait([taker], timeout=give_up_at - time.monotonic())
        finally:
            del takers[taker]
        return taker.result() if taker.done() else None

    @courier.idempotent
    async def for_generators(self) -> Any:
        """Returns what generators from outside of the program are made of."""
        return self._for_generators

    @courier.idempotent
    async def add(self, token: str, number: int, payload: Any, version: int) -> int:
        return self._buffer.add(token, number, payload, version)

    give = _passed_on(RolloutBuffer.give)
    score = _passed_on(RolloutBuffer.score)

    @courier.idempotent
    async def fail(self, token: str, error: str, fault: str = "") -> None:
        hangs = self._buffer.fail(token, error, time.monotonic(), fault)
        if hangs:
            _LOGGER.warning("%s hangs: %s", hangs, error.strip().rpartition("\n")[2])
        self._wake()

    def __courier_waits__(self, method: str) -> list[tuple[str, str]]:
        return self._waits if method == "hand_out" else []

    # Called by trainers.

    begin = _passed_on(RolloutBuffer.begin)
    published = _passed_on(RolloutBuffer.published)

    @courier.idempotent
    async def hand_out(self, session: str, number: int, wait_s: float) -> HandedBatch | str:
        """Returns a batch; if it is not complete in time, for whom the trainer waits."""
        if not self._buffer.session:
            raise UnknownSessionError
        give_up_at = time.monotonic() + wait_s
        while True:
            made = self._made
            batch = self._buffer.hand_out(session, number, time.monotonic())
            if batch is not None:
                self._wake()
                return batch
            if not await is_set_within(made, give_up_at - time.monotonic()):
                return self._buffer.waits(time.monotonic())

    @courier.idempotent
    async def status(self) -> RolloutStatus:
        return self._buffer.status(time.monotonic())

    def _seen(self) -> RolloutStatus:
        """Returns the status to another thread."""
        if self._ticking is None or not (loop := self._ticking.get_loop()).is_running():
            return self._buffer.status(time.monotonic())
        return asyncio.run_coroutine_threadsafe(self.status(), loop).result(_TICK_S)
