"""This machine, and the accelerators that programs of this process may use."""

import contextlib
import os
import socket
from pathlib import Path

#: The variable with the devices of CUDA programs: a list of indices or UUIDs.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> tuple[tuple[str, ...], str]:
    """Returns the accelerators that programs of this process may see, and the source of that."""
    listed = os.environ.get(VISIBLE_DEVICES)
    if listed is not None:
        names: list[str] = []
        for name in listed.split(","):
            # As CUDA does, ignores all after the first invalid entry.
            if not name.strip() or name.strip().startswith("-"):
                break
            names.append(name.strip())
        return tuple(names), f"{VISIBLE_DEVICES}={listed} shows"
    count = sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal())
    return tuple(map(str, range(count))), "/dev shows"


def machine_name() -> str:
    """Returns an identity of this machine, which all its processes share."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"
