"""A ring of peers, after Chord (Stoica et al., SIGCOMM 2001): what a member owns, and what it copies.

Peers and keys have places on a circle of 2**64. A key belongs to the first peer at its place or
after it. Each peer has the names of all, so it asks first who has a key if all are there, and those
after that. Who is there, each knows of the peers next to it, which pass the search on.

Each key has one owner. The range of a member begins after `before`, the member before it, and ends
at its own place; only the member itself changes `before`. So ranges meet and do not overlap.

A link from A to B holds if and only if B's `before` is A, this very process. A change is answered
once it went through as many links as there are copies (chain replication; van Renesse and Schneider,
OSDI 2004). A member that was taken over, rightly or not, has no link any more: it cannot answer a
change. It learns why, and joins again. So a wrong suspicion costs time, but no values.

A member that leaves hands all on to the next one, which takes it at once. Until the answer is here,
the one that leaves refuses all calls and names the next one instead: a change that it accepted now
would be lost. No peer waits for one that leaves, because the next one accepts what it refuses; so
those that leave at the same time, even all, do not wait for each other.

Coroutines for one event loop: what stands between two awaits is done at once. Others are reached by
a function, so tests can hand in a network that delays and a process that crashes.
"""

import asyncio
import contextlib
import dataclasses
import enum
import functools
import hashlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from launchpad_lite.engines._values import Key, unknown_key
from launchpad_lite.engines.errors import EngineError, ValuesLostError

CIRCLE = 1 << 64

#: How many peers after it each peer knows. If there are no more, it can draw samples by itself.
SUCCESSORS = 24

#: Seconds until something is tried again that another member refused.
_PAUSE_S = 0.02
#: Seconds after which a member that leaves trusts its own range again, if it was not told who has
#: that. Longer than others need to notice that a process is gone.
_DOUBT_S = 5.0


@functools.lru_cache(4096)
def place_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def distance(start: int, end: int) -> int:
    """Returns how far it is from one place on to another; a whole circle from a place to itself."""
    return (end - start) % CIRCLE or CIRCLE


def is_between(start: int, place: int, end: int) -> bool:
    """Returns whether a place is after `start`, and not after `end`."""
    return distance(start, place) <= distance(start, end)


@dataclass(frozen=True)
class Contact:
    """A process of a peer."""

    name: str
    #: How often the node was started again before; -1 if that is not known.
    life: int = -1

    @property
    def place(self) -> int:
        """On the ring: the same in each life."""
        return place_of(self.name)


class Ring:
    """The way from one peer to others: hints, which may be wrong for a while. Not thread-safe."""

    def __init__(self, me: Contact) -> None:
        self.me = me
        #: The next ones, in order; without itself.
        self.successors: list[Contact] = []

    def knows_all(self) -> bool:
        """Returns whether the next peers go all around the circle."""
        return len(self.successors) < SUCCESSORS

    def next_hop(self, place: int, gone: Collection[str] = ()) -> Contact | None:
        """Returns the peer to ask next for the owner of a place of others; None if it is alone."""
        known = [each for each in self.successors if each.name not in gone]
        before = [
            contact
            for contact in known
            if contact.place != place and is_between(self.me.place, contact.place, place)
        ]
        return before[-1] if before else known[0] if known else None

    def follow(self, successors: Iterable[Contact]) -> None:
        """Takes over the next peers: in order, up to itself."""
        found: dict[str, Contact] = {}
        for contact in successors:
            if contact.name == self.me.name:
                break
            found.setdefault(contact.name, contact)
        self.successors = list(found.values())[:SUCCESSORS]

    def drop(self, name: str) -> None:
        self.successors = [each for each in self.successors if each.name != name]


class ElsewhereError(EngineError):
    """The member does not own the key, or is not on the ring (any more)."""


class GoneError(EngineError):
    """A process does not answer any more."""


class CallMember(Protocol):
    """Calls a method of a member; raises GoneError, or what the method raises."""

    def __call__(self, to: Contact, method: str, *args: Any) -> Awaitable[Any]: ...


class JoinAnswer(enum.Enum):
    """The answer of a member to another one that claims to come before it."""

    HOLDS = "holds"
    #: It needs all values, not only what has changed.
    BEHIND = "behind"
    #: Another one comes before it.
    APART = "apart"
    #: It is handing all on to the next one: ask that.
    LEAVES = "leaves"


