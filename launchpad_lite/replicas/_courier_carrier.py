"""Moves numpy arrays between replicas, over courier and shared memory. Needs no other package.

Replicas of one machine that can open each other's memory are a *group*, and its first one is its
chief, and their *leader* towards other groups. So a replica without such neighbours is a group of
its own. Each call begins with a meeting of all replicas, which compares their calls, and combines
small arrays as well.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from launchpad_lite.replicas import _payload
from launchpad_lite.replicas._carrier import Array, Carrier, CollectiveCall, Op, check_same
from launchpad_lite.replicas._leaders import Courier, Leaders
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._operations import ArrayOperation
from launchpad_lite.replicas._shared_arrays import SharedArrays
from launchpad_lite.replicas._shared_memory import (
    DIGEST_BYTES,
    SLOT_BYTES,
    MemoryPlace,
    OwnMemory,
    ReplicaReport,
    SharedGroup,
)
from launchpad_lite.replicas.errors import CollectiveMismatchError, ReplicaError, ReplicaLostError

T = TypeVar("T")

#: Up to this size the first leader combines the arrays of the groups; larger ones go around the
#: ring.
_STAR_BYTES = 1 << 16
#: The label of the meetings before there are groups.
_PLACES, _OPENED = -2, -1


class CourierCarrier(Carrier):
    """See the module. Connects at its first call."""

    def __init__(
        self,
        rank: int,
        box: Box,
        peers: Sequence[Any],
        machines: Sequence[str],
        generation: int = 0,
    ) -> None:
        """Makes it; sends nothing.

        `box` is filled by the `Mailbox` of this replica; `peers` are clients of those of all, and
        the own one is not used. Messages of other replicas must be of the same generation.
        """
        self.rank = rank
        self.size = len(peers)
        self._machines = machines
        self._courier = Courier(rank, generation, box, peers)
        self._own: OwnMemory | None = None
        with contextlib.suppress(OSError):  # this system has no such memory
            self._own = OwnMemory()
        #: The groups, by their leaders, once it has connected; and the own one.
        self._groups: dict[int, list[int]] = {}
        self._members: list[int] = [rank]
        self._is_one_group = True
        self._group: SharedGroup | None = None
        self._arrays: SharedArrays | None = None
        #: The leaders, if this is one of several.
        self._leaders: Leaders | None = None
        box.begin(generation)

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        operation = ArrayOperation(op, array.dtype, self.size)
        call = call._replace(facts=f"all_reduce({op}) of {array.dtype.str}[{len(array)}]")
        self._run(lambda: self._all_reduce(array, operation, call))

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:
        payload = _payload.pack(value)
        call = call._replace(facts="all_gather")
        payloads = self._run(lambda: self._gather(payload, lambda: self._meet(call)))
        return [_payload.unpack(each) for each in payloads]

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        call = call._replace(facts=f"broadcast from {source} of {array.dtype.str}[{len(array)}]")
        self._run(lambda: self._broadcast(array, source, call))

    def buffer(self, nbytes: int) -> Array:
        import numpy as np

        return np.zeros(nbytes, np.uint8) if self._own is None else self._own.buffer(nbytes)

    def abort(self, error: Exception) -> None:
        self._courier.interrupt(error)
        if self._own is not None:
            self._own.interrupt()

    def close(self) -> None:
        """Frees its resources. Buffers stay valid, but are shared no longer."""
        if self._courier.error is None:
            self._courier.error = ReplicaError(f"replica {self.rank}: its carrier was closed")
        self._courier.close()
        if self._group is not None:
            self._group.close()
        if self._own is not None:
            self._own.close()

    def _run(self, work: Callable[[], T]) -> T:
        if self._courier.error is not None:
            raise self._courier.error
        try:
            if not self._groups:
                self._connect()
            if self._arrays is not None:
                self._arrays.next_turn()
            return work()
        except CollectiveMismatchError:
            raise  # all replicas raise it, so they may go on
        except BaseException as error:
            known = self._courier.error
            if isinstance(error, ReplicaError):
                self.abort(error)
            else:
                self.abort(ReplicaLostError(f"replica {self.rank} cannot go on: {error!r}"))
            if self._group is not None:  # they would wait for calls that this one does not make
                self._group.give_up()
            if known is None:
                raise
            raise known from None

    def _all_reduce(self, array: Array, operation: ArrayOperation, call: CollectiveCall) -> None:
        is_last = self._is_one_group
        if array.nbytes <= (SLOT_BYTES if is_last else _STAR_BYTES):
            if self._arrays is None:
                # A copy: the array may change while the result is still being sent to others.
                parts = [array.copy()]
            else:
                parts = self._arrays.offer_small(array)
            self._meet(call, small=_Small(parts, operation))
            array[:] = parts[0]
            return
        if self._arrays is None:
            self._meet(call)
        else:
            buffer = 0 if self._own is None else self._own.find(array)
            enter = functools.partial(self._meet, call, buffer=buffer)
            self._arrays.all_reduce(array, operation, buffer, enter, last=is_last)
        if self._leaders is not None:
            self._leaders.all_reduce(array, operation)
        if not is_last:
            self._spread(array)

    def _broadcast(self, array: Array, source: int, call: CollectiveCall) -> None:
        leader = next(leader for leader, ranks in self._groups.items() if source in ranks)
        if self._arrays is not None and source in self._members:
            enter = functools.partial(self._meet, call)
            self._arrays.broadcast(array, self._members.index(source), enter)
        else:
            self._meet(call)
        if self._leaders is not None:
            self._leaders.broadcast(array, leader)
        if source not in self._members:
            self._spread(array)

    def _spread(self, array: Array) -> None:
        if self._arrays is not None:
            self._arrays.next_turn()
            self._arrays.broadcast(array, 0, self._arrays.meet)

    def _gather(
        self, payload: _payload.Payload, enter: Callable[[], None]
    ) -> list[_payload.Payload]:
        if self._arrays is None:
            enter()
            payloads: list[_payload.Payload] = [[part.copy() for part in payload]]
        else:
            offered = self._arrays.offer(payload)
            enter()
            payloads = self._arrays.collect(offered)
        return payloads if self._is_one_group else self._gather_groups(payloads)

    def _gather_groups(self, payloads: list[_payload.Payload]) -> list[_payload.Payload]:
        everything: dict[int, list[_payload.Payload]] = {}
        if self._leaders is not None:
            everything = self._leaders.all_gather(payloads)
        if self._arrays is not None:
            self._arrays.next_turn()
            offered = self._arrays.offer(_payload.pack(everything))
            self._arrays.meet()
            everything = _payload.unpack(self._arrays.collect(offered)[0])
        by_rank = {
            rank: payload
            for leader, ranks in self._groups.items()
            for rank, payload in zip(ranks, everything[leader], strict=True)
        }
        return [by_rank[rank] for rank in range(self.size)]

    def _meet(self, call: CollectiveCall, small: "_Small | None" = None, buffer: int = 0) -> None:
        """Meets all replicas, which make the same call: else this raises an error in all."""
        text = f"{call.number} {call.signature}\n{call.facts}"
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        report = ReplicaReport(0, buffer, digest)

        def decide(reports: Sequence[ReplicaReport]) -> bool:
            is_same = len({(each.buffer, each.digest) for each in reports}) == 1
            if self._leaders is not None:
                return self._meet_groups(self._leaders, digest if is_same else None, small)
            if small is not None and is_same:
                small.operation.combine(small.parts, small.parts[0], last=True)
            return is_same

        is_same = decide([report]) if self._group is None else self._group.meet(report, decide)
        if not is_same:
            self._raise_mismatch(call)

    def _meet_groups(self, leaders: Leaders, digest: bytes | None, small: "_Small | None") -> bool:
        """Returns whether all groups make the same call; the digest is None if this one does not."""
        part: Array | None = None
        if digest is not None and small is not None:
            part = small.operation.combine(small.parts, small.parts[0], last=False)
        is_same, result = leaders.meet((digest, part), functools.partial(_join, small))
        if is_same and small is not None and result is not small.parts[0]:
            small.parts[0][:] = result
        return bool(is_same)

    def _raise_mismatch(self, call: CollectiveCall) -> NoReturn:
        if self._arrays is not None:
            self._arrays.next_turn()
        meet = (lambda: None) if self._arrays is None else self._arrays.meet
        calls = [_payload.unpack(each) for each in self._gather(_payload.pack(call), meet)]
        check_same(calls)
        raise AssertionError(f"the same calls, with arrays in different buffers: {calls}")

    def _connect(self) -> None:
        places = self._meet_all(_PLACES, None if self._own is None else self._own.place)
        self._group = self._open_group(places)
        groups = divide(self._machines, self._meet_all(_OPENED, self._group is not None))
        self._groups = {ranks[0]: ranks for ranks in groups}
        self._members = next(ranks for ranks in groups if self.rank in ranks)
        if self._group is not None and len(self._members) > 1:
            self._arrays = SharedArrays(self._group)
        elif self._group is not None:
            self._group.close()
            self._group = None
        self._is_one_group = len(groups) == 1
        if not self._is_one_group and self._members[0] == self.rank:
            leaders = sorted(self._groups)
            ring = sorted(
                leaders, key=lambda rank: (self._machines.index(self._machines[rank]), rank)
            )
            self._leaders = Leaders(self._courier, leaders, ring)

    def _meet_all(self, turn: int, item: Any) -> list[Any]:
        items: list[Any] = self._courier.meet(turn, 0, item, list, self.size)
        return items

    def _open_group(self, places: Sequence[MemoryPlace | None]) -> SharedGroup | None:
        """Opens the memory of all of this machine; None if that is not possible."""
        machine = self._machines[self.rank]
        ranks = [rank for rank, name in enumerate(self._machines) if name == machine]
        near = [place for rank in ranks if (place := places[rank]) is not None]
        if self._own is None or len(near) < len(ranks):
            return None
        try:
            return SharedGroup(self._own, ranks, near, self.rank)
        except OSError:
            return None  # another container, or this one may not see other processes


class _Small(NamedTuple):
    """Small arrays of a group: a meeting combines them, and the result is in the first one."""

    parts: list[Array]
    operation: ArrayOperation


def divide(machines: Sequence[str], has_opened: Sequence[bool]) -> list[list[int]]:
    """Returns the groups of replicas that share memory, from the machine of each.

    If one of a machine could not open the memory of all others there, none there shares memory.
    """
    apart = {machine for machine, is_open in zip(machines, has_opened, strict=True) if not is_open}
    groups: dict[str | int, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(rank if machine in apart else machine, []).append(rank)
    return list(groups.values())


def _join(
    small: _Small | None, items: Sequence[tuple[bytes | None, "Array | None"]]
) -> tuple[bool, "Array | None"]:
    """Compares the calls of the groups, and combines their arrays."""
    digests = {digest for digest, _ in items}
    if len(digests) > 1 or None in digests:
        return False, None
    if small is None:
        return True, None
    parts = [part for _, part in items if part is not None]
    return True, small.operation.combine(parts, parts[0], last=True)
