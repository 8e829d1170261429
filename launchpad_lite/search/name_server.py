"""The name server as a node: knows the participants of a search."""

import collections
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite.search._messages import Life, Load, MembersView, SearchMember
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import WorkerMismatchError

_NO_LOAD = Load()
#: How often it looks for silent participants until it drops one.
_LOOKS = 20


@dataclass
class _MemberRecord:
    """A member; `broker` is the one that a worker or a model uses."""

    member: SearchMember
    seen_at: float
    load: Load = field(default_factory=Load)
    broker: str = ""


class NameServer:
    """Knows brokers, workers and models. It saves nothing: heartbeats tell it all again."""

    def __init__(
        self,
        me: Any,
        timing: Timing,
        folder: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._timing = timing
        #: Where the file for workers from outside is, until the program stops.
        self._folder = folder
        self._clock = clock
        self._looked_at = clock()
        #: By role and name. Heartbeats of many workers look only at brokers, which are few.
        self._entries: dict[str, dict[str, _MemberRecord]] = collections.defaultdict(dict)
        self._python = ""
        self._is_closed = False

    def set_courier_server(self, server: Any) -> None:
        """Begins to serve. For its node."""
        server.start()
        if self._folder is not None:
            from launchpad_lite.parts.joining import JoinInfo

            info = JoinInfo(self._me.address, *lowlevel.credentials(self._me))
            path = info.write(Path(self._folder))
            lp.register_stop_handler(lambda: path.unlink(missing_ok=True))

    @courier.idempotent
    async def register(self, member: SearchMember) -> None:
        """Adds a participant, in place of an earlier life of it.

        Raises:
            WorkerMismatchError: It has another version, or its pickles are not those of the others.
        """
        name = member.who.name
        if member.version != lp.__version__:
            raise WorkerMismatchError(
                f"{name} has launchpad-lite {member.version or 'of no version'}, and this search "
                f"{lp.__version__}; install the same"
            )
        if member.python:
            if self._python and member.python != self._python:
                raise WorkerMismatchError(
                    f"{name} runs on Python {member.python}, and this search on {self._python}; "
                    "pickled tasks need the same"
                )
            self._python = member.python
        self._entries[member.role][name] = _MemberRecord(member, self._clock())

    @courier.idempotent
    async def beat(
        self, role: str, who: Life, load: Load = _NO_LOAD, broker: str = ""
    ) -> MembersView:
        """Notes that a participant is there, with the load of a broker, or the broker in use."""
        entry = self._entries[role].get(who.name)
        is_known = entry is not None and entry.member.who == who
        if entry is not None and is_known:
            entry.seen_at, entry.load = self._clock(), load
            entry.broker = broker or entry.broker
        return self._view(is_known=is_known)

    @courier.idempotent
    async def view(self) -> MembersView:
        """Returns the live brokers, and how many workers there are."""
        return self._view(is_known=True)

    def _view(self, *, is_known: bool) -> MembersView:
        self._expire()
        members, workers = self._entries["broker"].items(), len(self._entries["worker"])
        brokers = {name: (entry.member.address, entry.load) for name, entry in members}
        return MembersView(is_known, brokers, workers, self._is_closed)

    @courier.idempotent
    async def place(self, role: str, who: Life, avoid: Collection[str] = ()) -> str:
        """Returns the broker that a worker or model is to use; empty: there is none.

        It is one of `avoid` only if there is no other.
        """
        self._expire()
        placed = self._entries[role].get(who.name)
        users = dict.fromkeys(self._entries["broker"], 0)
        for entry in self._entries[role].values():
            if entry is not placed and entry.broker in users:
                users[entry.broker] += 1
        here = "" if placed is None else placed.broker  # it stays there, unless another is better
        fit = {name: (name in avoid, count, name != here) for name, count in users.items()}
        place = min(sorted(fit), key=fit.__getitem__, default="")
        if placed is not None and placed.member.who == who:
            placed.broker = place
        return place

    @courier.idempotent
    async def leave(self, role: str, who: Life) -> None:
        """Forgets a participant."""
        entry = self._entries[role].get(who.name)
        if entry is not None and entry.member.who == who:
            del self._entries[role][who.name]

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
        """Closes the search: all parts hear that it is over, and end."""
        self._is_closed = True

    def _expire(self) -> None:
        now = self._clock()
        gap_s = now - self._looked_at
        silence_s = self._timing.silence_s
        if gap_s < silence_s / _LOOKS:
            return
        self._looked_at = now
        stood_still = gap_s > silence_s / 2  # this process could hear of none
        for entries in self._entries.values():
            for name, entry in list(entries.items()):
                entry.seen_at += gap_s if stood_still else 0.0
                if entry.seen_at + silence_s <= now:
                    del entries[name]
