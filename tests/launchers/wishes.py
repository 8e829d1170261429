"""Nodes that ask for something and never run."""

from collections.abc import Mapping, Sequence
from typing import Any

import launchpad_lite as lp
from launchpad_lite.launching import Executable

Wish = Mapping[str, Any]


def executables(
    groups: Mapping[str, Sequence[Wish]], **processes: Mapping[str, Any]
) -> list[Executable]:
    """Returns what a program of these groups would be; each entry is what one node asks for."""
    return [
        Executable(
            label,
            replica,
            None,  # type: ignore[arg-type] - nobody runs it
            (),
            lp.Resources.of({name: value for name, value in wish.items() if name != "together"}),
            "",
            process=lp.PythonProcess.of(processes.get(label, {})),
            together=wish.get("together"),
        )
        for label, wishes in groups.items()
        for replica, wish in enumerate(wishes)
    ]


def cpu(*wishes: float) -> list[Wish]:
    return [{"cpu": wish} for wish in wishes]


def gpu(*wishes: float) -> list[Wish]:
    return [{"gpu": wish} for wish in wishes]
