"""Chooses the host of each executable. Pure: nothing is asked of a host or started there.

How a host is divided among those that run on it is `_allotment`'s.
"""

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchpad_lite._plan import first_few
from launchpad_lite.launching import Executable

#: Host names by group (`"actor"`) or by single node (`"actor[3]"`), which goes before its group.
#: Several names are a set of hosts to choose from.
PlacementChoice = Mapping[str, str | Sequence[str]] | None

#: Scarce ones first.
_RESOURCES = ("gpu", "ram_gib", "cpu")
_UNITS = {"gpu": "devices", "ram_gib": "GiB", "cpu": "cores"}
#: Parts of cores and devices are sums of floats.
_EPSILON = 1e-9


class Strategy(enum.Enum):
    """How executables are spread over hosts that have room for them.

    Attributes:
        SPREAD: Each goes to the host with most free of the scarcest resource that it asks for
            (accelerators, then memory, then cores), of these to the one that runs fewest.
        PACK: Hosts are filled one after the other.
    """

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True)
class Room:
    """What a host has. None: unknown, and does not limit.

    Attributes:
        name: Of the host.
        cpu: Number of cores.
        ram_gib: Main memory in GiB.
        gpu: Number of accelerators; a part of one is not used.
    """

    name: str
    cpu: float | None = None
    ram_gib: float | None = None
    gpu: float | None = None


