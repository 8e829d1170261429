"""Sends the values of absl flags, and other set-up of the script, to workers.

A worker does not see the command line, does not run the script again and
imports only what its node needs. So each flag is sent with its definition, which is used until the
module that defines it is imported there, if ever.
"""

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

from courier import dumps
from launchpad_lite.process import set_up
from launchpad_lite.process._logging import LoggingSetup
from launchpad_lite.process.flags import loaded_flags, mark_as_parsed


class FlagSnapshot(NamedTuple):
    """Values and definitions of all flags, logging, and functions that run first. Picklable."""

    values: Mapping[str, bytes]
    definitions: Mapping[str, bytes]
    logging: LoggingSetup
    set_up: bytes

    @classmethod
    def take(cls) -> "FlagSnapshot":
        """Returns the flags of this process; none where nothing has imported absl."""
        values: dict[str, bytes] = {}
        definitions: dict[str, bytes] = {}
        absl = loaded_flags()
        for name in () if absl is None else absl.FLAGS:
            if (value := _dumps((absl.FLAGS[name].value,))) is not None:
                values[name] = value
                found = absl.FLAGS[name]
                if (flag := _dumps((type(found), dict(vars(found))))) is not None:
                    definitions[name] = flag
        return cls(values, definitions, LoggingSetup.take(), set_up.pickled())

    def prepare(self) -> "FlagSnapshot":
        """Does the set-up before the user's modules are imported; returns the set-up after that."""
        self.apply()
        set_up.call(self.set_up)
        return self._replace(logging=LoggingSetup.take())

    def apply(self) -> None:
        """Sets the flags in this process, also those of modules that it has not imported."""
        set_up.received = self.set_up
        mark_as_parsed()
        if self.values:
            self._apply_values()
        self.logging.apply()

    def _apply_values(self) -> None:
        from absl import flags

        for name, definition in self.definitions.items():
            if name not in flags.FLAGS and (parts := _loads(definition)) is not None:
                kind, state = parts
                flag = kind.__new__(kind)
                flag.__dict__.update(state)
                # The module that defines it may define it again; the value stays.
                flag.allow_override = True
                flags.FLAGS[name] = flag
        for name, value in self.values.items():
            if name in flags.FLAGS and (loaded := _loads(value)) is not None:
                flags.FLAGS[name].value = loaded[0]
                flags.FLAGS[name].using_default_value = False


def _loads(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception:  # noqa: BLE001 - of a module that nodes do not import, and may not have
        return None


def _dumps(value: object) -> bytes | None:
    try:
        return dumps(value)
    except Exception:  # noqa: BLE001 - a value that cannot be pickled keeps its default there
        return None
