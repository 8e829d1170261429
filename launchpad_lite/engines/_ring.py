"""A ring of peers, after Chord (Stoica et al., SIGCOMM 2001). Pure: sends nothing.

Peers and keys have places on a circle of 2**64. A key belongs to the first peer at its place or
after it. Each peer has the names of all, so it asks first who has a key if all are there, and those
after that. Who is there, each knows of the peers next to it, which pass the search on.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

CIRCLE = 1 << 64

#: How many peers after it each peer knows. If there are no more, it can draw samples by itself.
SUCCESSORS = 24


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