@dataclass(frozen=True)
class Placement:
    """Which executable runs on which host.

    Attributes:
        hosts: Host by name of the executable; empty if there are mistakes.
        mistakes: Why it cannot be done.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    mistakes: Sequence[str] = ()


def place(
    executables: Sequence[Executable],
    rooms: Sequence[Room],
    choice: PlacementChoice,
    strategy: Strategy,
) -> Placement:
    """Places executables on hosts; the same input gives the same placement.

    Those with fewest hosts to choose from are placed first, of these the biggest. If some do not fit
    when they are spread, they are packed. Nothing else is tried, so a placement may be missed that
    leaves hardly any room.

    Args:
        executables: What is to be placed. Those with the same `together` share a host.
        rooms: The hosts, in the order in which they are preferred.
        choice: Where users want them; None, or not named: anywhere.
        strategy: How they are spread.

    Returns:
        The placement, or all mistakes that could be found, with their arithmetic.
    """
    if not rooms:
        return Placement(mistakes=["there are no hosts to place nodes on"])
    mistakes, allowed = _read_choice(executables, rooms, choice)
    bundles = _bundles(executables, allowed)
    mistakes += [_no_common_host(each, allowed, rooms) for each in bundles if not each.allowed]
    if not mistakes:
        mistakes = [*_too_big(bundles, rooms), *_too_much(executables, rooms)]
    if not mistakes:
        mistakes = _too_many(bundles, rooms)
    if mistakes:
        return Placement(mistakes=mistakes)

    bundles.sort(key=_Bundle.urgency)
    for how in dict.fromkeys([strategy, Strategy.PACK]):
        loads = [_Load()] * len(rooms)
        places = _fill(bundles, rooms, loads, how)
        homeless = [each for each in bundles if each not in places]
        if not homeless:
            break
    else:
        return Placement(mistakes=_leftovers(homeless, rooms, loads))
    hosts = {name: rooms[host].name for bundle, host in places.items() for name in bundle.names}
    return Placement({each.name: hosts[each.name] for each in executables})


@dataclass(frozen=True)
class _Load:
    """What executables ask for, together.

    Attributes:
        cpu: Cores.
        ram_gib: Memory in GiB.
        gpus: What each asks for of accelerators, if anything; the most first.
        count: Number of executables.
    """

    cpu: float = 0.0
    ram_gib: float = 0.0
    gpus: tuple[float, ...] = ()
    count: int = 0

    @classmethod
    def of(cls, each: Executable) -> "_Load":
        wish = each.resources
        gpus = (float(wish.gpu),) if wish.gpu else ()
        return cls(float(wish.cpu or 0), float(wish.ram_gib or 0), gpus, 1)

    def plus(self, other: "_Load") -> "_Load":
        return _Load(
            self.cpu + other.cpu,
            self.ram_gib + other.ram_gib,
            tuple(sorted(self.gpus + other.gpus, reverse=True)),
            self.count + other.count,
        )

    def amount(self, resource: str) -> float:
        if resource == "gpu":
            return sum(self.gpus)
        return self.cpu if resource == "cpu" else self.ram_gib

    def __str__(self) -> str:
        wishes = ((name, self.amount(name)) for name in ("cpu", "ram_gib", "gpu"))
        return ", ".join(f"{name}={value:g}" for name, value in wishes if value)


@dataclass(frozen=True)
class _Bundle:
    """Executables that share a host, whatever it is; most often one."""

    names: tuple[str, ...]
    wish: _Load
    allowed: tuple[int, ...]

    def urgency(self) -> tuple[float, ...]:
        """Sorts those first that have least choice, and of these the biggest."""
        wishes = (-self.wish.amount(resource) for resource in _RESOURCES)
        return (len(self.allowed), *wishes, -len(self.names))

    def __str__(self) -> str:
        first, *others = self.names
        return f"{first} (with {_listed(others)})" if others else first


# What users chose


def _read_choice(
    executables: Sequence[Executable], rooms: Sequence[Room], choice: Any
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Returns mistakes, and by name of each executable the indices of hosts it may run on.

    Args:
        executables: What is to be placed.
        rooms: The hosts.
        choice: What the user wrote; users are not all checked by mypy.
    """
    everywhere = tuple(range(len(rooms)))
    mistakes: list[str] = []
    if choice is None:
        choice = {}
    elif not isinstance(choice, Mapping):
        mistakes.append(f"placement is a dict of hosts by group or node, not {choice!r}")
        choice = {}
    hosts = [room.name for room in rooms]
    groups = dict.fromkeys(each.label for each in executables)
    known = {*groups, *(each.name for each in executables)}
    chosen: dict[str, tuple[int, ...]] = {}
    for key, value in choice.items():
        kind = "node" if isinstance(key, str) and key.endswith("]") else "group"
        if key not in known:
            mistakes.append(
                f"placement of an unknown {kind} {key!r}; the groups are: {', '.join(groups)}"
            )
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, Sequence) or not names:
            mistakes.append(
                f"placement of {kind} {key!r}: expected the name of a host, or several, got "
                f"{value!r}"
            )
            continue
        if unknown := [name for name in names if name not in hosts]:
            mistakes.append(
                f"placement of {kind} {key!r}: there is no host "
                f"{', '.join(map(repr, unknown))}; the hosts are: {', '.join(hosts)}"
            )
        # A host that is not known is reported once, not again as a node without hosts.
        chosen[key] = tuple(i for i, host in enumerate(hosts) if host in names) or everywhere
    return mistakes, {
        each.name: chosen.get(each.name, chosen.get(each.label, everywhere)) for each in executables
    }


def _bundles(
    executables: Sequence[Executable], allowed: Mapping[str, tuple[int, ...]]
) -> list[_Bundle]:
    bundles: dict[tuple[bool, str | None], _Bundle] = {}
    for each in executables:
        alone = each.together is None
        key = (alone, each.name if alone else each.together)
        bundle = bundles.get(key, _Bundle((), _Load(), allowed[each.name]))
        bundles[key] = _Bundle(
            (*bundle.names, each.name),
            bundle.wish.plus(_Load.of(each)),
            tuple(host for host in bundle.allowed if host in allowed[each.name]),
        )
    return list(bundles.values())


def _no_common_host(
    bundle: _Bundle, allowed: Mapping[str, tuple[int, ...]], rooms: Sequence[Room]
) -> str:
    chosen = "; ".join(
        f"{name} may run on {_listed([rooms[host].name for host in allowed[name]])}"
        for name in bundle.names
        if len(allowed[name]) < len(rooms)
    )
    return (
        f"{_listed(bundle.names)} run together, but the placement leaves them no common host: "
        f"{chosen}; name the same host for all of them"
    )


