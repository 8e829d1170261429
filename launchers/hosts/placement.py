"""Chooses the host of each executable. Pure: nothing is asked of a host or started there."""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launchers.hosts.host_list import HostSpec
from launchers.supervision.allotment import EPSILON, floored, share_devices, too_much
from launchpad_lite.launching import Executable
from launchpad_lite.planning.plan import first_few

#: Host names by group (`"actor"`) or by single node (`"actor[3]"`), which takes precedence over its group.
#: Several names are a set of hosts to choose from.
PlacementChoice = Mapping[str, str | Sequence[str]] | None

#: The scarcest first.
_RESOURCES = ("gpu", "ram_gib", "cpu")


class Strategy(enum.Enum):
    """How executables are spread over hosts that have room for them.

    SPREAD: each goes to the host with the most free of the scarcest resource that it asks for
    (accelerators, then memory, then cores); among equal hosts, to the one that runs the fewest.
    PACK: hosts are filled one after the other.
    """

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True)
class Placement:
    """Host of each executable, by name; none if there are mistakes."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    mistakes: Sequence[str] = ()


def place(
    executables: Sequence[Executable],
    rooms: Sequence[HostSpec],
    choice: PlacementChoice,
    strategy: Strategy,
) -> Placement:
    """Places executables on hosts; the same input gives the same placement.

    What is None of a host is not known, and no limit. Executables with the fewest allowed hosts are
    placed first, and among these the biggest. If some do not fit when all are spread, all are packed.
    Nothing else is tried, so it may miss a placement that leaves hardly any room.
    """
    if not rooms:
        return Placement(mistakes=["there are no hosts to place nodes on"])
    if mistakes := mistakes_in_choice(executables, choice, [room.name for room in rooms]):
        return Placement(mistakes=mistakes)
    bundles = _bundles(executables, rooms, choice)
    for how in dict.fromkeys([strategy, Strategy.PACK]):
        hosts = {room.name: _FilledHost(room) for room in rooms}
        places = _fill(bundles, hosts, how)
        homeless = [each for each in bundles if each not in places]
        if not homeless:
            found = {name: host for each, host in places.items() for name in each.names}
            return Placement({each.name: found[each.name] for each in executables})
    # For one executable, the total would only repeat its request.
    arithmetic = _too_much(executables, rooms) if len(executables) > 1 else ()
    return Placement(mistakes=[*arithmetic, *_leftovers(homeless, hosts)])


class _Demand(NamedTuple):
    """What executables ask for together; `gpus` has the request of each, the most first."""

    cpu: float = 0.0
    ram_gib: float = 0.0
    gpus: tuple[float, ...] = ()

    @classmethod
    def of(cls, executables: Iterable[Executable]) -> "_Demand":
        wishes = [each.resources for each in executables]
        return cls(
            sum(float(wish.cpu or 0) for wish in wishes),
            sum(float(wish.ram_gib or 0) for wish in wishes),
            tuple(sorted((float(wish.gpu) for wish in wishes if wish.gpu), reverse=True)),
        )

    def plus(self, other: "_Demand") -> "_Demand":
        gpus = tuple(sorted(self.gpus + other.gpus, reverse=True))
        return _Demand(self.cpu + other.cpu, self.ram_gib + other.ram_gib, gpus)

    def amount(self, resource: str) -> float:
        return sum(self.gpus) if resource == "gpu" else getattr(self, resource)

    def __str__(self) -> str:
        wishes = ((name, self.amount(name)) for name in ("cpu", "ram_gib", "gpu"))
        return ", ".join(f"{name}={value:g}" for name, value in wishes if value)


@dataclass(frozen=True)
class _Bundle:
    """Executables that must share a host; usually one."""

    names: tuple[str, ...]
    wish: _Demand
    allowed: tuple[str, ...]

    def urgency(self) -> tuple[float, ...]:
        """Returns a sort key: the fewest allowed hosts first, then the biggest."""
        wishes = (-self.wish.amount(resource) for resource in _RESOURCES)
        return (len(self.allowed), *wishes, -len(self.names))

    def __str__(self) -> str:
        first, *others = self.names
        return f"{first} (with {_listed(others)})" if others else first


# What users chose


def mistakes_in_choice(
    executables: Sequence[Executable], choice: Any, hosts: Sequence[str] | None = None
) -> list[str]:
    """Returns what is wrong with a user's `placement`; `hosts` is None if not known yet."""
    if choice is None:
        return []
    if not isinstance(choice, Mapping):
        return [f"placement is a dict of hosts by group or node, not {choice!r}"]
    groups = dict.fromkeys(each.label for each in executables)
    known = {*groups, *(each.name for each in executables)}
    mistakes: list[str] = []
    for key, value in choice.items():
        what = f"{'node' if isinstance(key, str) and key.endswith(']') else 'group'} {key!r}"
        if key not in known:
            mistakes.append(f"placement of an unknown {what}; the groups are: {', '.join(groups)}")
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, Sequence) or not names:
            expected = "expected the name of a host, or several"
            mistakes.append(f"placement of {what}: {expected}, got {value!r}")
        elif unknown := [repr(name) for name in names if hosts is not None and name not in hosts]:
            known_hosts = f"the hosts are: {', '.join(hosts or ())}"
            mistakes.append(
                f"placement of {what}: there is no host {', '.join(unknown)}; {known_hosts}"
            )
    return mistakes


def hosts_chosen(choice: PlacementChoice, each: Executable) -> Sequence[str] | None:
    """Returns on which hosts an executable may run; None: on any."""
    chosen = (choice or {}).get(each.name, (choice or {}).get(each.label))
    return [chosen] if isinstance(chosen, str) else chosen


