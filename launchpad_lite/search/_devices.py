"""The machine of a worker, and the devices that its process sees."""

import contextlib
import functools
import os
from pathlib import Path

from launchpad_lite.parts.devices import VISIBLE_DEVICES, machine_name, visible_devices
from launchpad_lite.search._messages import WorkerMachine

#: The devices that this process sees from now on: CUDA reads the variable once.
_pinned: tuple[str, ...] = ()


def machine_here() -> WorkerMachine:
    """Returns what workers of this process may use here."""
    return _machine()._replace(pinned=_pinned)


@functools.cache
def _machine() -> WorkerMachine:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # there is no limit of a container
        memory_bytes = min(memory_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    cpus = len(os.sched_getaffinity(0))
    return WorkerMachine(machine_name(), cpus, memory_bytes, visible_devices()[0])


def pin(devices: tuple[str, ...]) -> bool:
    """Restricts this process to these devices, finally; returns False if it sees others already."""
    global _pinned
    if devices and not _pinned:
        _machine()  # read before the variable changes
        os.environ[VISIBLE_DEVICES] = ",".join(devices)
        _pinned = devices
    return not devices or devices == _pinned
