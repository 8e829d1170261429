"""Divides a machine among the nodes of a program. Pure: nothing is started or set."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from launchers.host.grant import Grant
from launchers.host.machine import Machine
from launchpad_lite.launching import Executable
from launchpad_lite.parts.devices import VISIBLE_DEVICES
from launchpad_lite.planning.plan import first_few

T = TypeVar("T")
D = TypeVar("D")

_GIB = 1 << 30
EPSILON = 1e-9  # tolerance for parts of cores and devices, which are sums of floats
_UNITS = {"cpu": "cores", "ram_gib": "GiB", "gpu": "devices"}


class Allotment(NamedTuple):
    """How a machine is divided."""

    #: What each executable gets, by its name; empty if there are mistakes.
    grants: Mapping[str, Grant] = MappingProxyType({})
    mistakes: Sequence[str] = ()  # why it cannot be done
    notes: Sequence[str] = ()  # requests that are ignored, and why


def allot(executables: Sequence[Executable], machine: Machine) -> Allotment:
    """Divides a machine: each core and each device has one owner, unless parts were asked for."""
    cpu, ram_gib, gpu = (_wishes(executables, name) for name in _UNITS)
    has = f"{machine.name} has"
    mistakes = _missing_interpreters(executables) if machine.is_here else []
    for name, there, who in (
        ("cpu", len(machine.cores), "this process may use" if machine.is_here else has),
        ("ram_gib", machine.ram_bytes / _GIB, has),
        ("gpu", len(machine.gpus), machine.gpus_shown_by),
    ):
        advice = f"leave {name} out, which promises nothing"
        mistakes += too_much(name, executables, there, f"{who} {floored(there)}", advice)
    if mistakes:
        return Allotment(mistakes=mistakes)
    divided = share_devices(gpu, machine.gpus)
    if divided is None:
        parts = ", ".join(f"{wish:g}" for wish in gpu.values() if wish < 1)
        devices = f"{len(machine.gpus)} devices"
        return Allotment(
            mistakes=[f"gpu: the parts {parts} do not fit on {devices}, as each lies on one"]
        )
    gpus, _ = divided
    cores = _divide_cores(cpu, machine.cores)
    notes = []
    if cpu and not machine.binds:
        notes.append("cpu: this system cannot bind processes to cores")
    if ram_gib and not machine.limits:
        notes.append("ram_gib: this system cannot limit the memory of processes")
    grants = {
        each.name: Grant(
            cores.get(each.name, ()),
            int(ram_gib[each.name] * _GIB) if each.name in ram_gib else None,
            # Devices that the user names in the environment take precedence.
            {**_visible(each, gpus), **each.process.env},
            _found(each.process.interpreter, machine),
        )
        for each in executables
    }
    return Allotment(grants, notes=notes)


def _visible(each: Executable, gpus: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    if not gpus and each.resources.gpu is None:
        return {}
    # A node that sees a device may take all its memory, whether it needs it or not.
    return {VISIBLE_DEVICES: ",".join(gpus.get(each.name, ()))}


def _found(interpreter: str | None, machine: Machine) -> str | None:
    # On another machine, the worker looks for it when it starts.
    return interpreter and (_which(interpreter) if machine.is_here else interpreter)


def _missing_interpreters(executables: Sequence[Executable]) -> list[str]:
    return [
        f"{each.name}: there is no interpreter {each.process.interpreter!r}"
        for each in executables
        if each.process.interpreter is not None and _which(each.process.interpreter) is None
    ]


def _which(interpreter: str) -> str | None:
    import shutil

    return shutil.which(interpreter)


def notes_of_threads(executables: Sequence[Executable]) -> list[str]:
    """Returns notes on what nodes ask for but cannot have, because they share one process."""
    notes = []
    if labels := _labels(executables, lambda each: bool(str(each.resources))):
        notes.append(
            f"resources of {labels}: threads of one process share all that it has; nothing is "
            "assigned or limited"
        )
    if labels := _labels(executables, lambda each: bool(str(each.process))):
        notes.append(
            f"environment, flags and interpreter of {labels}: threads have those of this process"
        )
    return notes


def _labels(executables: Sequence[Executable], choose: Callable[[Executable], bool]) -> str:
    return ", ".join(dict.fromkeys(each.label for each in executables if choose(each)))


def _wishes(executables: Sequence[Executable], name: str) -> dict[str, float]:
    found = ((each.name, getattr(each.resources, name)) for each in executables)
    return {executable: float(wish) for executable, wish in found if wish}


def too_much(
    what: str, executables: Sequence[Executable], there: float, who: str, advice: str
) -> Iterator[str]:
    """Yields the totals of a resource if more is asked for than is there; `who` has how much of it."""
    wishes = _wishes(executables, what)
    if (total := sum(wishes.values())) > there + EPSILON:
        asked = Counter(
            (each.label, wishes[each.name]) for each in executables if each.name in wishes
        )
        terms = [f"{label} {count} x {wish:g}" for (label, wish), count in asked.items()]
        yield (
            f"{what}: {' + '.join(first_few(terms))} = {total:g} {_UNITS[what]} are asked for, {who}; "
            f"ask for less, start fewer nodes, or {advice}"
        )


def floored(amount: float) -> str:
    """Returns an amount as text: rounded up, it could look large enough for a request that does not fit."""
    return f"{math.floor(amount * 100 + EPSILON) / 100:g}"


def _divide_cores(wishes: Mapping[str, float], cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Gives each whole core to one node; fractions that are left share cores, and may span several."""
    room = dict.fromkeys(cores, 1.0)
    given: dict[str, list[int]] = {name: [] for name in wishes}
    rest: dict[str, float] = {}
    for name, wish in wishes.items():
        whole = [core for core, left in room.items() if left == 1.0][: math.floor(wish + EPSILON)]
        for core in whole:
            room[core] = 0.0
        given[name] += whole
        if (left := wish - len(whole)) > EPSILON:
            rest[name] = left
    for name, wish in sorted(rest.items(), key=lambda item: -item[1]):
        # The fullest core that has room for all of it, else the emptiest ones.
        fitting = [core for core in cores if room[core] >= wish - EPSILON]
        ordered = sorted(cores, key=lambda core: -room[core])
        if fitting:
            ordered = [min(fitting, key=room.__getitem__)]
        for core in ordered:
            part = min(room[core], wish)
            if part > EPSILON:
                room[core] -= part
                wish -= part
                given[name].append(core)
    return {name: tuple(sorted(taken)) for name, taken in given.items()}


def share_devices(
    wishes: Mapping[T, float], devices: Sequence[D]
) -> tuple[Mapping[T, tuple[D, ...]], Mapping[D, float]] | None:
    """Gives each whole device to one owner; requests below 1 share devices.

    Returns what each owner gets, and how much is free of each device that is not taken whole. None:
    there are too few devices, or no device has room for a part.
    """
    free = list(devices)
    given: dict[T, tuple[D, ...]] = {}
    for name, wish in wishes.items():
        if wish >= 1:
            count = int(wish)
            if count > len(free):
                return None
            given[name], free = tuple(free[:count]), free[count:]
    room = dict.fromkeys(free, 1.0)
    parts = {name: wish for name, wish in wishes.items() if wish < 1}
    for name, wish in sorted(parts.items(), key=lambda item: -item[1]):
        device = next((each for each, left in room.items() if left >= wish - EPSILON), None)
        if device is None:
            return None
        room[device] -= wish
        given[name] = (device,)
    return given, room
