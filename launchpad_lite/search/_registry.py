"""What the name server knows: who is there.

A state machine without I/O and without a clock. Not thread-safe.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from launchpad_lite.search._messages import Life, Load, Member, View
from launchpad_lite.search.errors import WorkerMismatchError


@dataclass
class _Entry:
    member: Member
    seen_at: float
    load: Load = field(default_factory=Load)
    #: Of a worker or a model: the broker that it uses.
    broker: str = ""


class Registry:
    """Who is there. It is empty at first, and learns all from heartbeats."""

    def __init__(self, *, silence_s: float, version: str, now: float) -> None:
        """Makes an empty one.

        Args:
            silence_s: Seconds until somebody who is silent is dropped.
            version: Of launchpad-lite, which all must have.
            now: The time.
        """
        self._silence_s = silence_s
        self._version = version
        self._looked_at = now
        #: By role and name. Heartbeats of many workers look only at brokers, which are few.
        self._entries: dict[str, dict[str, _Entry]] = {}
        #: Nobody is dropped before.
        self._drops_at = math.inf
        self._python = ""
        self._is_closed = False

    def register(self, member: Member, now: float) -> None:
        """Adds somebody, in place of an earlier life of it.

        Raises:
            WorkerMismatchError: It has another version, or its pickles are not those of the others.
        """
        name = member.who.name
        if member.version != self._version:
            raise WorkerMismatchError(
                f"{name} has launchpad-lite {member.version or 'of no version'}, and this search "
                f"{self._version}; install the same"
            )
        if member.python:
            if self._python and member.python != self._python:
                raise WorkerMismatchError(
                    f"{name} runs on Python {member.python}, and this search on {self._python}; "
                    "pickled tasks need the same"
                )
            self._python = member.python
        self._entries.setdefault(member.role, {})[name] = _Entry(member, now)
        self._drops_at = min(self._drops_at, now + self._silence_s)

    def beat(self, role: str, who: Life, load: Load, broker: str, now: float) -> View:
        """Notes that somebody is there.

        Args:
            role: Of it.
            who: It.
            load: Of a broker.
            broker: That it uses; empty: as before, or it is one itself.
            now: The time.
        """
        entry = self._of(role).get(who.name)
        is_known = entry is not None and entry.member.who == who
        if entry is not None and is_known:
            entry.seen_at, entry.load = now, load
            entry.broker = broker or entry.broker
        return self.view(now, is_known=is_known)

    def view(self, now: float, *, is_known: bool = True) -> View:
        """Returns who is there."""
        self._expire(now)
        brokers = {
            name: (entry.member.address, entry.load) for name, entry in self._of("broker").items()
        }
        return View(is_known, brokers, len(self._of("worker")), self._is_closed)

    def place(self, role: str, who: Life, avoid: Collection[str], now: float) -> str:
        """Returns the broker that a worker or model is to use; empty if there is none.

        Args:
            role: What it is.
            who: It; from now on it counts as a user of that broker.
            avoid: Brokers that it cannot reach.
            now: The time.
        """
        self._expire(now)
        placed = self._of(role).get(who.name)
        users = dict.fromkeys(self._of("broker"), 0)
        for entry in self._of(role).values():
            if entry is not placed and entry.broker in users:
                users[entry.broker] += 1
        here = "" if placed is None else placed.broker  # where it stays, if that is as good
        fit = {name: (count, name != here) for name, count in users.items() if name not in avoid}
        place = min(sorted(fit), key=fit.__getitem__, default="")
        if placed is not None and placed.member.who == who:
            placed.broker = place
        return place

    def leave(self, role: str, who: Life) -> None:
        """Forgets somebody."""
        entry = self._of(role).get(who.name)
        if entry is not None and entry.member.who == who:
            del self._entries[role][who.name]

    def close(self) -> None:
        """Says that the search is over."""
        self._is_closed = True

    def _of(self, role: str) -> Mapping[str, _Entry]:
        return self._entries.get(role, {})

    def _expire(self, now: float) -> None:
        """Drops who is silent."""
        gap_s, self._looked_at = now - self._looked_at, now
        if gap_s > self._silence_s / 2:  # this process stood still, and could hear of nobody
            for entry in self._all():
                entry.seen_at += gap_s
        if now < self._drops_at:
            return
        for role, entries in self._entries.items():
            self._entries[role] = {
                name: entry
                for name, entry in entries.items()
                if entry.seen_at + self._silence_s > now
            }
        oldest = min((entry.seen_at for entry in self._all()), default=math.inf)
        self._drops_at = oldest + self._silence_s

    def _all(self) -> Iterator[_Entry]:
        return itertools.chain.from_iterable(each.values() for each in self._entries.values())