# Room


def _devices_left(room: Room, load: _Load) -> list[float] | None:
    """Returns what is free of each device that is not taken whole; None if it is too much.

    Divides as `_allotment` does, so that what is placed on a host can be divided there.
    """
    free = int((room.gpu or 0) + _EPSILON) - sum(int(wish) for wish in load.gpus if wish >= 1)
    if free < 0:
        return None
    left = [1.0] * free
    for part in load.gpus:
        if part >= 1:
            continue
        device = next((i for i in range(free) if left[i] >= part - _EPSILON), None)
        if device is None:
            return None
        left[device] -= part
    return left


def _left(room: Room, load: _Load, resource: str) -> float | None:
    """Returns how much of a resource is left, below 0 if it is too much; None if not known."""
    there: float | None = getattr(room, resource)
    if there is None:
        return None
    if resource == "gpu":
        devices = _devices_left(room, load)
        return sum(devices) if devices is not None else -1.0
    return there - load.amount(resource)


def _lacks(room: Room, load: _Load) -> list[str]:
    """Returns the resources of which a host has less than is asked for."""
    # Who asks for none of it lacks none of it, also where it has gone already.
    asked = (resource for resource in _RESOURCES if load.amount(resource))
    return [
        resource
        for resource in asked
        if (left := _left(room, load, resource)) is not None and left < -_EPSILON
    ]


# Greedy


def _fill(
    bundles: Iterable[_Bundle], rooms: Sequence[Room], loads: list[_Load], strategy: Strategy
) -> dict[_Bundle, int]:
    """Places one after the other, and adds to the loads; who finds no room is left out."""
    places: dict[_Bundle, int] = {}
    for bundle in bundles:
        fitting = [
            host
            for host in bundle.allowed
            if not _lacks(rooms[host], loads[host].plus(bundle.wish))
        ]
        if not fitting:
            continue
        host = fitting[0] if strategy is Strategy.PACK else _freest(bundle, fitting, rooms, loads)
        loads[host] = loads[host].plus(bundle.wish)
        places[bundle] = host
    return places


def _freest(
    bundle: _Bundle, fitting: Sequence[int], rooms: Sequence[Room], loads: Sequence[_Load]
) -> int:
    scarcest = next((name for name in _RESOURCES if bundle.wish.amount(name)), None)
    if scarcest is not None:
        left = {host: _left(rooms[host], loads[host], scarcest) for host in fitting}
        known = {host: amount for host, amount in left.items() if amount is not None}
        if len(known) == len(left):  # else they cannot be compared
            most = max(known.values())
            fitting = [host for host, amount in known.items() if amount >= most - _EPSILON]
    return min(fitting, key=lambda host: (loads[host].count, host))


# Mistakes


def _total(rooms: Sequence[Room], resource: str) -> float | None:
    """Returns how much there is on all hosts; None if that is not known."""
    there: list[float | None] = [getattr(room, resource) for room in rooms]
    known = [amount for amount in there if amount is not None]
    return sum(known) if len(known) == len(there) else None


def _too_big(bundles: Sequence[_Bundle], rooms: Sequence[Room]) -> list[str]:
    """Names those for which even an empty host has no room."""
    empty = [_Load()] * len(rooms)
    return [
        f"{_wants(alike)}; {_rooms_left(alike[0], rooms, empty)}; ask for less, or choose a host "
        "that has more"
        for alike in _replicas(bundles)
        if all(_lacks(rooms[host], alike[0].wish) for host in alike[0].allowed)
    ]


