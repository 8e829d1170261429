"""What a worker gets of its host. The worker applies it before any code of the user runs."""

import contextlib
import os
import resource
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from launchpad_lite.parts.devices import VISIBLE_DEVICES

#: Prefixes of variables that only a starting interpreter or C library reads: too late after a fork.
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_")


@dataclass(frozen=True)
class Grant:
    """What one worker gets. The launcher sends it to the agent as JSON."""

    cores: tuple[int, ...] = ()  # none: its threads may run anywhere
    ram_bytes: int | None = None  # for each of its processes; None: any
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None removes a variable
    interpreter: str | None = None  # None: the agent's

    @property
    def devices(self) -> tuple[str, ...]:
        """The accelerators that it names."""
        visible = self.environment.get(VISIBLE_DEVICES) or ""
        return tuple(device for device in visible.split(",") if device)

    @property
    def needs_interpreter(self) -> bool:
        """Whether a fork of the agent is not enough, and a new interpreter must start."""
        return self.interpreter is not None or any(
            name.startswith(_READ_AT_START) for name in self.environment
        )

    def apply(self) -> None:
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.cores and hasattr(os, "sched_setaffinity"):
            # A core may have gone since the plan was made; then the node runs where it can.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        if self.ram_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            is_free = hard == resource.RLIM_INFINITY
            limit = self.ram_bytes if is_free else min(self.ram_bytes, hard)
            # Before the limit, because Python 3.15 loads what this needs when it is first used.
            traceback.format_stack(limit=1)
            # Not RLIMIT_AS: CUDA and threads reserve much more address space than they use.
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
