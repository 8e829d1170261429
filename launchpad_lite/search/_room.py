"""Decides whether a machine has room for one more task. Pure."""

from collections.abc import Sequence

from launchpad_lite.search._messages import Limits, WorkerMachine

_ROUNDING = 1e-9
#: The resources that a task needs of its machine, and its devices there.
Use = tuple[Limits, tuple[str, ...]]


def could_run(machine: WorkerMachine | None, needs: Limits) -> bool:
    """Returns whether a machine that does nothing else has room for a task."""
    return needs == Limits() or (machine is not None and room(machine, needs, ()) is not None)


def room(machine: WorkerMachine, needs: Limits, used: Sequence[Use]) -> tuple[str, ...] | None:
    """Returns the devices that a task gets on a machine; None: there is no room for it."""
    cpus = machine.cpus - sum(each.cpus for each, _ in used)
    memory_bytes = machine.memory_bytes - sum(each.memory_bytes for each, _ in used)
    # The rest may be negative where some is reserved for another task; tasks that need none may
    # run.
    if needs.cpus > max(0.0, cpus) + _ROUNDING or needs.memory_bytes > max(0, memory_bytes):
        return None
    free = _free(machine, used)
    fit = [each for each in free if free[each] >= min(1.0, needs.gpus) - _ROUNDING]
    # First the devices that the worker's process sees; else the fullest, so that whole ones stay
    # free.
    fit.sort(key=lambda each: (each not in machine.pinned, free[each]))
    count = _count(needs)
    return tuple(sorted(fit[:count])) if len(fit) >= count else None


def kept_for(machine: WorkerMachine, needs: Limits, used: Sequence[Use]) -> Use:
    """Returns what is reserved for a waiting task: also the devices with most room."""
    free = _free(machine, used)
    most = sorted(free, key=lambda each: -free[each])[: _count(needs)]
    return needs._replace(gpus=float(len(most))), tuple(most)


def _count(needs: Limits) -> int:
    return 1 if 0 < needs.gpus < 1 else int(needs.gpus)


def _free(machine: WorkerMachine, used: Sequence[Use]) -> dict[str, float]:
    """Returns which part of each device is free."""
    free = dict.fromkeys(machine.devices, 1.0)
    for needs, devices in used:
        for each in devices:
            if each in free:
                free[each] -= needs.gpus / len(devices)
    return free