def _too_many(bundles: Sequence[_Bundle], rooms: Sequence[Room]) -> list[str]:
    """Names replicas of which empty hosts have no room for all, because none is split."""
    mistakes = []
    for alike in _replicas(bundles):
        first, count = alike[0], len(alike)
        capacities: dict[str, int] = {}
        for host in first.allowed:
            missing = count - sum(capacities.values())
            capacities[rooms[host].name] = _capacity(rooms[host], first.wish, missing)
        if (found := sum(capacities.values())) < count:
            each_takes = _listed([f"{name} {capacity}" for name, capacity in capacities.items()])
            mistakes.append(
                f"{_wants(alike)}; there is room for {found} of these {count} ({each_takes}); ask "
                "for less, start fewer nodes, or add hosts"
            )
    return mistakes


def _capacity(room: Room, wish: _Load, most: int) -> int:
    """Returns how many that ask for the same an empty host has room for, if not more than asked."""
    load = wish
    for count in range(most):
        if _lacks(room, load):
            return count
        load = load.plus(wish)
    return most


def _replicas(bundles: Iterable[_Bundle]) -> Sequence[Sequence[_Bundle]]:
    """Returns those together that ask for the same of the same hosts."""
    found: dict[tuple[object, ...], list[_Bundle]] = {}
    for each in bundles:
        found.setdefault((each.wish, each.allowed), []).append(each)
    return list(found.values())


def _too_much(executables: Sequence[Executable], rooms: Sequence[Room]) -> list[str]:
    """Returns the arithmetic of what is asked for, if it is more than all hosts have."""
    mistakes = []
    for resource in reversed(_RESOURCES):
        wishes = {each.name: _Load.of(each).amount(resource) for each in executables}
        asked, there = sum(wishes.values()), _total(rooms, resource)
        if there is None or asked <= there + _EPSILON:
            continue
        groups = Counter(
            (each.label, wishes[each.name]) for each in executables if wishes[each.name]
        )
        terms = [f"{label} {count} x {wish:g}" for (label, wish), count in groups.items()]
        each_has = _listed([f"{room.name} {_floored(getattr(room, resource))}" for room in rooms])
        mistakes.append(
            f"{resource}: {' + '.join(first_few(terms))} = {asked:g} {_UNITS[resource]} are asked for, the hosts have "
            f"{_floored(there)} ({each_has}); ask for less, start fewer nodes, or add hosts"
        )
    return mistakes


def _leftovers(
    homeless: Sequence[_Bundle], rooms: Sequence[Room], loads: Sequence[_Load]
) -> list[str]:
    """Names those that found no room, with what the others left."""
    return [
        f"{_wants(alike)}; {_rooms_left(alike[0], rooms, loads)}; ask for less, choose the hosts by "
        "placement, or add some"
        for alike in _replicas(homeless)
    ]


def _wants(alike: Sequence[_Bundle]) -> str:
    """Returns what those want that want the same."""
    verb = "wants" if len(alike) == 1 else "each want"
    return f"{_listed([str(each) for each in alike])} {verb} {alike[0].wish}"


def _rooms_left(bundle: _Bundle, rooms: Sequence[Room], loads: Sequence[_Load]) -> str:
    """Returns for each host what of it is too little."""
    told = []
    for host in bundle.allowed:
        room, load = rooms[host], loads[host]
        lacking = _lacks(room, load.plus(bundle.wish))
        amounts = ", ".join(
            f"{name}={_left_text(room, load, name)} left of {_floored(getattr(room, name))}"
            for name in reversed(lacking)
        )
        told.append(f"{room.name} has {amounts}")
    return _listed(told)


def _left_text(room: Room, load: _Load, resource: str) -> str:
    if resource == "gpu" and (devices := _devices_left(room, load)) is not None:
        # Two halves of different devices are no whole one.
        whole = devices.count(1.0)
        parts = Counter(_floored(left) for left in devices if _EPSILON < left < 1.0)
        terms = [part if count == 1 else f"{count} x {part}" for part, count in parts.items()]
        return " + ".join([str(whole), *terms] if whole or not terms else terms)
    return _floored(max(_left(room, load, resource) or 0.0, 0.0))


def _floored(amount: float) -> str:
    # Rounded up, it would seem enough for what does not fit.
    return f"{math.floor(amount * 100 + _EPSILON) / 100:g}"


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(first_few(texts))
