"""Sends the values of absl flags, `logging`, `warnings` and other set-up of the script to workers.

A worker does not see the command line, does not run the script again and
imports only what its node needs. So each flag is sent with its definition, which is used until the
module that defines it is imported there, if ever.
"""

import logging
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from courier import dumps
from launchpad_lite.process import set_up
from launchpad_lite.process.flags import loaded_flags, mark_as_parsed


class LoggingSetup(NamedTuple):
    """The state of `logging.basicConfig`, `Logger.setLevel` and `warnings`; no other handlers."""

    levels: Mapping[str, int]  # levels of loggers that have their own, by name; "" is the root
    #: Format and date format of the root's output to stdout or stderr; None: there is none.
    format: tuple[str, str | None] | None
    #: Filters of warnings; categories that are not built in by name.
    filters: Sequence[tuple[Any, ...]]
    is_of_absl: bool = False  # whether the root has the handler of absl, which `app.run` sets

    @classmethod
    def take(cls) -> "LoggingSetup":
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels = {
            name: each.level
            for name, each in loggers.items()
            if isinstance(each, logging.Logger)
            and each.level != (logging.NOTSET if name else logging.WARNING)
        }
        filters = [(act, text, _named(kind), *at) for act, text, kind, *at in warnings.filters]
        if (absl := sys.modules.get("absl.logging")) and absl.get_absl_handler() in root.handlers:
            return cls(levels, None, filters, is_of_absl=True)
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for handler in root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                used = handler.formatter or logging.Formatter()
                return cls(levels, (used._fmt or logging.BASIC_FORMAT, used.datefmt), filters)
        return cls(levels, None, filters)

    def apply(self) -> None:
        """Applies it to this process, where the root has no handler yet."""
        if self.is_of_absl:
            from absl import logging as absl_logging

            absl_logging.use_absl_handler()
        if self.format is not None:
            logging.basicConfig(format=self.format[0], datefmt=self.format[1])
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        warnings.resetwarnings()
        filters = [(act, text, _category(name), *at) for act, text, name, *at in self.filters]
        warnings.filters[:] = filters  # type: ignore[index]


def _named(category: Any) -> Any:
    is_ours = category.__module__ != "builtins"
    return (category.__module__, category.__qualname__) if is_ours else category


def _category(named: Any) -> Any:
    is_ours = isinstance(named, tuple)
    return _Category(named[1], (), {"__module__": named[0]}) if is_ours else named


class _Category(type):
    """Replaces, in a filter, the category of its name, which may not be imported here."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _named(cls) in map(_named, subclass.__mro__)


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
