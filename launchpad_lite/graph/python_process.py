"""The environment, flags and interpreter of a node's process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launchpad_lite.parts.settings import made_from


@dataclass(frozen=True)
class PythonProcess:
    """How the processes of a group are started; the shape is the original Launchpad's.

    Launchers that start no processes say so in the plan.

    Attributes:
        args: Flags for these nodes only, as if from their command line: `{"batch": 8}` is
            `--batch=8`, True is `--batch`, False is `--nobatch`, a list repeats the flag.
        env: Environment variables, added to those of the launch; None removes one. They are set
            before any code of the node is imported.
        interpreter: Path or name of another Python, of the same minor version as the launch's and
            with launchpad-lite installed; None is the launch's own.

    Example:
        lp.launch(program, processes={"actor": lp.PythonProcess(env={"OMP_NUM_THREADS": "1"})})
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    interpreter: str | None = None

    def __post_init__(self) -> None:
        _check_names("args", self.args)
        _check_names("env", self.env)
        for name, value in self.env.items():
            if value is not None:
                check_text(f"the environment variable {name}", value)
        if self.interpreter is not None:
            # Frozen, so that executables can be compared; paths become text.
            object.__setattr__(self, "interpreter", os.fspath(self.interpreter))

    @classmethod
    def of(cls, given: "PythonProcess | Mapping[str, Any]") -> "PythonProcess":
        """Takes an object or a dict: `{"env": {"OMP_NUM_THREADS": "1"}}`."""
        return made_from(cls, given, "lp.PythonProcess")

    def flags(self) -> list[str]:
        """Returns `args` as they stand on a command line."""
        found: list[str] = []
        for name, value in self.args.items():
            if value is True or value is None:
                found.append(f"--{name}")
            elif value is False:
                found.append(f"--no{name}")
            else:
                values = value if isinstance(value, list | tuple) else [value]
                found += [f"--{name}={each}" for each in values]
        return found

    def __str__(self) -> str:
        # Names only: values may be secrets, and plans are printed.
        parts = [f"env {', '.join(self.env)}" if self.env else "", " ".join(self.flags())]
        parts.append(self.interpreter or "")
        return "; ".join(part for part in parts if part)


def _check_names(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a dict by name, not {given!r}")
    for name in given:
        if not isinstance(name, str) or not name or "=" in name:
            raise ValueError(f"{what} cannot have the name {name!r}")
        check_text(f"the name {name!r} in {what}", name)


def check_text(what: str, value: object) -> None:
    """Refuses text that no variable or argument can have; the value may be a secret."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str or None, not {value!r}")
    if "\0" in value:
        raise ValueError(f"{what} holds a zero byte")
    try:
        os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: {error}") from None


PLAIN = PythonProcess()