def together(executables: Iterable[Executable]) -> list[tuple[Executable, ...]]:
    """Returns groups of executables that must share a host; most groups have one member."""
    units: dict[tuple[str | None, str], list[Executable]] = {}
    for each in executables:
        alone = each.name if each.together is None else ""
        units.setdefault((each.together, alone), []).append(each)
    return [tuple(unit) for unit in units.values()]


def _bundles(
    executables: Sequence[Executable], rooms: Sequence[HostSpec], choice: PlacementChoice
) -> list[_Bundle]:
    bundles = []
    for unit in together(executables):
        chosen = [hosts for each in unit if (hosts := hosts_chosen(choice, each)) is not None]
        allowed = (room.name for room in rooms if all(room.name in hosts for hosts in chosen))
        names = tuple(each.name for each in unit)
        bundles.append(_Bundle(names, _Demand.of(unit), tuple(allowed)))
    return bundles


class _FilledHost:
    def __init__(self, room: HostSpec) -> None:
        self.room = room
        self.load = _Demand()
        self.count = 0

    def take(self, bundle: _Bundle) -> None:
        self.load = self.load.plus(bundle.wish)
        self.count += len(bundle.names)

    def left(self, resource: str, load: _Demand | None = None) -> float | None:
        """Returns how much of a resource a load leaves: below 0 if it is too much, None if unknown."""
        load = self.load if load is None else load
        there: float | None = getattr(self.room, resource)
        if there is None:
            return None
        if resource == "gpu":
            devices = self._devices_left(load)
            return sum(devices) if devices is not None else -1.0
        return there - load.amount(resource)

    def _devices_left(self, load: _Demand) -> list[float] | None:
        """Returns what is free of each device that is not taken whole; None if it is too much."""
        # This divides devices exactly as the host will.
        devices = range(int((self.room.gpu or 0) + EPSILON))
        divided = share_devices(dict(enumerate(load.gpus)), devices)
        return None if divided is None else list(divided[1].values())

    def lacks(self, wish: _Demand) -> list[str]:
        load = self.load.plus(wish)
        # An executable that asks for none of a resource fits even where that resource is used up.
        asked = [resource for resource in _RESOURCES if wish.amount(resource)]
        left = {resource: self.left(resource, load) for resource in asked}
        return [name for name, rest in left.items() if rest is not None and rest < -EPSILON]

    def describe_left(self, resource: str) -> str:
        if resource == "gpu" and (devices := self._devices_left(self.load)) is not None:
            # Halves of two devices do not make a whole one.
            whole = devices.count(1.0)
            parts = Counter(floored(left) for left in devices if EPSILON < left < 1.0)
            terms = [part if count == 1 else f"{count} x {part}" for part, count in parts.items()]
            return " + ".join([str(whole), *terms] if whole or not terms else terms)
        return floored(max(self.left(resource) or 0.0, 0.0))


def _fill(
    bundles: Iterable[_Bundle], hosts: Mapping[str, _FilledHost], strategy: Strategy
) -> dict[_Bundle, str]:
    """Places bundles one after the other; leaves out those that fit nowhere."""
    places: dict[_Bundle, str] = {}
    for bundle in sorted(bundles, key=_Bundle.urgency):
        fitting = [name for name in bundle.allowed if not hosts[name].lacks(bundle.wish)]
        if not fitting:
            continue
        if strategy is Strategy.SPREAD:
            fitting = _freest(bundle, {name: hosts[name] for name in fitting})
        places[bundle] = fitting[0]
        hosts[fitting[0]].take(bundle)
    return places


def _freest(bundle: _Bundle, fitting: Mapping[str, _FilledHost]) -> list[str]:
    names = list(fitting)
    scarcest = next((name for name in _RESOURCES if bundle.wish.amount(name)), None)
    if scarcest is not None:
        left = {name: host.left(scarcest) for name, host in fitting.items()}
        known = {name: amount for name, amount in left.items() if amount is not None}
        if len(known) == len(left):  # else they cannot be compared
            most = max(known.values())
            names = [name for name, amount in known.items() if amount >= most - EPSILON]
    return sorted(names, key=lambda name: fitting[name].count)


def _too_much(executables: Sequence[Executable], rooms: Sequence[HostSpec]) -> Iterator[str]:
    """Yields the totals of each resource of which more is asked for than all hosts have."""
    for resource in reversed(_RESOURCES):
        there = {room.name: getattr(room, resource) for room in rooms}
        if None not in there.values():
            total = sum(there.values())
            each_has = _listed([f"{name} {floored(amount)}" for name, amount in there.items()])
            who = f"the hosts have {floored(total)} ({each_has})"
            yield from too_much(resource, executables, total, who, "add hosts")


def _leftovers(homeless: Sequence[_Bundle], hosts: Mapping[str, _FilledHost]) -> Iterator[str]:
    """Yields messages on bundles that fit nowhere; equal requests to the same hosts share one message."""
    found: dict[tuple[object, ...], list[_Bundle]] = {}
    for each in homeless:
        found.setdefault((each.wish, each.allowed), []).append(each)
    for alike in found.values():
        names, first = _listed([str(each) for each in alike]), alike[0]
        if not first.allowed:
            yield (
                f"{names} run together, but the placement leaves them no common host; name the same "
                "for all of them"
            )
            continue
        verb = "wants" if len(alike) == 1 else "each want"
        left = []
        for name in first.allowed:
            host = hosts[name]
            amounts = [
                f"{resource}={host.describe_left(resource)} left of "
                f"{floored(getattr(host.room, resource))}"
                for resource in reversed(host.lacks(first.wish))
            ]
            left.append(f"{name} has {', '.join(amounts)}")
        yield (
            f"{names} {verb} {first.wish}; {_listed(left)}; ask for less, choose other hosts by "
            "placement, or add some"
        )


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(first_few(texts))
