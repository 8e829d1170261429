"""The values of absl flags, and what else the script has set up, on their way into workers.

A worker does not see the command line, does not run the script again and
imports only what its node needs. So each flag travels with its definition,
which stands in until the module that defines it is imported there, if ever.
"""

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

from courier._parcel import dumps
from launchpad_lite import _set_up
from launchpad_lite._flags import loaded_flags, mark_as_parsed
from launchpad_lite._logging import LoggingSetup


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
                if (flag := _dumps(_parts_of(absl.FLAGS[name]))) is not None:
                    definitions[name] = flag
        return cls(values, definitions, LoggingSetup.take(), _set_up.pickled())

    def prepare(self) -> "FlagSnapshot":
        """Does what comes before the user's modules are imported; returns what is applied after that."""
        self.apply()
        _set_up.call(self.set_up)
        return self._replace(logging=LoggingSetup.take())

    def apply(self) -> None:
        """Gives this process the flags, those of modules that it has not imported too."""
        _set_up.received = self.set_up
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
                # The module that defines it may do so again, and the value stays.
                flag.allow_override = True
                flags.FLAGS[name] = flag
        for name, value in self.values.items():
            if name in flags.FLAGS and (loaded := _loads(value)) is not None:
                flags.FLAGS[name].value = loaded[0]
                flags.FLAGS[name].using_default_value = False


def _parts_of(flag: Any) -> tuple[type, dict[str, Any]]:
    return type(flag), dict(flag.__dict__)


def _loads(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception:  # noqa: BLE001 - of a module that nodes do not import, and may not have
        return None


def _dumps(value: object) -> bytes | None:
    try:
        return dumps(value)
    except Exception:  # noqa: BLE001 - a value that cannot travel keeps its default there
        return None