Answer = tuple[JoinAnswer, list[Contact]]


@dataclass(frozen=True)
class StoredValue:
    value: Any
    #: How often it was changed.
    version: int = 0
    #: By the name of a peer: its life, and the last step whose update is in the value.
    applied: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class OwnedPart:
    """The part of the ring that one member owns."""

    owner: Contact
    #: Where its range begins; None if the range is the whole circle.
    before: Contact | None
    #: How often the part was changed.
    seq: int
    entries: dict[Key, StoredValue]

    def has(self, place: int) -> bool:
        return self.before is None or is_between(self.before.place, place, self.owner.place)

    def copy(self) -> "OwnedPart":
        """Returns one that changes by itself."""
        return dataclasses.replace(self, entries=dict(self.entries))


#: A number, which grows with each that a process sends; the parts of the sender and of those before
#: it, the nearest first.
Everything = tuple[int, Sequence[OwnedPart]]


def key_place(key: Key) -> int:
    return place_of(repr(key))


class RingMember:
    """One member of the ring, or one that wants to be. Each key is on `replicas` members."""

    def __init__(self, me: Contact, replicas: int, call: CallMember, rng: random.Random) -> None:
        self.ring = Ring(me)
        #: Where newcomers begin: the step of the one that lets them in.
        self.step = 0
        self._me = me
        self._links = replicas - 1
        self._call = call
        self._rng = rng
        #: None if it is not on the ring.
        self._own: OwnedPart | None = None
        #: A change that not all replicas have yet: it is not read.
        self._pending: dict[Key, StoredValue] = {}
        #: The last change that all replicas have, with all before it.
        self._acked = -1
        #: Copies of the parts of members before it, the nearest first.
        self._copies: list[OwnedPart] = []
        #: Its changes are numbered on in each of its stays on the ring.
        self._seq = 0
        #: Numbers the copies that it sends of all its parts.
        self._clock = 0
        #: The sender of the last such copies, and their number.
        self._heard: tuple[Contact, int] = (me, 0)
        #: The newcomer that is being let in: its changes wait until all replicas know of it.
        self._newcomer: Contact | None = None
        #: The member that gets all values of this one, from the first message until it is known
        #: which of them has the values. Meanwhile a link to either of them may hold, so this one
        #: accepts and answers nothing.
        self._heir: Contact | None = None
        #: How many have handed all on to it, and do not know yet that all replicas have it.
        self._inheriting = 0
        #: Held while values or the range change. A member that holds it never waits for the lock of
        #: another.
        self._writing = asyncio.Lock()

    @property
    def is_on_ring(self) -> bool:
        return self._own is not None

    # Called by others: who is where.

    async def neighbours(self) -> tuple[Contact, list[Contact]]:
        """Returns which process it is, and its successors; none if it is not on the ring."""
        return self._me, list(self.ring.successors) if self._own is not None else []

    async def search(self, place: int, gone: set[str]) -> tuple[Contact, list[Contact] | None]:
        """Returns itself as the owner of a place, and its successors; or whom to ask, and None."""
        if self._on_ring().has(place):
            return self._me, list(self.ring.successors)
        following = self.ring.next_hop(place, gone)
        if following is None:
            raise ElsewhereError(f"{self._me.name} knows no other peer")
        return following, None

    # Called by others: the ring.

    async def admit(self, newcomer: Contact, seq: int) -> None:
        """Lets a process onto the ring, before this member. Its changes are numbered from `seq`."""
        async with self._writing:
            own = self._on_ring()
            if own.before is not None and own.before.name == newcomer.name:
                self._take_over()  # it was on the ring before, and has lost its values
            if newcomer.name == self._me.name or not own.has(newcomer.place):
                raise ElsewhereError(f"{newcomer.name} does not come before {self._me.name}")
            part = OwnedPart(newcomer, own.before or self._me, seq, {})
            for key in [each for each in own.entries if part.has(key_place(each))]:
                part.entries[key] = own.entries.pop(key)
            copies = self._copies
            if own.before is None:
                self.ring.follow([newcomer])
            own.before = self._newcomer = newcomer
            own.seq += 1
            self._copies = [part, *copies][: self._links]
            after = [self._me, *self.ring.successors]
            try:
                await self._call(newcomer, "receive", part.copy(), copies, after, self.step)
                await self._send_own(own)
            except (GoneError, ElsewhereError, asyncio.CancelledError) as error:
                if self._own is own and own.before == newcomer:
                    self._take_over()
                if isinstance(error, asyncio.CancelledError):  # the newcomer has given up
                    raise
                raise ElsewhereError(f"{newcomer.name} did not take its part") from None
            finally:
                self._newcomer = None

    async def receive(
        self, part: OwnedPart, copies: Sequence[OwnedPart], after: Sequence[Contact], step: int
    ) -> None:
        """Begins to own a part: from now on it is on the ring."""
        if self._own is not None or part.owner != self._me or part.seq < self._seq:
            raise ElsewhereError(f"{self._me.name} has not asked for this part")
        self._enter(part.copy(), copies)
        self.ring.follow(after)
        self.step = max(self.step, step)

    async def inherit(self, part: OwnedPart, copies: Sequence[OwnedPart]) -> None:
        """Takes over from the member before it, which leaves."""
        own = self._on_ring()
        if own.before != part.owner or self._newcomer == part.owner:
            raise ElsewhereError(f"{part.owner.name} is not before {self._me.name}")
        self._merge(part, copies)
        self._inheriting += 1
        try:
            await self._send_own(own)
        finally:
            self._inheriting -= 1

    # Called by others: copies.

    async def store(
        self,
        sender: Contact,
        owner: Contact,
        seq: int,
        changes: Mapping[Key, StoredValue] | None,
        links: int,
        everything: Everything | None = None,
    ) -> Answer:
        """Takes changes of an owner, and passes them on `links` times.

        The sender has them, and comes before this member. Without changes, it only asks whether this
        one has all up to number `seq`. With everything, this one takes copies of all its parts.
        """
        refused = self._refused(sender, owner)
        if refused is not None:
            return refused
        if everything is not None:
            clock, parts = everything
            if self._heard[0] != sender or self._heard[1] < clock:
                self._heard = (sender, clock)
                self._take_copies(parts)
            part = self._copy_of(owner)
            if part is not None:
                await self._send(owner, part.seq, None, links)
            return JoinAnswer.HOLDS, [self._me, *self.ring.successors]
        part = self._copy_of(owner)
        if part is None or part.seq < seq - (changes is not None):
            return JoinAnswer.BEHIND, []
        if part.seq < seq and changes is not None:
            part.entries.update(changes)
            part.seq = seq
        await self._send(owner, seq, changes, links)
        return JoinAnswer.HOLDS, [self._me, *self.ring.successors]

    # Called by others: values.

    async def read(self, key: Key) -> tuple[Any, int]:
        entry = self._entry(self._owning(key), key)
        return entry.value, entry.version

    async def put(self, key: Key, value: Any) -> None:
        async with self._writing:
            before = self._owning(key).entries.get(key) or StoredValue(None, -1)
            await self._change(key, StoredValue(value, before.version + 1, before.applied))

    async def update(
        self, key: Key, peer: str, number: tuple[int, int], apply: Callable[[Any], Awaitable[Any]]
    ) -> None:
        """Sets what `apply` returns, once for a life and a step of a peer, however often it is called."""
        async with self._writing:
            own = self._owning(key)
            entry = self._entry(own, key)
            if entry.applied.get(peer, (-1, -1)) >= number:
                if self._acked < own.seq:  # it came with a copy that not all have
                    await self._send_own(own)
                return
            value = await apply(entry.value)
            self._check_still(own, self._me)
            await self._change(
                key, StoredValue(value, entry.version + 1, {**entry.applied, peer: number})
            )

    # Called by its own node.

    def begin(self, values: Mapping[Key, Any]) -> None:
        """Makes the ring: it owns all."""
        entries = {key: StoredValue(value) for key, value in values.items()}
        self._enter(OwnedPart(self._me, None, self._seq, entries), ())

    async def join(self, entries: Sequence[Contact]) -> None:
        """Asks once to be let onto the ring; it may be on it afterwards."""
        owner, _ = await self.find(self._me.place, entries)
        await self._call(owner, "admit", self._me, self._seq)

    async def leave(self) -> None:
        """Hands all on to the next member; it is not on the ring afterwards."""
        while self._own is not None:
            async with self._writing:
                with contextlib.suppress(ElsewhereError):  # it was taken over
                    await self._hand_on()
            await self._pause()

    async def look(self) -> None:
        """Looks once at the member before it, and takes over from it if it is gone.

        A ValuesLostError says that there is no copy of its values.
        """
        own = self._own
        if own is None or self._heir is not None:
            return
        before = own.before
        if before is None:
            self.ring.follow(())  # it is alone; hints may name others that have left
        else:
            try:
                process, _ = await self._call(before, "neighbours")
            except GoneError:
                process = None
            is_still = self._own is own and own.before == before and self._heir is None
            if process != before and is_still:
                self._take_over()

    async def mend(self) -> None:
        """Sends the members after it the changes that they lack.

        It may wait until the next `look` takes over: so neither waits for the other.
        """
        if self._own is None or self._writing.locked():
            return  # the holder of the lock finds what is to be repaired
        async with self._writing:
            await self._send_own(self._own)

    async def find(self, place: int, entries: Sequence[Contact]) -> tuple[Contact, list[Contact]]:
        for entry in entries:
            gone: set[str] = set()
            asked: set[str] = set()
            contact = entry
            while contact.name not in asked:
                asked.add(contact.name)
                try:
                    found, following = await self._call(contact, "search", place, gone)
                except (GoneError, ElsewhereError):
                    if contact == entry:
                        break
                    gone.add(contact.name)
                    asked, contact = set(), entry
                    continue
                if following is not None:
                    return found, following
                contact = found
        raise ElsewhereError(f"no peer answers who owns the place {place:x}")

    # Inside.

    def _on_ring(self, owner: Contact | None = None) -> OwnedPart:
        if self._own is None:
            raise ElsewhereError(f"{self._me.name} is not on the ring")
        if self._heir is not None and owner != self._me:
            raise ElsewhereError(f"{self._me.name} leaves the ring")
        return self._own

    def _check_still(self, own: OwnedPart, owner: Contact) -> None:
        if self._on_ring(owner) is not own:
            raise ElsewhereError(f"{self._me.name} was taken over")

    def _owning(self, key: Key) -> OwnedPart:
        own = self._on_ring()
        if not own.has(key_place(key)):
            raise ElsewhereError(f"{key!r} does not belong to {self._me.name}")
        return own

    def _copy_of(self, owner: Contact) -> OwnedPart | None:
        return next((part for part in self._copies if part.owner == owner), None)

    def _entry(self, own: OwnedPart, key: Key) -> StoredValue:
        entry = own.entries.get(key)
        if entry is None:
            raise unknown_key(self._me.name, key, own.entries)
        return entry

    def _enter(self, own: OwnedPart, copies: Sequence[OwnedPart]) -> None:
        self._own, self._acked = own, -1
        self._take_copies(copies)

    def _fall_off(self) -> None:
        if self._own is not None:
            self._seq = self._own.seq + 1
        self._own, self._pending, self._copies = None, {}, []

    def _take_copies(self, parts: Sequence[OwnedPart]) -> None:
        """Keeps copies of these, or newer ones that it has, and drops all other copies."""
        kept: list[OwnedPart] = []
        for part in parts[: self._links]:
            if part.owner.name == self._me.name:
                break
            has = self._copy_of(part.owner)
            kept.append(has if has is not None and has.seq > part.seq else part.copy())
        self._copies = kept

    def _take_over(self) -> None:
        """Takes over the range of the member before it, from the copy."""
        own = self._on_ring()
        if not self._copies or self._copies[0].owner != own.before:
            assert own.before is not None
            raise ValuesLostError(
                f"{self._me.name}: {own.before.name} is gone, and no peer that is left has a copy of its "
                "values; more replicas= survive more crashes at a time"
            )
        self._merge(self._copies[0], self._copies[1:])

    def _merge(self, part: OwnedPart, copies: Sequence[OwnedPart]) -> None:
        own = self._on_ring()
        own.entries.update(part.entries)
        assert part.before is not None
        own.before = None if part.before.name == self._me.name else part.before
        own.seq += 1
        self._take_copies(copies)
        self.ring.drop(part.owner.name)

    def _refused(self, sender: Contact, owner: Contact) -> Answer | None:
        """Returns why the sender has no link to this member; None if it has one."""
        if self._heir is not None:
            return JoinAnswer.LEAVES, [self._heir]
        own = self._on_ring()
        if owner == self._newcomer:
            raise ElsewhereError(f"{self._me.name} is still letting {owner.name} in")
        if own.before != sender:
            return JoinAnswer.APART, [own.before] if own.before is not None else []
        return None

    async def _hand_on(self) -> None:
        """Tries once to hand all on."""
        own = self._on_ring()
        await self._send_own(own)
        if self._inheriting or self._acked < own.seq:
            return
        if own.before is None:  # it is the last one
            self._fall_off()
            return
        self._heir = to = self.ring.successors[0]
        try:
            await self._call(to, "inherit", own.copy(), self._copies)
            self._fall_off()
        except GoneError:
            # Before it was gone, it may have passed on that it has all. The next member knows,
            # unless it is in the same doubt itself.
            self.ring.drop(to.name)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._send(self._me, own.seq, None, 1), _DOUBT_S)
        finally:
            self._heir = None

    async def _change(self, key: Key, entry: StoredValue) -> None:
        own = self._on_ring()
        own.seq += 1
        seq, self._pending = own.seq, {key: entry}
        try:
            await self._send(self._me, seq, self._pending, self._links)
            self._acked = max(self._acked, seq)
        finally:  # a caller that gave up does not know whether others have it already
            own.entries.update(self._pending)
            self._pending = {}

    async def _send_own(self, own: OwnedPart) -> None:
        """Returns once all replicas have all of this member."""
        seq = own.seq
        await self._send(self._me, seq, None, self._links)
        self._acked = max(self._acked, seq)

    async def _send(
        self, owner: Contact, seq: int, changes: Mapping[Key, StoredValue] | None, links: int
    ) -> None:
        """Returns once so many members after this one have the values of an owner."""
        own = self._on_ring(owner)
        needs_all = False
        while links:
            self._check_still(own, owner)
            if not self.ring.successors and own.before is not None:
                self.ring.follow([own.before])  # the way around; it knows the members in between
            for to in list(self.ring.successors):
                if self._goes_around(own, owner):
                    return
                everything = self._everything(owner) if needs_all else None
                try:
                    link, contacts = await self._call(
                        to, "store", self._me, owner, seq, changes, links - 1, everything
                    )
                except GoneError:
                    self.ring.drop(to.name)
                    continue
                except ElsewhereError:
                    continue
                finally:
                    self._check_still(own, owner)
                if link is JoinAnswer.HOLDS:
                    self.ring.follow(contacts)
                    return
                if link is JoinAnswer.BEHIND:
                    needs_all = True
                    break
                if link is JoinAnswer.LEAVES:
                    self.ring.drop(to.name)
                elif not self._is_before(contacts, to):
                    self._fall_off()
                    raise ElsewhereError(f"{self._me.name} was taken over")
                self.ring.follow([*contacts, *self.ring.successors])
                await self._pause()
                break
            else:
                if self._goes_around(own, owner):
                    return
                await self._pause()

    def _goes_around(self, own: OwnedPart, owner: Contact) -> bool:
        """Returns whether the owner itself comes next: there are fewer members than replicas."""
        if owner == self._me:
            return own.before is None
        part = self._copy_of(owner)
        if part is None:
            raise ElsewhereError(f"{self._me.name} has no copy of {owner.name} any more")
        return part.before == self._me

    def _everything(self, owner: Contact) -> Everything:
        self._clock += 1
        own = self._on_ring(owner).copy()
        own.entries.update(self._pending)
        return self._clock, [own, *self._copies][: self._links]

    def _is_before(self, contacts: list[Contact], to: Contact) -> bool:
        """Returns whether a member stands between this one and another one."""
        between = distance(self._me.place, to.place)
        return any(0 < (each.place - self._me.place) % CIRCLE < between for each in contacts)

    async def _pause(self) -> None:
        await asyncio.sleep(_PAUSE_S * self._rng.uniform(0.5, 1.5))
