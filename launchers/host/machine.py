"""What a machine has that can be divided among the nodes of a program."""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launchers.host.grant import Grant
from launchers.host.memory import memory_bytes
from launchpad_lite.parts.devices import visible_devices


class Machine(NamedTuple):
    """The resources of a machine, or the part of them that may be used."""

    cores: tuple[int, ...]
    ram_bytes: int
    gpus: tuple[str, ...] = ()  # as `CUDA_VISIBLE_DEVICES` names them
    gpus_shown_by: str = "/dev shows"  # for messages, as is its name
    binds: bool = True  # whether processes can be bound to cores
    limits: bool = True  # whether the memory of processes can be limited
    name: str = "this machine"
    is_here: bool = True

    @classmethod
    def here(cls) -> "Machine":
        """Returns this machine, as far as this process may use it."""
        binds = hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(0)) if binds else range(os.cpu_count() or 1)
        gpus, source = visible_devices()
        # Other systems accept the limit, and ignore it.
        limits = sys.platform == "linux"
        return cls(tuple(cores), memory_bytes(), gpus, source, binds=binds, limits=limits)

    @classmethod
    def decode(cls, fields: Mapping[str, Any], name: str) -> "Machine":
        """Returns the machine with these fields, as the host of this name."""
        lists = {each: tuple(fields[each]) for each in ("cores", "gpus")}
        shown_by = f"on {name} {fields['gpus_shown_by']}"
        rest = {"gpus_shown_by": shown_by, "name": name, "is_here": False}
        return cls(**{**fields, **lists, **rest})

    def without(self, grants: Iterable[Grant]) -> "Machine":
        """Returns what these grants of workers leave of it."""
        granted = list(grants)
        cores = {core for grant in granted for core in grant.cores}
        gpus = {gpu for grant in granted for gpu in grant.devices}
        return self._replace(
            cores=tuple(core for core in self.cores if core not in cores),
            ram_bytes=self.ram_bytes - sum(grant.ram_bytes or 0 for grant in granted),
            gpus=tuple(gpu for gpu in self.gpus if gpu not in gpus),
        )

    def limited(self, *, cpu: float | None, ram_gib: float | None, gpu: float | None) -> "Machine":
        """Returns the part of it that may be used; None: all."""
        return self._replace(
            cores=self.cores if cpu is None else self.cores[: max(1, round(cpu))],
            ram_bytes=self.ram_bytes if ram_gib is None else int(ram_gib * (1 << 30)),
            gpus=self.gpus if gpu is None else self.gpus[: int(gpu)],
        )
