"""Divides a machine among the nodes of a program. Pure: nothing is started or set."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from launchers.host.grant import Grant
from launchers.host.machine import Machine
from launchpad_lite._devices import VISIBLE_DEVICES
from launchpad_lite.launching import Executable

_GIB = 1 << 30
#: Parts of cores and devices are sums of floats.
_EPSILON = 1e-9


class Allotment(NamedTuple):
    """How a machine is divided.

    Attributes:
        grants: What each executable gets, by its name; empty if there are mistakes.
        mistakes: Why it cannot be done.
        notes: What is not honoured.
    """

    grants: Mapping[str, Grant] = MappingProxyType({})
    mistakes: Sequence[str] = ()
    notes: Sequence[str] = ()


def allot(executables: Sequence[Executable], machine: Machine) -> Allotment:
    """Divides a machine: each core and each device has one owner, unless parts were asked for."""
    cpu, ram_gib, gpu = (_wishes(executables, name) for name in ("cpu", "ram_gib", "gpu"))
    ram_there = machine.ram_bytes / _GIB
    mistakes = [
        *(_missing_interpreters(executables) if machine.is_here else ()),
        *_too_much("cpu", "cores", executables, cpu, len(machine.cores), _who(machine)),
        *_too_much("ram", "GiB", executables, ram_gib, ram_there, f"{machine.name} has"),
        *_too_much("gpu", "devices", executables, gpu, len(machine.gpus), machine.gpus_shown_by),
    ]
    if mistakes:
        return Allotment(mistakes=mistakes)
    try:
        gpus = _divide_gpus(gpu, machine.gpus)
    except _DoesNotFitError as error:
        return Allotment(mistakes=[str(error)])
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
            # Who names devices in the environment has asked for these.
            {**_visible(each, gpus), **each.process.env},
            _found(each.process.interpreter, machine),
        )
        for each in executables
    }
    return Allotment(grants, notes=notes)


def _visible(each: Executable, gpus: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """Returns what says which devices an executable sees."""
    if not gpus and each.resources.gpu is None:
        return {}
    # A node that sees a device may take all its memory, whether it needs it or not.
    return {VISIBLE_DEVICES: ",".join(gpus.get(each.name, ()))}


def _found(interpreter: str | None, machine: Machine) -> str | None:
    # On another machine it is looked for there, when the worker starts.
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
    """Returns what nodes asked for that share one process and so cannot have it."""
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
    """Returns what executables want of one resource; those that want none are left out."""
    found = ((each.name, getattr(each.resources, name)) for each in executables)
    return {executable: float(wish) for executable, wish in found if wish}


def _too_much(
    what: str,
    unit: str,
    executables: Sequence[Executable],
    wishes: Mapping[str, float],
    there: float,
    who: str,
) -> list[str]:
    """Returns the arithmetic of what is asked for, if it is more than there is."""
    total = sum(wishes.values())
    if total <= there + _EPSILON:
        return []
    groups = Counter((each.label, wishes[each.name]) for each in executables if each.name in wishes)
    terms = " + ".join(f"{label} {count} x {wish:g}" for (label, wish), count in groups.items())
    arithmetic = f"{what}: {terms} = {total:g} {unit} are asked for, {who} {_floored(there)}"
    return [
        f"{arithmetic}; ask for less, start fewer nodes, or leave {what} out, which promises nothing"
    ]


def _floored(number: float) -> str:
    return f"{math.floor(number * 10) / 10:g}"


class _DoesNotFitError(Exception):
    """The parts are small enough together, but no device has room for one of them."""


def _divide_cores(wishes: Mapping[str, float], cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Gives whole cores to one node each; what is left of wishes shares cores, and may span some."""
    room = dict.fromkeys(cores, 1.0)
    given: dict[str, list[int]] = {name: [] for name in wishes}
    rest: dict[str, float] = {}
    for name, wish in wishes.items():
        whole = [core for core, left in room.items() if left == 1.0][: math.floor(wish + _EPSILON)]
        for core in whole:
            room[core] = 0.0
        given[name] += whole
        if (left := wish - len(whole)) > _EPSILON:
            rest[name] = left
    for name, wish in sorted(rest.items(), key=lambda item: -item[1]):
        # The fullest core that has room for all of it, else the emptiest ones.
        fitting = [core for core in cores if room[core] >= wish - _EPSILON]
        ordered = (
            [min(fitting, key=room.__getitem__)]
            if fitting
            else sorted(cores, key=lambda core: -room[core])
        )
        for core in ordered:
            part = min(room[core], wish)
            if part > _EPSILON:
                room[core] -= part
                wish -= part
                given[name].append(core)
    return {name: tuple(sorted(taken)) for name, taken in given.items()}


def _divide_gpus(wishes: Mapping[str, float], gpus: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Gives whole devices to one node each; parts, below 1, share devices."""
    free = list(gpus)
    given: dict[str, tuple[str, ...]] = {}
    for name, wish in wishes.items():
        if wish >= 1:
            count = int(wish)
            given[name], free = tuple(free[:count]), free[count:]
    room = dict.fromkeys(free, 1.0)
    parts = {name: wish for name, wish in wishes.items() if wish < 1}
    for name, wish in sorted(parts.items(), key=lambda item: -item[1]):
        device = next((gpu for gpu, left in room.items() if left >= wish - _EPSILON), None)
        if device is None:
            raise _DoesNotFitError(
                f"gpu: the parts {', '.join(f'{part:g}' for part in parts.values())} do not fit on "
                f"{len(free)} devices, because each lies on one device"
            )
        room[device] -= wish
        given[name] = (device,)
    return given


def _who(machine: Machine) -> str:
    return "this process may use" if machine.is_here else f"{machine.name} has"
