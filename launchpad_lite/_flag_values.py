"""The values of absl flags on their way into workers.

A worker does not see the command line. Flags of imported modules exist there
once the module is imported and only need their values; flags of the script
itself, which is not run again, must be defined anew.
"""

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from absl import flags


@dataclass(frozen=True)
class FlagSnapshot:
    """Values of all flags, and the definitions of those of the script. Picklable."""

    values: Mapping[str, bytes]
    definitions: Mapping[str, bytes]

    @classmethod
    def take(cls) -> "FlagSnapshot | None":
        """Returns the flags of this process; None if none were parsed."""
        if not flags.FLAGS.is_parsed():
            return None
        own = {flag.name for flag in _flags_of_script()}
        values: dict[str, bytes] = {}
        definitions: dict[str, bytes] = {}
        for name in flags.FLAGS:
            if (value := _dumps(flags.FLAGS[name].value)) is not None:
                values[name] = value
                if name in own and (flag := _dumps(_parts_of(flags.FLAGS[name]))) is not None:
                    definitions[name] = flag
        return cls(values, definitions)

    def apply(self) -> None:
        """Gives this process the flags: those that are defined by now, and the script's."""
        for name, definition in self.definitions.items():
            if name not in flags.FLAGS:
                kind, state = pickle.loads(definition)
                flag = kind.__new__(kind)
                flag.__dict__.update(state)
                flags.FLAGS[name] = flag
        flags.FLAGS.mark_as_parsed()
        for name, value in self.values.items():
            if name in flags.FLAGS:
                flags.FLAGS[name].value = pickle.loads(value)
                flags.FLAGS[name].using_default_value = False


def _flags_of_script() -> list[Any]:
    by_module: Mapping[str, list[Any]] = flags.FLAGS.flags_by_module_dict()
    names = set(by_module)
    # absl names the script's module after its file.
    script = {name for name in names if name == "__main__" or name.endswith(".py")}
    return [flag for name in script | _main_name() for flag in by_module.get(name, [])]


def _main_name() -> set[str]:
    return {sys.argv[0]} if sys.argv else set()


def _parts_of(flag: Any) -> tuple[type, dict[str, Any]]:
    return type(flag), dict(flag.__dict__)


def _dumps(value: object) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 - a value that cannot travel keeps its default there
        return None
